"""Train a model whose layers are on several devices of one worker, and replicate that over the workers.

    elasticd run --min 2 --max 4 --slots 2 workers/layers_on_devices.py --devices 2
    torchrun --standalone --nproc-per-node 2 workers/layers_on_devices.py --devices 2
    python workers/layers_on_devices.py            # one process, no launcher

**When**: the model is too large for one device, fits on the devices of one machine, and is a chain of
layers. Where all workers together have the memory, train_gpt_fsdp.py uses it better.

**How**: a worker has ``--devices`` GPUs, so ``--slots`` is the machine's number of GPUs divided by that.
Each device has a stage: layers that follow each other. A batch goes through the stages in pieces: while a
device computes a piece, the device before computes the next. DistributedDataParallel adds up the
gradients of each layer over the workers that have a copy of it. Without a GPU all stages are on the CPU,
and the result is the same.

**Cost**: with s stages and p pieces a device idles for (s - 1) of every (p + s - 1) turns, in both
directions. Activations of all pieces are kept until the backward pass.

**When a worker dies**: its devices leave with it. The survivors keep their process and their committed
steps, and share out its samples until the replacement joins.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from digits import network, options_parser, quality, read_digits, say
from elasticd import worker
from gpt import positive


class Stages(nn.Module):
    """A chain of layers, cut into as many stages of about equal size as there are devices."""

    def __init__(self, layers: nn.Sequential, devices: list[torch.device], pieces: int) -> None:
        super().__init__()
        self.devices, self.pieces = devices, pieces
        cuts = [number * len(layers) // len(devices) for number in range(len(devices) + 1)]
        self.stages = nn.ModuleList(
            layers[start:end].to(device) for start, end, device in zip(cuts, cuts[1:], devices, strict=False)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the outputs, on the last device. Kernels run when their device is free: Python only queues
        them, so the stages overlap although this is one thread."""
        outputs = []
        for output in images.chunk(self.pieces):
            for stage, device in zip(self.stages, self.devices, strict=True):
                output = stage(output.to(device, non_blocking=True))  # noqa: PLW2901
            outputs.append(output)
        return torch.cat(outputs)


def own_devices(count: int) -> list[torch.device]:
    """Return this worker's devices. Raises ValueError if the machine has too few GPUs."""
    if not torch.cuda.is_available():
        return [torch.device("cpu")] * count
    first = int(os.environ.get("LOCAL_RANK", "0")) * count
    if first + count > torch.cuda.device_count():
        raise ValueError(
            f"this worker needs the GPUs {first} to {first + count - 1}, and the machine has "
            f"{torch.cuda.device_count()}: give fewer --slots or --devices"
        )
    return [torch.device("cuda", number) for number in range(first, first + count)]


@worker.run
def train(state: worker.State, held_out: TensorDataset, options: argparse.Namespace) -> None:
    """Train. Called again after each change of world, with the state of the last committed step."""
    for step in state.steps():
        for images, labels in step:
            logits = state.model(images)
            step.backward(F.cross_entropy(logits, labels.to(logits.device)))
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit()
        if state.step % options.log_every == 0:
            say(f"step {state.step:>5}  {worker.world_size()} workers of {options.devices} devices")
    say(quality(state.model, held_out))


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--epochs", type=positive, default=30)
    parser.add_argument("--global-batch", type=positive, default=64, help="images a step, in any world")
    parser.add_argument("--devices", type=positive, default=2, help="of each worker")
    parser.add_argument("--pieces", type=positive, default=4, help="of a batch, under way at once")
    options = parser.parse_args()
    layers = network(options.seed)
    if options.devices > len(layers):
        parser.error(f"--devices {options.devices}: the model has only {len(layers)} layers")
    train_set, held_out = read_digits()
    with parser.checks():
        model = Stages(layers, own_devices(options.devices), options.pieces)
        data = worker.Data(
            train_set, global_batch=options.global_batch, seed=options.seed, epochs=options.epochs
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    # No device_ids: DistributedDataParallel leaves inputs and outputs where they are.
    state = worker.State(
        model=model,
        optimizer=optimizer,
        data=data,
        wrap=lambda stages: DistributedDataParallel(stages, init_sync=False),
    )
    train(state, held_out, options)


if __name__ == "__main__":
    main()
