import re
from pathlib import Path

import pytest

import elasticd
from elasticd.telemetry.catalog import METRICS, Metric, Type

LABELS = {"slot", "cause", "kind"}
UNITS = {"", "seconds", "bytes", "ratio", "celsius", "watts"}


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_a_metric_is_named_as_prometheus_wants_it(metric: Metric) -> None:
    assert re.fullmatch(r"elasticd_[a-z0-9_]+[a-z]", metric.name)
    assert metric.unit in UNITS
    base = metric.name.removesuffix("_total")
    assert (metric.name != base) == (metric.type is Type.COUNTER)
    assert base.endswith(f"_{metric.unit}") if metric.unit else base.rpartition("_")[2] not in UNITS
    assert not base.endswith(("_count", "_sum", "_bucket", "_info", "_created"))


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_its_labels_are_bounded_and_its_help_is_a_sentence(metric: Metric) -> None:
    assert set(metric.labels) <= LABELS
    assert not metric.values or metric.labels[-1] in ("cause", "kind")
    assert metric.help.endswith(".") and "\n" not in metric.help
    assert (metric.type is Type.HISTOGRAM) == bool(metric.buckets)
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_no_two_metrics_share_a_name() -> None:
    assert len({m.name for m in METRICS}) == len(METRICS)


def test_no_metric_is_promised_that_nobody_feeds() -> None:
    told = "\n".join(path.read_text() for path in (Path(elasticd.__file__).parent / "daemon").glob("*.py"))
    told = told.replace('f"elasticd_gpu_{name}"', " ".join(re.findall(r'\("([a-z_]+)", reading', told)))
    for metric in METRICS:
        names = {metric.name, metric.name.removeprefix("elasticd_gpu_")}
        assert any(name in told for name in names), f"{metric.name} is set nowhere"
