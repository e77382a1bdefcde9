"""Train a model whose layers are spread over the workers of a unit, as a pipeline, and replicate that.

    elasticd run --unit 2 --min 2 --max 8 workers/pipeline.py
    torchrun --standalone --nproc-per-node 4 workers/pipeline.py --unit 2
    python workers/pipeline.py                     # one process, no launcher

**When**: the model is too large for one device, and its layers follow each other. The workers of a unit
may be on several machines: they send each other only activations and their gradients.

**How**: a unit of N workers holds the model once: each worker has a stage, layers that follow each other.
A batch goes through the stages in pieces: while a worker computes a piece, the worker before it computes
the next. Workers with the same stage add up their gradients over the units.

**Cost**: with s stages and p pieces a worker idles for (s - 1) of every (p + s - 1) turns. A step takes as
long as the slowest stage. Each worker keeps its stage of the last two steps in the host's memory.

**When a worker dies**: its unit leaves the world. The other units keep their processes and their committed
steps, and go on at once. The rest of the lost unit waits, and is back with the replacement, to which a
worker with the same stage sends it. With one unit, give --checkpoints: its stage is then nowhere else.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import TensorDataset

from digits import largest_world, network, options_parser, quality, read_digits, say
from elasticd import worker
from gpt import positive, share, writable_folder


def stage_of(layers: nn.Sequential, number: int, stages: int) -> nn.Sequential:
    """Return the layers of that stage, under the names that they have in the whole model."""
    start, end = (n * len(layers) // stages for n in (number, number + 1))
    return nn.Sequential(OrderedDict((str(n), layers[n]) for n in range(start, end)))


def own_stage(layers: nn.Sequential, unit: DeviceMesh) -> nn.Sequential:
    return stage_of(layers, unit.get_local_rank(), unit.size())


def add_up_gradients(module: nn.Module, replicas: dist.ProcessGroup) -> None:
    """Replace the gradients by their mean over the workers that have the same stage."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=replicas)
            parameter.grad /= replicas.size()


def whole_model(stage: nn.Module, unit: DeviceMesh, seed: int) -> nn.Sequential:
    """Return the model with the weights of all stages. All workers of a unit call it."""
    whole = network(seed).to(worker.device())
    for number in range(unit.size()):
        for name, parameter in stage_of(whole, number, unit.size()).named_parameters():
            if number == unit.get_local_rank():
                parameter.data.copy_(stage.get_parameter(name))
            dist.broadcast(parameter.data, group=unit.get_group(), group_src=number)
    return whole


@worker.run
def train(
    state: worker.State, data: TensorDataset, held_out: TensorDataset, options: argparse.Namespace
) -> None:
    """Train. Called again after each change of world, with the state of the last committed step."""
    mesh = worker.mesh(options.unit)
    unit, number, stages = mesh["unit"], mesh.get_local_rank("unit"), mesh["unit"].size()
    units, unit_number = mesh["replicate"].size(), mesh.get_local_rank("replicate")
    images_each = options.global_batch // units // options.pieces * options.pieces
    say(f"{units} units of {stages} workers, {state.step} of {options.steps} steps done")
    pipeline = Schedule1F1B(
        PipelineStage(state.model, number, stages, worker.device(), group=unit.get_group()),
        options.pieces,
        loss_fn=F.cross_entropy,
    )
    images, labels = (tensor.to(worker.device()) for tensor in data.tensors)
    batch = options.global_batch
    for step in state.steps(options.steps):
        # A unit sees one share of the batch. What is left over makes no piece for each unit.
        mine = share(options.seed, step * batch, batch, len(images), unit_number, units)[:images_each]
        inputs = (images[mine],) if number == 0 else ()
        target = labels[mine] if number == stages - 1 else None
        losses: list[Tensor] = []
        state.optimizer.zero_grad()
        pipeline.step(*inputs, target=target, losses=losses)
        add_up_gradients(state.model, mesh.get_group("replicate"))
        state.optimizer.step()
        if losses:
            worker.report(loss=torch.stack(losses).mean().detach(), samples=len(mine))
        state.commit()
        if state.step % options.log_every == 0:
            say(f"step {state.step:>5}")
    say(quality(whole_model(state.model, unit, options.seed), held_out))


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--steps", type=positive, default=660)
    parser.add_argument("--global-batch", type=positive, default=64, help="images a step, in any world")
    parser.add_argument("--unit", type=positive, help="workers of a pipeline (default: elasticd's --unit)")
    parser.add_argument("--pieces", type=positive, default=4, help="of a batch, under way at once")
    parser.add_argument(
        "--checkpoints", type=writable_folder, help="a folder (default: elasticd's --checkpoints)"
    )
    options = parser.parse_args()
    layers = network(options.seed)
    with parser.checks():
        units, stages = largest_world(options.unit)
    if stages > len(layers):
        parser.error(f"a pipeline of {stages} workers: the model has only {len(layers)} layers")
    if options.global_batch < units * options.pieces:
        pieces = f"{options.pieces} pieces for {units} units"
        parser.error(f"a global batch of {options.global_batch} images is too small for {pieces}")
    data, held_out = read_digits()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=options.lr)
    state = worker.State(
        model=layers,
        optimizer=optimizer,
        split=own_stage,
        unit=options.unit,
        checkpoints=options.checkpoints,
    )
    train(state, data, held_out, options)


if __name__ == "__main__":
    main()
