"""Train a model whose weights are split over the workers of a unit (tensor parallelism), and replicate that.

    elasticd run --unit 2 --min 2 --max 8 --checkpoints ~/tp workers/tensor_parallel.py
    torchrun --standalone --nproc-per-node 4 workers/tensor_parallel.py --unit 2 --checkpoints ~/tp
    python workers/tensor_parallel.py --checkpoints ~/tp            # one process, no launcher

**When**: single layers are too large for one device, or a batch is too small to occupy more devices by its
samples alone. The workers of a unit need fast links, so keep a unit on one machine: --unit-within node.

**How**: every second matrix is split by columns, the next by rows. A worker multiplies with its part of
both, and the unit adds up the products: once a pair of layers in the forward pass, and once in the backward
pass. All workers of a unit see the same images. Workers with the same parts add up their gradients over
the units.

**Cost**: the activations of a pair of layers are added up over the unit while nothing else can be computed.

**When a worker dies**: its part of the weights is gone, so all workers start again, in a world of whole
units. They load the state from the nodes' memory or from disk; the steps since the last save are repeated.
While a worker cannot be replaced, the other units train on without its unit.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from digits import evaluate, network, options_parser, read_digits, say
from elasticd import worker
from gpt import positive, share
from restarting import join_world, run


def split(model: nn.Sequential, unit: DeviceMesh) -> nn.Sequential:
    """Split the first two matrices over the unit: one by columns, the next by rows. The last one is small."""
    parallelize_module(model, unit, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    return model


def add_up_gradients(model: nn.Module, replicas: dist.ProcessGroup) -> None:
    """Replace the gradients by their mean over the workers that have the same parts."""
    for parameter in model.parameters():
        gradient = parameter.grad
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if part is not None:
            dist.all_reduce(part, group=replicas)
            part /= replicas.size()


def parse_options() -> argparse.Namespace:
    parser = options_parser(__doc__)
    parser.add_argument("--steps", type=positive, default=600)
    parser.add_argument("--global-batch", type=positive, default=64, help="images a step, in any world")
    parser.add_argument(
        "--unit", type=positive, help="workers that share the weights (default: elasticd's --unit)"
    )
    parser.add_argument(
        "--checkpoints", type=Path, help="a shared folder (default: elasticd's --checkpoints)"
    )
    options = parser.parse_args()
    if not options.checkpoints and "ELASTICD_CHECKPOINTS" not in os.environ:
        parser.error("no folder for checkpoints: give --checkpoints to this script or to elasticd run")
    return options


def main() -> None:
    options = parse_options()
    device, _ = join_world()
    mesh = worker.mesh(options.unit)
    unit, units = mesh["unit"].size(), mesh["replicate"].size()
    if options.global_batch < units:
        raise ValueError(f"a global batch of {options.global_batch} is too small for {units} units")
    train_set, held_out = read_digits()
    model = split(network(options.seed).to(device), mesh["unit"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    checkpoints = worker.Checkpoints(options.checkpoints)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    step = checkpoints.load(state) or 0
    say(f"{units} units of {unit} workers, {step} of {options.steps} steps done")

    images, labels = train_set.tensors
    batch, replica = options.global_batch, mesh.get_local_rank("replicate")
    while step < options.steps:
        # A unit sees one share of the batch. Shares may differ by an image, so divide by the whole batch.
        mine = share(options.seed, step * batch, batch, len(images), replica, units)
        logits = model(images[mine].to(device))
        loss = F.cross_entropy(logits, labels[mine].to(device), reduction="sum") / batch
        optimizer.zero_grad()
        (loss * units).backward()
        add_up_gradients(model, mesh.get_group("replicate"))
        optimizer.step()
        step += 1
        worker.report(loss=(loss * units).detach(), samples=len(mine))
        if step % options.log_every == 0:
            say(f"step {step:>5}")
        checkpoints.save_if_due(state, step)
    checkpoints.wait()
    whole = network(options.seed)
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        whole.get_parameter(name).data.copy_(full.detach())
    recalls, held_out_loss = evaluate(whole, held_out)
    say(f"held-out: balanced accuracy {recalls.mean():.1%}, loss {held_out_loss:.4f}")


if __name__ == "__main__":
    sys.exit(run("tensor_parallel", main))
