import re
from pathlib import Path

import pytest

import elasticd
from elasticd.telemetry.catalog import LABELS, METRICS, Metric, Type

UNITS = {"", "seconds", "bytes", "ratio", "celsius", "watts"}


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_a_metric_is_named_as_prometheus_wants_it(metric: Metric) -> None:
    assert re.fullmatch(r"elasticd_[a-z0-9_]+[a-z]", metric.name)
    assert metric.unit in UNITS
    base = metric.name.removesuffix("_total")
    assert (metric.name != base) == (metric.type is Type.COUNTER)
    assert base.endswith(f"_{metric.unit}") if metric.unit else base.rpartition("_")[2] not in UNITS
    assert not base.endswith(("_count", "_sum", "_bucket", "_created"))
    assert not re.search(r"_(age|uptime)_", base), "a time is exported, and a query computes the age"


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_a_metric_has_bounded_labels_and_its_help_is_a_sentence(metric: Metric) -> None:
    assert set(metric.labels) <= set(LABELS)
    assert metric.help.endswith(".") and "\n" not in metric.help
    assert (metric.type is Type.HISTOGRAM) == bool(metric.buckets)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    if metric.type is Type.HISTOGRAM:
        assert set(metric.labels) <= {"slot"}, "each value of another label is a series for each bucket"


def test_each_label_has_one_meaning_and_so_one_list_of_values() -> None:
    known: dict[str, set[frozenset[str]]] = {"run": set(), "node": set()}
    for metric in METRICS:
        for label in metric.labels:
            known.setdefault(label, set())
        if metric.values:
            known[metric.labels[-1]].add(frozenset(metric.values))
    assert known.keys() == LABELS.keys()
    for label, lists in known.items():
        assert not lists or frozenset().union(*lists) in lists, f"{label} has lists that differ"


def test_no_two_metrics_share_a_name() -> None:
    assert len({m.name for m in METRICS}) == len(METRICS)


def test_every_metric_of_the_catalogue_is_set_somewhere() -> None:
    told = "\n".join(path.read_text() for path in (Path(elasticd.__file__).parent / "daemon").glob("*.py"))
    told = told.replace('f"elasticd_gpu_{name}"', " ".join(re.findall(r'\("([a-z_]+)", reading', told)))
    for metric in METRICS:
        names = {metric.name, metric.name.removeprefix("elasticd_gpu_")}
        assert any(name in told for name in names), f"{metric.name} is set nowhere"
