"""Train a small GPT on text with DistributedDataParallel, and survive failures of machines.

    elasticd run --min 2 --max 8 workers/train_gpt.py
    torchrun --standalone --nproc-per-node 4 --max-restarts 5 workers/train_gpt.py
    python workers/train_gpt.py                    # one process, no launcher

**When**: a long training of a model that fits on one device, as a plain torchrun script. Its model and
text are in gpt.py, and its snapshots in restarting.py. It shows what such a script needs so that it can
be killed at any moment and started again in a world of another size:

* Snapshots are whole or absent, and contain everything that training continues from. One worker of
  each node writes them, and a new world continues from the newest snapshot of any of its nodes, so
  the nodes need no shared disk.
* The samples of a step are a function of the seed and the position in the data. The global batch is
  constant and is dealt to the present workers, so a resize neither skips nor repeats a sample, and
  changes the result of a step by rounding only.
* On SIGTERM the workers finish the step together, save, and exit.

**Cost**: ddp.py's. Training waits while a snapshot is written, every ``--snapshot-every`` steps.

**When a worker dies**: the others save the last step that they have made (on a GPU they cannot), and all
start again from the newest snapshot.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
import zlib
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from gpt import (
    GPT,
    Shape,
    Text,
    continue_text,
    held_out_loss,
    learn,
    learning_rate,
    options_parser,
    parsed,
    positive,
    read_text,
    share,
    windows,
)
from restarting import add_snapshot_dir, is_lost_peer, join_world, leave, load_snapshot, save_snapshot

# ---------------------------------------------------------------- training


class StopRequest:
    """The signal that asked this worker to stop; 0: none. The present step continues."""

    def __init__(self) -> None:
        self.received = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: object) -> None:
        self.received = number


def agree(loss: Tensor, stop: StopRequest) -> tuple[float, bool]:
    """Return the whole batch's mean loss, and whether any worker was asked to stop: all must leave after the
    same step, or some would wait for workers that have left."""
    told = torch.tensor([float(loss), float(stop.received > 0)], device=loss.device)
    dist.all_reduce(told)
    return float(told[0]), bool(told[1])


def say(message: str) -> None:
    if dist.get_rank() == 0:
        print(message + "\n", end="", flush=True)  # one write, which no other worker's can cut in two


class Trainer:
    """The model and its training. ``step``: the steps taken. ``position``: the windows used of the data."""

    def __init__(
        self, options: argparse.Namespace, shape: Shape, text: Text, device: torch.device, local_rank: int
    ) -> None:
        self.options, self.text, self.device = options, text, device
        self.rank, self.world, self.local_rank = dist.get_rank(), dist.get_world_size(), local_rank
        self.folder: Path | None = options.snapshot_dir
        self.shape, self.windows_total = shape, (len(text.train) - 1) // shape.context
        torch.manual_seed(options.seed)
        self.model = GPT(self.shape).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        self.step, self.position, self.loss_before = 0, 0, math.nan
        # A snapshot with other values is of another run, and is refused.
        self.identity = {"shape": asdict(self.shape), "seed": options.seed, "text": text.checksum}
        self.restore()
        self.replica = DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def restore(self) -> None:
        """Load the newest snapshot; if there is none, begin.

        Raises ValueError if the snapshot is of another run.
        """
        snapshot = load_snapshot(self.folder, self.local_rank, self.device)
        if snapshot is None:
            parameters = sum(p.numel() for p in self.model.parameters())
            say(f"{parameters:,} parameters, {len(self.text.train):,} bytes of text, {self.world} workers")
            say(f"snapshots: {self.folder or 'none, as no run is named: give --snapshot-dir'}")
            self.loss_before = held_out_loss(self.model, self.text.held_out, self.shape, self.device)
            say(f"held-out loss before training: {self.loss_before:.3f} nats/byte")
            self.save()  # a restart before the first step begins here
            return
        for key, value in self.identity.items():
            if snapshot[key] != value:
                raise ValueError(
                    f"the snapshot in {self.folder} has another {key} ({snapshot[key]}, not {value}): "
                    "give the same options again, or another --snapshot-dir"
                )
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.step, self.position = snapshot["step"], snapshot["position"]
        self.loss_before = snapshot["loss_before"]
        say(f"resumed after step {self.step} of {self.options.steps}, {self.world} workers")

    def save(self) -> None:
        if self.folder is None or self.local_rank != 0:
            return
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        place = {"step": self.step, "position": self.position, "loss_before": self.loss_before}
        save_snapshot(self.folder, self.identity | parts | place)

    def take_step(self) -> Tensor:
        """Train on one global batch. Return this worker's part of the batch's mean loss."""
        options = self.options
        # The random numbers of a step (for dropout, if you add it) are a function of seed, step and
        # rank, so there is no random state to restore after a restart.
        torch.manual_seed(zlib.crc32(f"{options.seed} {self.step} {self.rank}".encode()))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, options.steps, options.lr)

        batch = options.global_batch
        mine = share(options.seed, self.position, batch, self.windows_total, self.rank, self.world)
        inputs, targets = windows(self.text.train, mine, self.shape, self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.replica(inputs)
        loss = learn(logits, targets, batch * self.shape.context, self.model, self.optimizer)
        self.step, self.position = self.step + 1, self.position + batch
        return loss

    def train(self) -> int:
        """Take all remaining steps, unless a signal asks to stop. Return the signal, else 0."""
        options, stop = self.options, StopRequest()
        since, step_since = time.monotonic(), self.step
        while self.step < options.steps:
            loss = self.take_step()
            mean_loss, stopping = agree(loss, stop)
            is_last = self.step == options.steps
            if stopping or is_last or self.step % options.snapshot_every == 0:
                self.save()
            if is_last or self.step % options.log_every == 0:
                now = time.monotonic()
                tokens = (self.step - step_since) * options.global_batch * self.shape.context
                say(f"step {self.step:>5}  loss {mean_loss:.3f}  {tokens / (now - since):,.0f} tokens/s")
                since, step_since = now, self.step
            if stopping:
                where = f"saved in {self.folder}" if self.folder else "nothing saved"
                say(f"asked to stop: left after step {self.step}, {where}")
                return stop.received or signal.SIGTERM
        return 0

    def run(self) -> int:
        """Train, and print the held-out loss and a sample. Return the exit status."""
        try:
            asked_to_stop = self.train()
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            # No collective runs between the change of the weights and of ``step``, so this worker's
            # state is whole. On a GPU the broken collective may still run, and block a copy.
            if self.device.type == "cpu":
                self.save()
            sys.stderr.write(f"rank {self.rank}: lost a peer after step {self.step}\n")
            return 1
        if asked_to_stop:
            return 128 + asked_to_stop  # as in a shell; 0 would mean that training is complete

        loss_after = held_out_loss(self.model, self.text.held_out, self.shape, self.device)
        say(f"held-out loss: {self.loss_before:.3f} -> {loss_after:.3f} nats/byte")
        if self.rank == 0 and self.options.sample:
            prompt = (self.options.prompt or ("\n" if self.options.data else "def ")).encode()
            count, seed = self.options.sample, self.options.seed
            say(f"a sample:\n{continue_text(self.model, prompt, self.shape, count, self.device, seed)}")
        return 0


# ---------------------------------------------------------------- the program


def parse_options() -> tuple[argparse.Namespace, Shape]:
    parser = options_parser(__doc__)
    add = parser.add_argument
    add_snapshot_dir(parser, "train_gpt")
    add("--snapshot-every", type=positive, default=20, metavar="STEPS")
    add("--prompt", help="what the sample begins with")
    add("--sample", type=int, default=300, metavar="BYTES")
    return parsed(parser)


def require_same_text(text: Text, device: torch.device) -> None:
    checksum = torch.tensor([text.checksum], dtype=torch.int64, device=device)
    dist.broadcast(checksum, 0)
    if int(checksum) != text.checksum:
        raise ValueError("this node's text differs from rank 0's: give all nodes the same --data or Python")


@record
def main() -> int:
    options, shape = parse_options()
    device, local_rank = join_world()
    try:
        text = read_text(options.data)
        require_same_text(text, device)
        status = Trainer(options, shape, text, device, local_rank).run()
    except ValueError as error:  # a restart would fail in the same way
        print(f"train_gpt: {error}", file=sys.stderr)  # each worker, as the launcher stops the others
        return 2
    if status == 0:
        dist.destroy_process_group()  # else the exit might wait for lost workers
    return status


if __name__ == "__main__":
    leave(main())
