"""Train a model whose weights are split over the workers of a unit (tensor parallelism), and replicate that.

    elasticd run --unit 2 --min 2 --max 8 workers/tensor_parallel.py
    torchrun --standalone --nproc-per-node 4 workers/tensor_parallel.py --unit 2
    python workers/tensor_parallel.py            # one process, no launcher

**When**: single layers are too large for one device, or a batch is too small to occupy more devices by its
samples alone. The workers of a unit need fast links, so keep a unit on one machine: --unit-within node.

**How**: every second matrix is split by columns, the next by rows. A worker multiplies with its part of
both, and the unit adds up the products: once a pair of layers in the forward pass, and once in the backward
pass. All workers of a unit see the same images. Workers with the same parts add up their gradients over
the units.

**Cost**: the activations of a pair of layers are added up over the unit while nothing else can be computed.
Each worker keeps its part of the last two steps in the host's memory.

**When a worker dies**: its unit leaves the world. The other units keep their processes and their committed
steps, and go on at once. The rest of the lost unit waits, and is back with the replacement, to which a
worker with the same part sends it. With one unit, give --checkpoints: its part is then nowhere else.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

from digits import WIDTH, largest_world, network, options_parser, quality, read_digits, say
from elasticd import worker
from gpt import positive, share, writable_folder


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


def whole_model(model: nn.Module, seed: int) -> nn.Sequential:
    """Return the model with the weights of all workers of a unit, which call it together."""
    whole = network(seed).to(worker.device())
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        whole.get_parameter(name).data.copy_(full.detach())
    return whole


@worker.run
def train(
    state: worker.State, data: TensorDataset, held_out: TensorDataset, options: argparse.Namespace
) -> None:
    """Train. Called again after each change of world, with the state of the last committed step."""
    mesh = worker.mesh(options.unit)
    units, replica = mesh["replicate"].size(), mesh.get_local_rank("replicate")
    batch = options.global_batch
    say(f"{units} units of {mesh['unit'].size()} workers, {state.step} of {options.steps} steps done")
    images, labels = (tensor.to(worker.device()) for tensor in data.tensors)
    for step in state.steps(options.steps):
        # A unit sees one share of the batch. Shares may differ by an image, so divide by the whole batch.
        mine = share(options.seed, step * batch, batch, len(images), replica, units)
        loss = F.cross_entropy(state.model(images[mine]), labels[mine], reduction="sum") / batch
        state.optimizer.zero_grad()
        (loss * units).backward()
        add_up_gradients(state.model, mesh.get_group("replicate"))
        state.optimizer.step()
        worker.report(loss=(loss * units).detach(), samples=len(mine))
        state.commit()
        if state.step % options.log_every == 0:
            say(f"step {state.step:>5}")
    say(quality(whole_model(state.model, options.seed), held_out))


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--steps", type=positive, default=600)
    parser.add_argument("--global-batch", type=positive, default=64, help="images a step, in any world")
    parser.add_argument(
        "--unit", type=positive, help="workers that share the weights (default: elasticd's --unit)"
    )
    parser.add_argument(
        "--checkpoints", type=writable_folder, help="a folder (default: elasticd's --checkpoints)"
    )
    options = parser.parse_args()
    model = network(options.seed)
    with parser.checks():
        units, unit = largest_world(options.unit)
    if WIDTH % unit:
        parser.error(f"matrices of {WIDTH} columns have no equal parts for a unit of {unit} workers")
    if options.global_batch < units:
        parser.error(f"a global batch of {options.global_batch} is too small for {units} units")
    data, held_out = read_digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    state = worker.State(
        model=model,
        optimizer=optimizer,
        split=split,
        unit=options.unit,
        checkpoints=options.checkpoints,
    )
    train(state, data, held_out, options)


if __name__ == "__main__":
    main()
