"""Train the small GPT of gpt.py so that nobody has to start again when a worker dies.

    elasticd run --min 2 --max 8 --checkpoints ~/gpt workers/train_gpt_in_place.py
    torchrun --standalone --nproc-per-node 4 workers/train_gpt_in_place.py
    python workers/train_gpt_in_place.py           # one process, no launcher

The same training with elasticd.worker: survivors keep their process and go on at once, and data, steps,
random numbers and checkpoints are seen to. It is consistent: however many workers there were, and
whatever befell them, it ends with the same digest, as long as --virtual-ranks is the same. With --ddp
gradients are added up as DistributedDataParallel does it, and it ends with the same loss but for rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from typing import TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from elasticd import worker
from gpt import GPT, Shape, learning_rate, options_parser, parsed, positive, read_text


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets of a text; window n starts at n times the context."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        window = self.text[n * self.context : (n + 1) * self.context + 1].long()
        return window[:-1], window[1:]


@worker.run
def train(state: worker.State, options: argparse.Namespace) -> None:
    """Entered again, with the state of the last committed step, after each change of world."""
    print_once(f"{worker.world_size()} workers, {state.step} steps done")
    since, step_since = time.monotonic(), state.step
    for step in state.steps(options.steps):
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate(state.step, options.steps, options.lr)
        mine = torch.zeros((), device=worker.device())
        for inputs, targets in step:
            logits = state.model(inputs.to(worker.device()))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.to(worker.device()).flatten())
            step.backward(loss)
            mine += loss.detach() * (len(inputs) / step.samples)
        is_logged = (state.step + 1) % options.log_every == 0
        if is_logged and options.ddp:
            dist.all_reduce(mine)  # before the optimizer's step: between that and the commit nothing may fail
        nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        state.optimizer.step()
        state.optimizer.zero_grad()
        if is_logged:
            mean = mine if options.ddp else step.loss
            rate = (state.step + 1 - step_since) / (time.monotonic() - since)
            print_once(f"step {state.step + 1:>5}  loss {float(mean):.3f}  {rate:.1f} steps/s")
        state.commit()


def print_once(line: str, to: TextIO = sys.stdout) -> None:
    if worker.rank() == 0:
        print(line, file=to, flush=True)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all that was learnt."""
    found = hashlib.sha256()
    state = optimizer.state_dict()["state"]
    for tensor in (*model.state_dict().values(), *(t for values in state.values() for t in values.values())):
        found.update(tensor.cpu().numpy().tobytes())
    return found.hexdigest()


def parse_options() -> tuple[argparse.Namespace, Shape]:
    parser = options_parser(__doc__)
    parser.add_argument(
        "--virtual-ranks",
        type=positive,
        default=8,
        help="pieces of the batch, dealt onto the workers",
    )
    parser.add_argument("--ddp", action="store_true", help="add gradients up as DistributedDataParallel does")
    return parsed(parser)


def main() -> int:
    options, shape = parse_options()
    try:
        text = read_text(options.data).train
    except ValueError as error:  # what was asked for cannot be done; trying again would not help
        print_once(f"train_gpt_in_place: {error}", sys.stderr)
        return 2
    torch.manual_seed(options.seed)
    model = GPT(shape).to(worker.device())
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    data = worker.Data(
        Windows(text, options.context),
        global_batch=options.global_batch,
        virtual_ranks=options.virtual_ranks,
        shuffle=True,
        seed=options.seed,
        epochs=None,
        consistent=not options.ddp,
    )
    train(worker.State(model=model, optimizer=optimizer, data=data), options)
    print_once(f"weights and optimizer: {digest(model, optimizer)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
