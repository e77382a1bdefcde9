"""Measured values as Prometheus reads them: its text format, or OpenMetrics where that is asked for.

Written out here, as prometheus_client takes 6 to 9 µs a line, too much beside training for what is
joining strings; its parsers and promtool judge the result in the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from elasticd.telemetry.book import Histogram, Labels, Measured
from elasticd.telemetry.catalog import METRICS, Metric, Type

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def content_type(accept: str) -> str:
    """What to answer to an Accept header. Who takes OpenMetrics gets it, as Prometheus asks for both
    and prefers it."""
    return OPENMETRICS if "application/openmetrics-text" in accept else TEXT


def expose(measured: Measured, run: str, node: str, now: float, *, openmetrics: bool = False) -> bytes:
    """The body of a scrape. ``now``: seconds since the epoch, which ages are told from."""
    common = f'run="{_escaped(run)}",node="{_escaped(node)}"'
    lines: list[str] = []
    for metric in METRICS:
        values = measured.values.get(metric.name)
        if values:
            lines += _heading(metric, openmetrics)
            for labels, value in values.items():
                lines += _samples(metric, _labels(metric, labels, common), value, now)
    if openmetrics:
        lines.append("# EOF")
    lines.append("")
    return "\n".join(lines).encode(errors="replace")


def _heading(metric: Metric, openmetrics: bool) -> Iterator[str]:
    # Prometheus' own format names a counter as its samples are named, OpenMetrics without "_total".
    family = metric.name.removesuffix("_total") if openmetrics else metric.name
    yield f"# HELP {family} {metric.help}"
    yield f"# TYPE {family} {'gauge' if metric.type is Type.AGE else metric.type}"
    if openmetrics and metric.unit:
        yield f"# UNIT {family} {metric.unit}"


def _labels(metric: Metric, labels: Labels, common: str) -> str:
    return common + "".join(
        f',{name}="{_escaped(value)}"' for name, value in zip(metric.labels, labels, strict=True)
    )


def _samples(metric: Metric, labels: str, value: float | Histogram, now: float) -> Iterator[str]:
    name = metric.name
    if not isinstance(value, Histogram):
        shown = max(0.0, now - value) if metric.type is Type.AGE else value
        yield f"{name}{{{labels}}} {_number(shown)}"
        return
    counted = list(accumulate(value.counts))
    for bound, count in zip((*metric.buckets, float("inf")), counted, strict=True):
        yield f'{name}_bucket{{{labels},le="{_number(bound)}"}} {count}'
    yield f"{name}_sum{{{labels}}} {_number(value.sum)}"
    yield f"{name}_count{{{labels}}} {counted[-1]}"


def _number(value: float) -> str:
    """As Go and Python both read it."""
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value) if value == value else "NaN"  # NaN alone is not itself


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
