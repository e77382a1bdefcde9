"""Train with gradient accumulation: a batch that is too large for the device, in pieces that are added up.

    elasticd run --min 2 --max 8 workers/accumulation.py
    torchrun --standalone --nproc-per-node 2 workers/accumulation.py
    python workers/accumulation.py                 # one process, no launcher

**When**: the batch that the model learns best from needs more memory for activations than the workers have,
or sending the gradients takes as long as computing them.

**How**: each worker cuts its share of the global batch into pieces of at most ``--piece`` images. The
backward passes of all pieces but the last run under ``no_sync()``, so the gradients are sent once a step,
not once a piece (``--sync-each`` shows the difference). The global batch is the same in a world of any
size: with fewer workers each has more pieces, and needs no more memory. Losses are summed and divided by
the global batch, so pieces and shares of unequal size weigh what they should.
``worker.Data(virtual_ranks=..., accumulate=...)`` does all this by itself, and can be consistent to the
last bit.

**Cost**: a step takes as many passes as there are pieces. The last backward pass alone hides the sending.

**When a worker dies**: the survivors keep their process and their committed steps, and share the
interrupted batch out again, in more pieces each.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from digits import network, options_parser, quality, read_digits, say
from elasticd import worker
from gpt import positive


def global_batch(step: int, options: argparse.Namespace, samples: int) -> torch.Tensor:
    """Return the indices of the step's samples: a function of the step alone, the same on all workers."""
    random = torch.Generator().manual_seed(hash((options.seed, step)))
    return torch.randperm(samples, generator=random)[: options.global_batch]


@worker.run
def train(
    state: worker.State, data: TensorDataset, held_out: TensorDataset, options: argparse.Namespace
) -> None:
    """Train. Called again after each change of world, with the state of the last committed step."""
    rank, world = worker.rank(), worker.world_size()
    images, labels = (tensor.to(worker.device()) for tensor in data.tensors)
    since, step_since = time.monotonic(), state.step
    for step in state.steps(options.steps):
        share = global_batch(step, options, len(labels))[rank::world]
        pieces = share.split(options.piece)
        for number, piece in enumerate(pieces, 1):
            adds_up = number == len(pieces) or options.sync_each
            with contextlib.nullcontext() if adds_up else state.model.no_sync():
                loss = F.cross_entropy(state.model(images[piece]), labels[piece], reduction="sum")
                # DistributedDataParallel divides the sum over the workers by their number.
                (loss * world / options.global_batch).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit()
        if state.step % options.log_every == 0:
            rate = (state.step - step_since) / (time.monotonic() - since)
            say(f"step {state.step:>5}  {rate:.1f} steps/s  {world} workers, {len(pieces)} pieces each")
    say(quality(state.model, held_out))


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--global-batch", type=positive, default=256, help="images a step, in any world")
    parser.add_argument("--piece", type=positive, default=32, help="images that fit on a device at once")
    parser.add_argument("--sync-each", action="store_true", help="add up after each piece, to compare")
    options = parser.parse_args()
    data, held_out = read_digits()
    if not worker.world_size() <= options.global_batch <= len(data):
        parser.error(
            f"a global batch of {options.global_batch}: give at least one image for each worker, and at most "
            f"the {len(data)} that there are"
        )
    model = network(options.seed).to(worker.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    train(worker.State(model=model, optimizer=optimizer), data, held_out, options)


if __name__ == "__main__":
    main()
