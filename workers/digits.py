"""Images of handwritten digits, a small network for them and its evaluation, for the scripts in this folder.

The images are scikit-learn's: 1,797 of 8 x 8 pixels, in ten classes. ``pip install scikit-learn`` brings
them.
"""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from elasticd import worker
from gpt import Parser, positive, rate, seed

CLASSES = 10
WIDTH = 128  # of the hidden layers


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,438 images to train on and 359 held-out ones. Images are 1 x 8 x 8, from 0 to 1.

    Raises SystemExit, with one sentence, if scikit-learn is not installed.
    """
    found = find_spec("sklearn")  # without importing it, which takes seconds
    if found is None or not found.submodule_search_locations:
        raise SystemExit("this program trains on scikit-learn's images of digits: pip install scikit-learn")
    file = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    images, labels = (table[:, :-1] / 16).view(-1, 1, 8, 8), table[:, -1].long()
    is_held_out = torch.arange(len(table)) % 5 == 4
    train = TensorDataset(images[~is_held_out], labels[~is_held_out])
    return train, TensorDataset(images[is_held_out], labels[is_held_out])


def network(seed: int, width: int = WIDTH) -> nn.Sequential:
    """Return a network from images to the logits of the classes. The same seed gives the same weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


@torch.no_grad()
def evaluate(model: nn.Module, held_out: TensorDataset) -> tuple[Tensor, float]:
    """Return the share of each class that the model recognizes, and its mean loss. All workers call it.

    With w workers each takes every w-th image, so the shares may be uneven. So counts are added up over the
    workers, not means, and no image comes twice to fill a share. DistributedDataParallel is left aside: its
    forward pass may wait for workers that have no image left.
    """
    bare: nn.Module = getattr(model, "module", model)
    rank, world = worker.rank(), worker.world_size()
    images, labels = (tensor[rank::world] for tensor in held_out.tensors)
    bare.eval()
    logits = bare(images.to(next(bare.parameters()).device))
    bare.train()
    labels = labels.to(logits.device)
    is_right = logits.argmax(1) == labels
    totals = torch.zeros(2 * CLASSES + 1, dtype=torch.float64, device=logits.device)
    totals[:CLASSES] = torch.bincount(labels[is_right], minlength=CLASSES)
    totals[CLASSES:-1] = torch.bincount(labels, minlength=CLASSES)
    totals[-1] = F.cross_entropy(logits, labels, reduction="sum")
    if world > 1:
        dist.all_reduce(totals)
    right, all_ = totals[:CLASSES].cpu(), totals[CLASSES:-1].cpu()
    return right / all_, float(totals[-1].cpu() / all_.sum())


def quality(model: nn.Module, held_out: TensorDataset) -> str:
    """Return the line with which each program ends. All workers call it."""
    recalls, loss = evaluate(model, held_out)
    return f"held-out: balanced accuracy {recalls.mean():.1%}, loss {loss:.4f}"


def digest(model: nn.Module) -> str:
    """Return the SHA-256 of the weights: two trainings ended alike, to the last bit, if theirs are equal."""
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.cpu().numpy().tobytes())
    return found.hexdigest()


def say(message: str) -> None:
    """Print a line, on rank 0 only, and in one write: lines of several processes may mix otherwise."""
    if worker.rank() == 0:
        print(message + "\n", end="", flush=True)


def largest_world(unit: int | None) -> tuple[int, int]:
    """Return the units of the largest world that there may be, and the workers of a unit: by default those of
    ``elasticd run --unit``. Raises ValueError if the workers may make no whole units."""
    largest = int(os.environ.get("ELASTICD_WORLD_MAX") or worker.world_size())
    multiple_of = int(os.environ.get("ELASTICD_UNIT") or largest)  # what each world has
    if unit is None:
        unit = int(os.environ.get("ELASTICD_UNIT", "1"))
    if multiple_of % unit:
        raise ValueError(
            f"the workers may make no whole units of {unit}: give `elasticd run --unit {unit}`, or torchrun "
            f"a multiple of {unit} workers"
        )
    return largest // unit, unit


def options_parser(description: str) -> Parser:
    """Return a parser of the options that all programs on digits have."""
    parser = Parser(description)
    parser.add_argument("--lr", type=rate, default=2e-3, help="the learning rate")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--log-every", type=positive, default=50, metavar="STEPS")
    return parser
