"""Train the small GPT of gpt.py so that no other worker starts again when one dies.

    elasticd run --min 2 --max 8 --checkpoints ~/gpt workers/train_gpt_in_place.py
    torchrun --standalone --nproc-per-node 4 workers/train_gpt_in_place.py
    python workers/train_gpt_in_place.py           # one process, no launcher

**When**: this is the program to start from for long trainings of models that fit on one device. It has
everything on: constant global batch, consistent mode, checkpoints (``elasticd run --checkpoints``), metrics,
clipping, and by options mixed precision (``--bf16``), compilation (``--compile``) and recomputed activations
(``--recompute``).

**Cost**: about train_gpt.py's (``python -m tests.bench consistent`` compares the steps). ``--ddp`` adds
gradients up as DistributedDataParallel does.

**When a worker dies**: the survivors keep their process, their compiled code and every committed step, and
continue at once. The replacement joins at a commit. With the same --virtual-ranks the training ends with
the same digest, whatever the number of workers and their failures; with ``--ddp`` the final loss is the same
except for rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from elasticd import worker
from gpt import GPT, Parser, Shape, held_out_loss, learning_rate, options_parser, parsed, positive, read_text


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
def train(state: worker.State, held_out: Tensor, shape: Shape, options: argparse.Namespace) -> None:
    """Train. Called again after each change of world, with the state of the last committed step."""
    print_once(f"{worker.world_size()} workers, {state.step} steps done")
    since, step_since = time.monotonic(), state.step
    for step in state.steps(options.steps):
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate(state.step, options.steps, options.lr)
        mine = torch.zeros((), device=worker.device())
        for inputs, targets in step:
            with torch.autocast(worker.device().type, torch.bfloat16, enabled=options.bf16):
                logits = state.model(inputs.to(worker.device()))
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.to(worker.device()).flatten())
            step.backward(loss)
            mine += loss.detach() * (len(inputs) / step.samples)
        is_logged = (state.step + 1) % options.log_every == 0
        if is_logged and options.ddp:
            dist.all_reduce(mine)  # before the optimizer's step: a failure after it cannot be undone
        nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        state.optimizer.step()
        state.optimizer.zero_grad()
        if is_logged:
            mean = mine if options.ddp else step.loss
            rate = (state.step + 1 - step_since) / (time.monotonic() - since)
            print_once(f"step {state.step + 1:>5}  loss {float(mean):.3f}  {rate:.1f} steps/s")
        state.commit(loss=step.loss)  # which is known in consistent mode only
    bare = getattr(state.model, "module", state.model)
    loss_after = held_out_loss(bare, held_out, shape, worker.device())
    print_once(f"held-out loss: {loss_after:.4f} nats/byte")


def print_once(line: str) -> None:
    if worker.rank() == 0:
        print(line, flush=True)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256 of the weights and the optimizer's state."""
    found = hashlib.sha256()
    state = optimizer.state_dict()["state"]
    for tensor in (*model.state_dict().values(), *(t for values in state.values() for t in values.values())):
        found.update(tensor.cpu().numpy().tobytes())
    return found.hexdigest()


def parse_options(parser: Parser) -> tuple[argparse.Namespace, Shape]:
    parser.add_argument(
        "--virtual-ranks",
        type=positive,
        default=8,
        help="the parts of a batch, dealt to the workers",
    )
    add = parser.add_argument
    add("--bf16", action="store_true", help="compute in bfloat16; weights and sums stay in float32")
    add("--compile", action="store_true", help="compile the model")
    add("--recompute", action="store_true", help="keep less for the backward pass")
    add("--ddp", action="store_true", help="add gradients up as DistributedDataParallel does")
    return parsed(parser)


def main() -> None:
    parser = options_parser(__doc__)
    options, shape = parse_options(parser)
    with parser.checks():
        text = read_text(options.data)
        data = worker.Data(
            Windows(text.train, options.context),
            global_batch=options.global_batch,
            virtual_ranks=options.virtual_ranks,
            shuffle=True,
            seed=options.seed,
            epochs=None,
            consistent=not options.ddp,
        )
    torch.manual_seed(options.seed)
    model = GPT(shape, recompute=options.recompute).to(worker.device())
    if options.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    train(worker.State(model=model, optimizer=optimizer, data=data), text.held_out, shape, options)
    print_once(f"weights and optimizer: {digest(model, optimizer)}")


if __name__ == "__main__":
    main()
