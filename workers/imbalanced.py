"""Train on imbalanced data: rare classes are drawn as often as common ones, each draw by one worker only.

    elasticd run --min 2 --max 8 --audit --job imbalanced workers/imbalanced.py && elasticd audit imbalanced
    torchrun --standalone --nproc-per-node 2 workers/imbalanced.py
    python workers/imbalanced.py                   # one process, no launcher

**When**: some classes are so rare that a model that ignores them has a small loss. Here the digits 5 to 9
are a twentieth as frequent as the digits 0 to 4.

**Why not torch's samplers**: a WeightedRandomSampler knows nothing of other workers, so with the same
seed all draw the same samples, and with other seeds no epoch can be resumed or proved. A
DistributedSampler knows no weights. One cannot be put into the other.

**How**: ``worker.Data(weights=...)`` makes the draw at each position of an epoch a function of seed,
epoch and position. The draws are dealt to the workers at hand as the samples of any other order.

**Cost**: a rare sample is seen many times in an epoch, and may be learned by heart. A draw takes a binary
search among the weights.

**When a worker dies**: the survivors keep their process and their committed steps, and take over its
draws. Training is consistent, so it ends with the same digest as undisturbed, in a world of any size.
``elasticd audit`` proves from the workers' notes that each draw was used once.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from digits import CLASSES, digest, evaluate, network, options_parser, read_digits, say
from elasticd import worker
from gpt import positive

RARE = range(5, 10)
KEPT = 20  # one in so many images of a rare class


def imbalanced(data: TensorDataset) -> TensorDataset:
    """Return the data with most images of the rare classes left out."""
    images, labels = data.tensors
    is_kept = labels < RARE.start
    for label in RARE:
        is_kept[(labels == label).nonzero()[::KEPT]] = True
    return TensorDataset(images[is_kept], labels[is_kept])


def weights_of(labels: torch.Tensor, of_classes: list[float] | None) -> list[float]:
    """Return a weight for each sample, by default so that all classes are drawn equally often."""
    by_class = torch.tensor(of_classes) if of_classes else 1.0 / labels.bincount(minlength=CLASSES)
    return [float(weight) for weight in by_class[labels]]


@worker.run
def train(state: worker.State, held_out: TensorDataset, options: argparse.Namespace) -> None:
    """Train. Called again after each change of world, with the state of the last committed step."""
    device = worker.device()
    for step in state.steps():
        for images, labels in step:
            step.backward(F.cross_entropy(state.model(images.to(device)), labels.to(device)))
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit(loss=step.loss)
        if state.step % options.log_every == 0:
            say(f"step {state.step:>5}  loss {float(step.loss):.3f}  {worker.world_size()} workers")
    recalls, _ = evaluate(state.model, held_out)
    common, rare = recalls[: RARE.start].mean(), recalls[RARE.start :].mean()
    say(f"recognized: common digits {common:.1%}, rare digits {rare:.1%}")
    say(f"held-out: balanced accuracy {recalls.mean():.1%}")


def class_weights(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if len(found) != CLASSES or not all(0 <= weight < float("inf") for weight in found) or not any(found):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {CLASSES} weights: give a number that is 0 or more for each class, with commas"
        )
    return found


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--epochs", type=positive, default=40)
    parser.add_argument("--global-batch", type=positive, default=64, help="draws a step, in any world")
    parser.add_argument("--class-weights", type=class_weights, metavar="W,W,...", help="default: all equal")
    options = parser.parse_args()
    everything, held_out = read_digits()
    train_set = imbalanced(everything)
    model = network(options.seed).to(worker.device())
    with parser.checks():
        data = worker.Data(
            train_set,
            weights=weights_of(train_set.tensors[1], options.class_weights),
            global_batch=options.global_batch,
            virtual_ranks=8,
            seed=options.seed,
            epochs=options.epochs,
            consistent=True,
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    train(worker.State(model=model, optimizer=optimizer, data=data), held_out, options)
    say(f"weights: {digest(model)}")


if __name__ == "__main__":
    main()
