"""Choose the order of a dataset's samples from the script's arguments."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from elasticd.data.order import BadOrder, Order, Sequential, Shuffled, Weighted

Sampler = Iterable[int] | Callable[[int], Sequence[int]]


class SamplerOrder:
    """The order of a script's own sampler. The sampler is asked twice for each epoch, to check that its order
    is fixed."""

    def __init__(self, sampler: Sampler, samples: int) -> None:
        self._sampler, self._samples = sampler, samples
        self._epoch, self._indices = -1, array("q")
        self._indices = self._of(0)
        self.length = len(self._indices)
        self.facts: dict[str, Any] = {"kind": "sampler", "length": self.length, "samples": samples}

    def at(self, epoch: int, positions: range) -> list[int]:
        return self._of(epoch)[positions.start : positions.stop].tolist()

    def digest(self, epoch: int) -> str:
        return hashlib.blake2b(self._of(epoch).tobytes(), digest_size=16).hexdigest()

    def _of(self, epoch: int) -> array[int]:
        if epoch != self._epoch:
            indices = self._asked(epoch)
            if indices != self._asked(epoch):
                raise ValueError(
                    f"the sampler gave two orders when asked twice for epoch {epoch}: it must be a function "
                    "of the epoch alone, with a seed of its own (or leave it out, and give Data a seed)"
                )
            if not indices:
                raise BadOrder(f"the sampler gave no index for epoch {epoch}: there is nothing to train with")
            if self._indices and len(indices) != len(self._indices):
                raise ValueError(
                    f"the sampler gave {len(indices)} indices for epoch {epoch}, and {len(self._indices)} "
                    "before: epochs must be of one length"
                )
            outside = next((i for i in indices if not 0 <= i < self._samples), None)
            if outside is not None:
                raise ValueError(
                    f"the sampler gave index {outside}, and the dataset has {self._samples} samples"
                )
            self._epoch, self._indices = epoch, indices
        return self._indices

    def _asked(self, epoch: int) -> array[int]:
        if callable(self._sampler) and not hasattr(self._sampler, "__iter__"):
            return array("q", map(int, self._sampler(epoch)))
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        return array("q", map(int, self._sampler))


def order_of(
    dataset: Any,
    seed: int,
    shuffle: bool | None,
    weights: Sequence[float] | None,
    draws: int | None,
    sampler: Sampler | None,
) -> Order | SamplerOrder | None:
    """Return the order of the samples; None for an iterable dataset, which has an order of its own. The
    arguments are those of ``Data``. Raises TypeError and ValueError."""
    said = [
        name for name, value in (("shuffle", shuffle), ("weights", weights), ("sampler", sampler)) if value
    ]
    if len(said) > 1:
        raise TypeError(f"{said[0]} and {said[1]} both set the order of the samples: give only one of them")
    if draws is not None and weights is None:
        raise TypeError("draws is the number of samples that an epoch draws by weights: give weights, too")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if said:
            raise TypeError(
                f"an iterable dataset has an order of its own, so {said[0]} has no effect: leave it out, and "
                "shuffle in the dataset"
            )
        if not hasattr(dataset, "__iter__"):
            raise TypeError(
                f"a {type(dataset).__qualname__} is no dataset: it has neither __getitem__ nor __iter__"
            )
        return None
    try:
        length = len(dataset)
    except TypeError:
        raise TypeError(
            f"the dataset, a {type(dataset).__qualname__}, has no length: give it __len__, or make it an "
            "iterable one"
        ) from None
    if weights is not None:
        if len(weights) != length:
            raise ValueError(f"there are {len(weights)} weights, and the dataset has {length} samples")
        return Weighted(weights, seed, draws)
    if sampler is not None:
        return SamplerOrder(sampler, length)
    return Sequential(length) if shuffle is False else Shuffled(length, seed)
