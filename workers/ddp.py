"""Train with DistributedDataParallel: each worker has the whole model, and its own share of the data.

    elasticd run --min 2 --max 8 workers/ddp.py
    torchrun --standalone --nproc-per-node 2 --max-restarts 5 workers/ddp.py
    python workers/ddp.py                          # one process, no launcher

**When**: the model, its gradients and its optimizer's state fit on one device. Try this before anything
else.

**Cost**: each step sends the gradients once around, about twice the model's size from each worker, mostly
while the backward pass still computes. Each step takes as long as the slowest worker.

**When a worker dies**: all workers start again, in a world of any size, and load the snapshot of the last
whole epoch; at most one epoch is repeated. The global batch stays the same, so the learning rate does,
too. The programs with elasticd.worker, such as accumulation.py, lose no step: their survivors go on.

All is torch, except for two calls: worker.report() makes the loss a metric, and worker.checkpointed() tells
elasticd of a snapshot, so that a planned resize follows a snapshot and repeats nothing. Under torchrun both
do nothing.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from digits import digest, network, options_parser, quality, read_digits, say
from elasticd import worker
from gpt import positive
from restarting import add_snapshot_dir, join_world, leave, load_snapshot, run, save_snapshot


def parse_options() -> argparse.Namespace:
    parser = options_parser(__doc__)
    parser.add_argument("--epochs", type=positive, default=30)
    parser.add_argument("--global-batch", type=positive, default=64, help="images a step, in any world")
    add_snapshot_dir(parser, "ddp")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    device, local_rank = join_world()
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.global_batch < world:
        raise ValueError(f"a global batch of {options.global_batch} is too small for {world} workers")
    train_set, held_out = read_digits()
    model = network(options.seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    folder: Path | None = options.snapshot_dir
    snapshot = load_snapshot(folder, local_rank, device)
    if snapshot is not None:
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
    step, first_epoch = (snapshot["step"], snapshot["epoch"]) if snapshot else (0, 0)
    say(f"{world} workers, {first_epoch} epochs done, snapshots: {folder or 'none: give --snapshot-dir'}")

    replica = DistributedDataParallel(model, [device.index] if device.type == "cuda" else None)
    # drop_last leaves out the rest that cannot be shared equally; otherwise some samples would come twice.
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        train_set, world, rank, shuffle=True, seed=options.seed, drop_last=True
    )
    loader = DataLoader(train_set, options.global_batch // world, sampler=sampler, drop_last=True)
    for epoch in range(first_epoch, options.epochs):
        sampler.set_epoch(epoch)  # otherwise each epoch has the same order
        began, images_seen = time.monotonic(), 0
        for images, labels in loader:
            loss = F.cross_entropy(replica(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # adds the gradients up over the workers, and divides by their number
            optimizer.step()
            step, images_seen = step + 1, images_seen + len(images)
            worker.report(loss=loss.detach(), samples=len(images))
        rate = images_seen / (time.monotonic() - began)
        say(f"epoch {epoch + 1:>3}, step {step:>5}  {rate * world:,.0f} images/s, {rate:,.0f} per worker")
        if folder is not None and local_rank == 0:  # one worker of each node: nodes may share no disk
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_snapshot(folder, {"step": step, "epoch": epoch + 1, **parts})
            worker.checkpointed(folder / "snapshot.pt")
    say(quality(model, held_out))
    say(f"weights: {digest(model)}")


if __name__ == "__main__":
    leave(run("ddp", main))
