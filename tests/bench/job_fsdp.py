"""The job of the sharded measurements: an FSDP2 model on gloo, as it is run under torchrun.

It writes what job.py writes. With BENCH_CHECKPOINTS it saves every tenth step in that folder with torch's
DCP, and begins with the newest checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.bench.job import BATCH, STEPS, WIDTH, mark, note
from tests.bench.whole_state import nested, put_back

SAVES_EVERY = 10
KEPT = 2


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.children():
        if isinstance(block, nn.Linear):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(folder: Path) -> list[Path]:
    """Return the checkpoints that are whole, the newest last: DCP writes the metadata last."""
    return sorted((found.parent for found in folder.glob("*/.metadata")), key=lambda path: int(path.name))


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint. Return the number of steps made."""
    found = whole(folder)
    if not found:
        return 0
    state = nested(model, optimizer)
    dcp.load(state, checkpoint_id=found[-1])
    put_back(model, optimizer, state)
    return int(found[-1].name)


def save(folder: Path, steps: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dcp.save(nested(model, optimizer), checkpoint_id=folder / str(steps))
    if dist.get_rank() == 0:
        for old in whole(folder)[:-KEPT]:
            shutil.rmtree(old)


def main() -> None:
    dist.init_process_group("gloo")
    mark("joined")
    model = build()
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    where = os.environ.get("BENCH_CHECKPOINTS")
    first = load(Path(where), model, optimizer) if where else 0
    batch = torch.randn(BATCH, WIDTH)
    mark("built")
    place = f"{dist.get_rank()} {dist.get_world_size()} {os.getpid()}"
    for step in range(first, STEPS):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if where and (step + 1) % SAVES_EVERY == 0:
            save(Path(where), step + 1, model, optimizer)
        note(place, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
