"""The measured values of this agent, by the catalogue's names. One thread writes; any thread may read a
copy."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticd.telemetry.catalog import BY_NAME, Type

Labels = tuple[str, ...]  # the values of a metric's labels, in the order of its labels


@dataclass(frozen=True, slots=True)
class Histogram:
    """The observations of a histogram. ``counts``: the number in each bucket alone, not cumulative. The last
    bucket is for values above all bounds."""

    counts: tuple[int, ...]
    sum: float


Value = float | Histogram


@dataclass(frozen=True, slots=True)
class Measured:
    """All values at one moment, by metric and labels. Immutable."""

    values: Mapping[str, Mapping[Labels, Value]]


class Metrics:
    """The measured values. One thread may use it; a result of ``copy`` is for any thread.

    A name that is not in the catalogue, or labels that do not fit the metric, are mistakes in elasticd
    (KeyError, AssertionError).
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, Value]] = {}

    def set(self, name: str, value: float | None, *labels: object) -> None:
        """Set a gauge. None means ``forget``."""
        if value is None:
            self.forget(name, *labels)
            return
        self._of(name, labels, Type.GAUGE)[_texts(labels)] = float(value)

    def add(self, name: str, amount: float, *labels: object) -> None:
        """Add ``amount`` to a counter. 0 creates the counter: Prometheus sees an increase only where it
        scraped the value before."""
        of = self._of(name, labels, Type.COUNTER)
        key = _texts(labels)
        before = of.get(key, 0.0)
        assert isinstance(before, float)
        assert amount >= 0
        of[key] = before + amount

    def count_to(self, name: str, value: float, *labels: object) -> None:
        """Raise a counter to ``value``, which is counted elsewhere. A smaller value changes nothing."""
        before = self.get(name, *labels)
        self.add(name, max(0.0, value - (before if isinstance(before, float) else 0.0)), *labels)

    def start(self, name: str, *labels: object) -> None:
        """Create a counter or histogram before its first event, for every value of its last label.
        ``labels``: the values of the labels before the last."""
        metric = BY_NAME[name]
        for full in [(*labels, v) for v in metric.values] or [labels]:
            if metric.type is Type.COUNTER:
                self.add(name, 0.0, *full)
            else:
                self.observe(name, 0.0, *full, times=0)

    def observe(self, name: str, value: float, *labels: object, times: int = 1) -> None:
        """Add ``value`` to a histogram ``times`` times."""
        self.observe_all(name, [value], *labels, times=times)

    def observe_all(self, name: str, values: Sequence[float], *labels: object, times: int = 1) -> None:
        """Add each value to a histogram ``times`` times."""
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
        """Set the gauge with the chosen value of the last label to 1, and the gauges with the others to 0."""
        for value in BY_NAME[name].values:
            self.set(name, value == str(chosen), *labels, value)

    def forget(self, name: str, *labels: object) -> None:
        """Remove a value that is no longer known, or whose subject no longer exists."""
        self._values.get(name, {}).pop(_texts(labels), None)

    def get(self, name: str, *labels: object) -> Value | None:
        return self._values.get(name, {}).get(_texts(labels))

    def copy(self) -> Measured:
        return Measured({name: dict(of) for name, of in self._values.items()})

    def _of(self, name: str, labels: tuple[object, ...], type: Type) -> dict[Labels, Value]:
        metric = BY_NAME[name]
        assert metric.type is type, f"{name} is a {metric.type}"
        assert len(metric.labels) == len(labels), f"{name} has the labels {metric.labels}"
        return self._values.setdefault(name, {})


def _texts(labels: tuple[object, ...]) -> Labels:
    return tuple(map(str, labels))
