"""Train the small GPT of gpt.py with its weights spread over the workers (FSDP2).

    elasticd run --min 2 --max 8 --checkpoints ~/gpt --checkpoint-every auto workers/train_gpt_fsdp.py
    torchrun --standalone --nproc-per-node 4 --max-restarts 5 workers/train_gpt_fsdp.py --checkpoints ~/gpt
    python workers/train_gpt_fsdp.py --checkpoints ~/gpt          # one process, no launcher

**When**: the model, its gradients and its optimizer's state do not fit on one device, or leave no room
for a larger batch. Otherwise train_gpt.py sends less.

**How**: each worker keeps a part of each layer, gathers the others' parts before it computes with the
layer, and forgets them after. With ``--bf16`` parts are gathered and computed with in bfloat16, and
gradients are added up in float32. With ``--recompute`` a layer keeps only its input, and is computed
again in the backward pass.

**Cost**: one and a half times the traffic of DistributedDataParallel, and a wait at each layer unless its
parts arrive while the layer before computes. ``--recompute`` costs a third more computing.

**When a worker dies**: its parts are gone with it, so all workers start again, in a world of any size.
They load the state from the nodes' memory if all parts are in it (with ``elasticd run --replicate 1``
also those of a lost node), else from disk. The steps since the last save (``--checkpoint-every``) are
repeated. A save costs the loop one copy. Samples and learning rates are as in train_gpt.py.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from elasticd import worker
from gpt import (
    GPT,
    Shape,
    Text,
    held_out_loss,
    learn,
    learning_rate,
    options_parser,
    parsed,
    read_text,
    share,
    windows,
    writable_folder,
)
from restarting import is_lost_peer, join_world, leave
from train_gpt import StopRequest, agree, require_same_text, say


def spread(model: GPT, *, bf16: bool) -> GPT:
    """Shard the model: a worker keeps a part of each block, and gathers the rest only to compute with it."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


class Trainer:
    def __init__(self, options: argparse.Namespace, shape: Shape, text: Text, device: torch.device) -> None:
        self.options, self.text, self.device = options, text, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.shape, self.windows_total = shape, (len(text.train) - 1) // shape.context
        torch.manual_seed(options.seed)
        model = GPT(self.shape, recompute=options.recompute)  # fully_shard moves each worker's part
        self.model = spread(model, bf16=device.type == "cuda" if options.bf16 is None else options.bf16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        self.checkpoints = worker.Checkpoints(options.checkpoints)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.step = self.checkpoints.load(self.state) or 0
        if self.step:
            where = f"from {self.checkpoints.tier}, {self.world} workers"
            say(f"resumed after step {self.step} of {options.steps} {where}")
        else:
            say(f"{len(text.train):,} bytes of text, {self.world} workers")

    def take_step(self) -> Tensor:
        """Train on one global batch. Return this worker's part of the batch's mean loss."""
        options, batch = self.options, self.options.global_batch
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, options.steps, options.lr)
        position = self.step * batch
        mine = share(options.seed, position, batch, self.windows_total, self.rank, self.world)
        inputs, targets = windows(self.text.train, mine, self.shape, self.device)
        logits = self.model(inputs)
        loss = learn(logits, targets, batch * self.shape.context, self.model, self.optimizer)
        self.step += 1
        return loss

    def train(self) -> int:
        """Take all remaining steps, unless a signal asks to stop. Return the signal, else 0."""
        options, stop = self.options, StopRequest()
        since, step_since = time.monotonic(), self.step
        while self.step < options.steps:
            loss = self.take_step()
            mean_loss, stopping = agree(loss, stop)
            is_last = self.step == options.steps
            if is_last or self.step % options.log_every == 0:
                rate = (self.step - step_since) / (time.monotonic() - since)
                say(f"step {self.step:>5}  loss {mean_loss:.3f}  {rate:.1f} steps/s")
            if stopping or is_last:
                taken = False
                while not taken:  # the save is skipped until the save before it is durable
                    self.checkpoints.wait()
                    taken = self.checkpoints.save(self.state, self.step)
            else:
                self.checkpoints.save_if_due(self.state, self.step)
            if stopping:
                self.checkpoints.wait()
                say(f"asked to stop: left after step {self.step}")
                return stop.received or signal.SIGTERM
        return 0

    def run(self) -> int:
        """Train, and print the held-out loss. Return the exit status."""
        try:
            asked_to_stop = self.train()
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            sys.stderr.write(f"rank {self.rank}: lost a peer after step {self.step}\n")
            return 1
        if asked_to_stop:
            return 128 + asked_to_stop
        say(f"held-out loss: {held_out_loss(self.model, self.text.held_out, self.shape, self.device):.4f}")
        return 0


def parse_options() -> tuple[argparse.Namespace, Shape]:
    parser = options_parser(__doc__)
    parser.add_argument(
        "--checkpoints",
        type=writable_folder,
        help="a folder that all nodes share (default: elasticd's --checkpoints)",
    )
    bf16 = "compute in bfloat16 (default: on GPUs only)"
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, help=bf16)
    parser.add_argument("--recompute", action="store_true", help="keep less for the backward pass")
    options, shape = parsed(parser)
    if not options.checkpoints and "ELASTICD_CHECKPOINTS" not in os.environ:
        parser.error("no folder for checkpoints: give --checkpoints to this script or to elasticd run")
    return options, shape


@record
def main() -> int:
    options, shape = parse_options()
    device, _ = join_world()
    try:
        text = read_text(options.data)
        require_same_text(text, device)
    except ValueError as error:  # a restart would fail in the same way
        print(f"train_gpt_fsdp: {error}", file=sys.stderr)  # each worker, as the launcher stops the others
        return 2
    status = Trainer(options, shape, text, device).run()
    if status == 0:
        dist.destroy_process_group()  # else the exit might wait for lost workers
    return status


if __name__ == "__main__":
    leave(main())
