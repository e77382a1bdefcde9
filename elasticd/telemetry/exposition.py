"""Export the measured values with prometheus_client, in the format that the scraper asks for.

The import takes about 15 ms, so import this module only when a scrape comes.
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

from elasticd.telemetry.catalog import METRICS, Metric, Type
from elasticd.telemetry.metrics import Histogram, Labels, Measured, Value

# The client's own metrics of a process: process_* and python_info, without the labels "run" and "node".
_OF_THE_AGENT = (ProcessCollector(registry=None), PlatformCollector(registry=None))


def expose(measured: Measured, run: str, node: str, accept: str = "") -> tuple[bytes, str]:
    """Return the body and the content type of a scrape. ``accept``: the request's Accept header; an empty one
    selects Prometheus's text format."""
    registry = CollectorRegistry()
    for collector in (_Measured(measured, (_encodable(run), _encodable(node))), *_OF_THE_AGENT):
        registry.register(collector)
    encoder, content_type = _encoder(accept)
    return encoder(registry), content_type


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    try:
        return choose_encoder(accept)
    except TypeError:  # the client cannot parse the version in the header
        return choose_encoder("")


@dataclass(frozen=True, eq=False)
class _Measured(Collector):
    measured: Measured
    common: Labels  # the values of "run" and "node"

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
            family.add_metric(labels, value)
        return family


def _encodable(text: str) -> str:
    """Return the text as valid UTF-8: a name from the command line may hold other bytes, which the client
    cannot encode."""
    return text if text.isascii() else text.encode(errors="replace").decode()
