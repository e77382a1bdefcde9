"""Train with a batch that grows with the world, and a learning rate that follows.

    elasticd run --min 2 --max 8 workers/growing_batch.py --rule sqrt
    torchrun --standalone --nproc-per-node 2 workers/growing_batch.py --rule linear
    python workers/growing_batch.py                # one process, no launcher

**When**: more workers are to finish an epoch sooner, in fewer and larger steps. Where the result must not
depend on the number of workers, keep the global batch constant instead (accumulation.py, imbalanced.py).

**Rules** for the rate when the batch is k times the one that ``--lr`` was chosen for (``--lr-batch``):

* ``linear``: k times. For SGD, up to some batch size (Goyal et al., 2017), with a warm-up: the first steps
  at a large rate would go astray.
* ``sqrt``: the square root of k times. For Adam and its kin (Malladi et al., 2022).
* ``none``: the same rate. An epoch has fewer steps, so it learns less.

**Cost**: above some batch no rule helps: an epoch in a larger world learns less than in a smaller one.

**When a worker dies**: the survivors keep their process and their committed steps. Their world's batch
and rate are smaller until the replacement joins. Each sample of an epoch is still used once, but the
result depends on which worlds there were.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from digits import network, options_parser, quality, read_digits, say
from elasticd import worker
from gpt import positive

RULES = ("linear", "sqrt", "none")


@worker.run
def train(state: worker.State, held_out: TensorDataset, options: argparse.Namespace) -> None:
    """Train. Called again after each change of world, with the state of the last committed step."""
    device = worker.device()
    for step in state.steps():
        for images, labels in step:
            step.backward(F.cross_entropy(state.model(images.to(device)), labels.to(device)))
        state.optimizer.step()  # at the scheduler's rate, times what the rule says
        state.optimizer.zero_grad()
        state.scheduler.step()
        state.commit()
        if state.step % options.log_every == 0:
            say(f"step {state.step:>5}  epoch {step.epoch}, a batch of {step.samples}")
    say(quality(state.model, held_out))


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--epochs", type=positive, default=30)
    parser.add_argument("--worker-batch", type=positive, default=32, help="images a step of each worker")
    parser.add_argument("--rule", choices=RULES, default="sqrt")
    parser.add_argument("--lr-batch", type=positive, default=32, help="the batch that --lr was chosen for")
    parser.add_argument("--warm-up", type=positive, default=20, metavar="STEPS")
    options = parser.parse_args()
    data_set, held_out = read_digits()
    model = network(options.seed).to(worker.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / options.warm_up, 1.0, options.warm_up)
    data = worker.Data(
        data_set,
        worker_batch=options.worker_batch,
        rate=options.rule,
        rate_batch=options.lr_batch,
        seed=options.seed,
        epochs=options.epochs,
    )
    train(worker.State(model=model, optimizer=optimizer, scheduler=scheduler, data=data), held_out, options)


if __name__ == "__main__":
    main()
