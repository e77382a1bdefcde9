"""Train a model whose layers are spread over the workers of a unit, as a pipeline, and replicate that.

    elasticd run --unit 2 --min 2 --max 8 workers/pipeline.py
    torchrun --standalone --nproc-per-node 4 --max-restarts 5 workers/pipeline.py --unit 2
    python workers/pipeline.py                     # one process, no launcher

**When**: the model is too large for one device, and its layers follow each other. The workers of a unit
may be on several machines: they send each other only activations and their gradients.

**How**: a unit of N workers holds the model once: each worker has a stage, layers that follow each other.
A batch goes through the stages in pieces: while a worker computes a piece, the worker before it computes
the next. Workers with the same stage add up their gradients over the units.

**Cost**: with s stages and p pieces a worker idles for (s - 1) of every (p + s - 1) turns. A step takes as
long as the slowest stage.

**When a worker dies**: its stage is gone, so all workers start again, in a world of whole units, and load
the snapshot of the last whole epoch; at most one epoch is repeated. While a worker cannot be replaced, the
other units train on without its unit.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, DistributedSampler

from digits import digest, network, options_parser, quality, read_digits, say
from elasticd import worker
from gpt import as_tensor, positive
from restarting import default_folder, join_world, load_snapshot, run, save_snapshot


def stage_of(layers: nn.Sequential, number: int, stages: int) -> nn.Sequential:
    """Return the layers of that stage, under the names that they have in the whole model."""
    start, end = (n * len(layers) // stages for n in (number, number + 1))
    return nn.Sequential(OrderedDict((str(n), layers[n]) for n in range(start, end)))


def from_all_stages(part: dict[str, Any], unit: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Return the parts of all workers of the unit, in the order of their stages."""
    buffer = io.BytesIO()
    torch.save(part, buffer)
    mine = as_tensor(buffer.getvalue()).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(unit.size())]
    dist.all_gather(lengths, torch.tensor([len(mine)], device=device), group=unit)
    longest = max(int(length) for length in lengths)
    padded = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in lengths]
    dist.all_gather(padded, F.pad(mine, (0, longest - len(mine))), group=unit)
    return [
        torch.load(io.BytesIO(data[: int(length)].cpu().numpy().tobytes()), weights_only=True)
        for data, length in zip(padded, lengths, strict=True)
    ]


def add_up_gradients(module: nn.Module, replicas: dist.ProcessGroup) -> None:
    """Replace the gradients by their mean over the workers that have the same stage."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=replicas)
            parameter.grad /= replicas.size()


def parse_options() -> argparse.Namespace:
    parser = options_parser(__doc__)
    parser.add_argument("--epochs", type=positive, default=30)
    parser.add_argument("--global-batch", type=positive, default=64, help="images a step, in any world")
    parser.add_argument("--unit", type=positive, help="workers of a pipeline (default: elasticd's --unit)")
    parser.add_argument("--pieces", type=positive, default=4, help="of a batch, under way at once")
    parser.add_argument("--snapshot-dir", type=Path, help="default: a folder of the run")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    device, local_rank = join_world()
    mesh = worker.mesh(options.unit)
    stages, number = mesh["unit"].size(), mesh.get_local_rank("unit")
    units, unit_number = mesh["replicate"].size(), mesh.get_local_rank("replicate")
    whole = network(options.seed)
    if stages > len(whole):
        raise ValueError(f"a pipeline of {stages} workers: the model has only {len(whole)} layers")
    images_each = options.global_batch // units // options.pieces * options.pieces
    if not images_each:
        raise ValueError(
            f"a global batch of {options.global_batch} has no {options.pieces} pieces for {units} units"
        )

    train_set, held_out = read_digits()
    stage = stage_of(whole, number, stages).to(device)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=options.lr)
    folder = options.snapshot_dir or default_folder("pipeline")
    snapshot = load_snapshot(folder, local_rank, device)
    if snapshot is not None:
        if len(snapshot["stages"]) != stages:
            raise ValueError(
                f"the snapshot is of {len(snapshot['stages'])} stages: give --unit {len(snapshot['stages'])}"
            )
        stage.load_state_dict(snapshot["stages"][number]["model"])
        optimizer.load_state_dict(snapshot["stages"][number]["optimizer"])
    step, first_epoch = (snapshot["step"], snapshot["epoch"]) if snapshot else (0, 0)
    say(f"{units} units of {stages} workers, {first_epoch} epochs done, snapshots: {folder or 'none'}")

    unit = mesh.get_group("unit")
    pipeline = Schedule1F1B(
        PipelineStage(stage, number, stages, device, group=unit), options.pieces, loss_fn=F.cross_entropy
    )
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        train_set, units, unit_number, shuffle=True, seed=options.seed, drop_last=True
    )
    loader = DataLoader(train_set, images_each, sampler=sampler, drop_last=True)
    for epoch in range(first_epoch, options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            inputs = (images.to(device),) if number == 0 else ()
            target = labels.to(device) if number == stages - 1 else None
            losses: list[Tensor] = []
            optimizer.zero_grad()
            pipeline.step(*inputs, target=target, losses=losses)
            add_up_gradients(stage, mesh.get_group("replicate"))
            optimizer.step()
            step += 1
            if losses:
                worker.report(loss=torch.stack(losses).mean().detach(), samples=len(images))
        parts = from_all_stages(
            {"model": stage.state_dict(), "optimizer": optimizer.state_dict()}, unit, device
        )
        say(f"epoch {epoch + 1:>3}, step {step:>5}")
        if folder is not None and local_rank == 0:  # one worker of each node: nodes may share no disk
            save_snapshot(folder, {"step": step, "epoch": epoch + 1, "stages": parts})
            worker.checkpointed(folder / "snapshot.pt")
    for part in from_all_stages({"model": stage.state_dict()}, unit, device):
        whole.load_state_dict(part["model"], strict=False)  # on the CPU: the evaluation needs all layers
    say(quality(whole, held_out))
    say(f"weights: {digest(whole)}")


if __name__ == "__main__":
    sys.exit(run("pipeline", main))
