"""What is measured, by the names of the catalogue: written by one thread, read by any as a copy."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticd.telemetry.catalog import BY_NAME, Type

Labels = tuple[str, ...]  # values, in the order of the metric's labels


@dataclass(frozen=True, slots=True)
class Histogram:
    """``counts``: by bucket, each without those below it; the last is of what is above all bounds."""

    counts: tuple[int, ...]
    sum: float


Value = float | Histogram


@dataclass(frozen=True, slots=True)
class Measured:
    """All values at one moment, by metric and labels. Never changed."""

    values: Mapping[str, Mapping[Labels, Value]]


class Book:
    """Not for several threads; ``copy`` is. Names that are not in the catalogue, and labels that do
    not fit, are errors of ours (KeyError, AssertionError)."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, Value]] = {}

    def set(self, name: str, value: float | None, *labels: object) -> None:
        """A gauge's value; for an age, the time since when (seconds since the epoch). None: ``forget``."""
        if value is None:
            self.forget(name, *labels)
            return
        self._of(name, labels, Type.GAUGE, Type.AGE)[_texts(labels)] = float(value)

    def add(self, name: str, amount: float, *labels: object) -> None:
        """Count; with 0, show that there is a counter before anything was counted, since an increase
        can only be seen by who saw the value before it."""
        of = self._of(name, labels, Type.COUNTER)
        key = _texts(labels)
        before = of.get(key, 0.0)
        assert isinstance(before, float)
        assert amount >= 0
        of[key] = before + amount

    def count_to(self, name: str, value: float, *labels: object) -> None:
        """For a counter that somebody else keeps; it does not go back."""
        before = self.get(name, *labels)
        self.add(name, max(0.0, value - (before if isinstance(before, float) else 0.0)), *labels)

    def start(self, name: str, *labels: object) -> None:
        """Show a counter or histogram from the start, with all the values its last label may have;
        ``labels``: those before it."""
        metric = BY_NAME[name]
        for full in [(*labels, v) for v in metric.values] or [labels]:
            if metric.type is Type.COUNTER:
                self.add(name, 0.0, *full)
            else:
                self.observe(name, 0.0, *full, times=0)

    def observe(self, name: str, value: float, *labels: object, times: int = 1) -> None:
        """``times`` observations of ``value``, for a histogram."""
        self.observe_all(name, [value], *labels, times=times)

    def observe_all(self, name: str, values: Sequence[float], *labels: object, times: int = 1) -> None:
        """Each of the values, ``times`` over."""
        of = self._of(name, labels, Type.HISTOGRAM)
        bounds = BY_NAME[name].buckets
        key = _texts(labels)
        before = of.get(key)
        counts = list(before.counts) if isinstance(before, Histogram) else [0] * (len(bounds) + 1)
        for value in values:
            counts[bisect_left(bounds, value)] += times
        total = before.sum if isinstance(before, Histogram) else 0.0
        of[key] = Histogram(tuple(counts), total + sum(values) * times)

    def choose(self, name: str, chosen: object, *labels: object) -> None:
        """Of a gauge's kinds, 1 for the chosen and 0 for the others."""
        for kind in BY_NAME[name].values:
            self.set(name, kind == str(chosen), *labels, kind)

    def forget(self, name: str, *labels: object) -> None:
        """The value is no longer known, or its subject is gone."""
        self._values.get(name, {}).pop(_texts(labels), None)

    def get(self, name: str, *labels: object) -> Value | None:
        return self._values.get(name, {}).get(_texts(labels))

    def copy(self) -> Measured:
        return Measured({name: dict(of) for name, of in self._values.items()})

    def _of(self, name: str, labels: tuple[object, ...], *types: Type) -> dict[Labels, Value]:
        metric = BY_NAME[name]
        assert metric.type in types, f"{name} is a {metric.type}"
        assert len(metric.labels) == len(labels), f"{name} has the labels {metric.labels}"
        return self._values.setdefault(name, {})


def _texts(labels: tuple[object, ...]) -> Labels:
    return tuple(map(str, labels))
