"""Train with DataParallel: one process drives all devices of one machine. The baseline to compare with.

    elasticd run workers/data_parallel.py
    python workers/data_parallel.py                # without a launcher

**When**: hardly ever. It is one line in a script for one device, and no launcher is needed. ddp.py with
as many workers as devices does the same work faster, and on several machines.

**Cost**: each step copies the model from the first device to all others. The first device also gathers the
outputs and adds up the gradients, so it needs more memory than the others. One Python process issues the work
of all devices, and its lock lets one thread run at a time. Without a GPU there is one device, and
DataParallel does nothing.

**When the worker dies**: it starts again, and loads the snapshot of the last whole epoch. The loss of one
device is the loss of the process, and so of all devices.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from digits import digest, network, options_parser, quality, read_digits, say
from elasticd import worker
from gpt import positive
from restarting import add_snapshot_dir, join_world, leave, load_snapshot, run, save_snapshot


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--epochs", type=positive, default=30)
    parser.add_argument("--global-batch", type=positive, default=64, help="images a step")
    add_snapshot_dir(parser, "data_parallel")
    options = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("DataParallel is one process for all devices: give it one worker, or use ddp.py")

    device, _ = join_world()  # a world of one, for the snapshot and the evaluation
    train_set, held_out = read_digits()
    model = network(options.seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    folder: Path | None = options.snapshot_dir
    snapshot = load_snapshot(folder, 0, device)
    if snapshot is not None:
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
    step, first_epoch = (snapshot["step"], snapshot["epoch"]) if snapshot else (0, 0)
    replicas = nn.DataParallel(model)  # on all GPUs that there are
    say(f"{len(replicas.device_ids) or 1} devices, {first_epoch} epochs done")

    for epoch in range(first_epoch, options.epochs):
        random = torch.Generator().manual_seed(options.seed * 1_000_003 + epoch)  # an order of each epoch
        order = RandomSampler(train_set, generator=random)
        began, images_seen = time.monotonic(), 0
        for images, labels in DataLoader(train_set, options.global_batch, sampler=order):
            loss = F.cross_entropy(replicas(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step, images_seen = step + 1, images_seen + len(images)
        rate = images_seen / (time.monotonic() - began)
        say(f"epoch {epoch + 1:>3}, step {step:>5}  {rate:,.0f} images/s")
        if folder is not None:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_snapshot(folder, {"step": step, "epoch": epoch + 1, **parts})
            worker.checkpointed(folder / "snapshot.pt")
    say(quality(model, held_out))
    say(f"weights: {digest(model)}")


if __name__ == "__main__":
    leave(run("data_parallel", main))
