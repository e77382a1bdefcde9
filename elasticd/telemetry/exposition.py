"""Measured values as prometheus_client writes them for Prometheus, in the format that the scraper asks for.

Importing this module costs some 15 ms: import it where something is scraped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from elasticd.telemetry.book import Histogram, Labels, Measured, Value
from elasticd.telemetry.catalog import METRICS, Metric, Type

# What the client tells of any process: process_* and python_info, without the labels "run" and "node".
_OF_THE_AGENT = (ProcessCollector(registry=None), PlatformCollector(registry=None))


def expose(measured: Measured, run: str, node: str, now: float, accept: str = "") -> tuple[bytes, str]:
    """The body of a scrape and its content type. ``now``: seconds since the epoch, which ages are told from.
    ``accept``: the header of the request; without one the answer is in Prometheus' own text format."""
    registry = CollectorRegistry()
    for collector in (_Measured(measured, (_encodable(run), _encodable(node)), now), *_OF_THE_AGENT):
        registry.register(collector)
    encoder, content_type = _encoder(accept)
    return encoder(registry), content_type


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    try:
        return choose_encoder(accept)
    except TypeError:  # the client cannot compare a version that is not made of numbers
        return choose_encoder("")


@dataclass(frozen=True, eq=False)
class _Measured(Collector):
    measured: Measured
    common: Labels  # the values of "run" and "node"
    now: float

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            if values := self.measured.values.get(metric.name):
                yield self._family(metric, values)

    def _family(self, metric: Metric, values: Mapping[Labels, Value]) -> Family:
        names = ("run", "node", *metric.labels)
        labeled = (([*self.common, *map(_encodable, labels)], value) for labels, value in values.items())
        if metric.type is Type.HISTOGRAM:
            bounds = [*map(str, metric.buckets), "+Inf"]
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=names, unit=metric.unit)
            for labels, value in labeled:
                assert isinstance(value, Histogram)
                histogram.add_metric(
                    labels, list(zip(bounds, accumulate(value.counts), strict=True)), value.sum
                )
            return histogram
        kind = CounterMetricFamily if metric.type is Type.COUNTER else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=names, unit=metric.unit)
        for labels, value in labeled:
            assert not isinstance(value, Histogram)
            family.add_metric(labels, max(0.0, self.now - value) if metric.type is Type.AGE else value)
        return family


def _encodable(text: str) -> str:
    """A name from a command line may hold bytes that are no UTF-8, which the client does not write."""
    return text if text.isascii() else text.encode(errors="replace").decode()
