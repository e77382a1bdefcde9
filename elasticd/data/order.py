"""The order of the samples in an epoch: a pure function of seed, epoch and position.

The order is the same in every worker, process and version of torch, and does not depend on the past. An epoch
has as many positions as the order is long. Nothing is kept between positions, so a start in the middle costs
no more than a start at position 0.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from math import isfinite
from struct import unpack
from typing import Any, Final, Protocol

_ROUNDS: Final = 6  # three make a Feistel network a pseudorandom permutation, four a strong one
_BITS_MIN: Final = 6
_MASK_64: Final = (1 << 64) - 1


class Order(Protocol):
    """An order of samples. ``facts`` identify the order, in JSON's types."""

    @property
    def length(self) -> int: ...

    @property
    def facts(self) -> dict[str, Any]: ...

    def at(self, epoch: int, positions: range) -> list[int]:
        """Return the indices of the samples at these positions of the epoch."""
        ...


class BadOrder(ValueError):
    """The arguments define no order. The message says why, in a sentence."""


class Sequential:
    """The samples in the order of the dataset."""

    def __init__(self, length: int) -> None:
        self.length = _checked(length)
        self.facts: dict[str, Any] = {"kind": "sequential", "length": length}

    def at(self, epoch: int, positions: range) -> list[int]:
        return list(positions)


class Shuffled:
    """Each sample once, shuffled anew in each epoch, without a list of the samples in memory.

    A Feistel network permutes the numbers below a power of two. It is applied again until the result is below
    the length.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = _checked(length)
        self.facts: dict[str, Any] = {"kind": "shuffled", "length": length, "seed": seed}
        self._seed = seed
        self._bits = max(_BITS_MIN, (length - 1).bit_length())

    def at(self, epoch: int, positions: range) -> list[int]:
        keys = _keys(self._seed, epoch)
        rounds = list(zip(keys[::2], keys[1::2], strict=True))
        half = self._bits // 2
        low, high = (1 << half) - 1, (1 << self._bits - half) - 1
        found = []
        for position in positions:
            if not 0 <= position < self.length:
                raise IndexError(f"an epoch of {self.length} samples has no position {position}")
            number = position
            while True:
                left, right = number >> half, number & low
                for key, other in rounds:
                    left ^= _mixed(right ^ key) & high
                    right ^= _mixed(left ^ other) & low
                number = left << half | right
                if number < self.length:
                    break
            found.append(number)
        return found


class Weighted:
    """Each position draws a sample independently, with replacement, in proportion to its weight."""

    def __init__(self, weights: Sequence[float], seed: int, draws: int | None = None) -> None:
        """Raises BadOrder. ``draws``: the length of an epoch; by default the number of weights."""
        given = array("d", map(float, weights))
        _checked(len(given))
        wrong = next((i for i, w in enumerate(given) if not (isfinite(w) and w >= 0)), None)
        if wrong is not None:
            raise BadOrder(f"the weight of sample {wrong} is {given[wrong]}: give a number that is 0 or more")
        self._until = array("d", accumulate(given))
        if not self._until[-1] > 0 or not isfinite(self._until[-1]):
            raise BadOrder(f"the weights add up to {self._until[-1]}: give finite weights, and one above 0")
        self.length = _checked(len(given) if draws is None else draws)
        self._seed = seed
        self._last = max(i for i, w in enumerate(given) if w > 0)
        digest = blake2b(given.tobytes(), digest_size=8).hexdigest()
        self.facts: dict[str, Any] = {
            "kind": "weighted",
            "length": self.length,
            "seed": seed,
            "samples": len(given),
            "weights": digest,
        }

    def at(self, epoch: int, positions: range) -> list[int]:
        first, second = _keys(self._seed, epoch)[:2]
        scale = self._until[-1] * 2.0**-53
        drawn = (_mixed(_mixed(position ^ first) ^ second) >> 11 for position in positions)
        return [min(bisect_right(self._until, number * scale), self._last) for number in drawn]


def order_from(facts: dict[str, Any]) -> Order | None:
    """Return the order with these facts; None where the facts are not enough to rebuild it."""
    match facts:
        case {"kind": "sequential", "length": int(length)} if length > 0:
            return Sequential(length)
        case {"kind": "shuffled", "length": int(length), "seed": int(seed)} if length > 0:
            return Shuffled(length, seed)
    return None


def transform_seed(seed: int, epoch: int, position: int) -> int:
    """Return 63 bits to seed the random transformations of the sample at a position."""
    return _mixed(_mixed(position ^ _keys(seed, epoch)[2]) ^ _keys(seed, epoch)[3]) >> 1


def _checked(length: int) -> int:
    if length < 1:
        raise BadOrder("there are no samples to train with: the dataset is empty")
    return length


@lru_cache(maxsize=8)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = blake2b(f"elasticd {seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return unpack(f"<{_ROUNDS}Q", digest)


def _mixed(number: int) -> int:
    """Return SplitMix64's finalizer: each bit of the result depends on every bit of the number."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK_64
    return number ^ number >> 31
