import math
from collections.abc import Callable, Iterable

import pytest
from prometheus_client import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from elasticd.telemetry.catalog import METRICS, Type
from elasticd.telemetry.exposition import expose
from elasticd.telemetry.metrics import Metrics
from tests.telemetry import promtool

PROMETHEUS_ASKS = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3_ASKS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
Parse = Callable[[str], Iterable[Family]]
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
BOTH = pytest.mark.parametrize(
    ("accept", "parse"),
    [("text/plain", parse_text), (OPENMETRICS, parse_openmetrics)],
    ids=["text", "openmetrics"],
)


def families_of(
    metrics: Metrics, accept: str, parse: Parse, run: str = "r", node: str = "n"
) -> dict[str, Family]:
    """Return elasticd's own metrics as Prometheus reads them, by name."""
    body, _ = expose(metrics.copy(), run, node, accept)
    return {family.name: family for family in parse(body.decode()) if family.name.startswith("elasticd_")}


def everything(slots: int = 2) -> Metrics:
    """Return a value for each metric of the catalogue, with all its labels."""
    metrics = Metrics()
    for metric in METRICS:
        for slot in range(slots) if "slot" in metric.labels else [None]:
            before = [] if slot is None else [slot]
            more = len(metric.labels) > len(before)
            for last in [[v] for v in metric.values] or ([["13"]] if more else [[]]):
                labels = (*before, *last)
                match metric.type:
                    case Type.GAUGE:
                        metrics.set(metric.name, 0.25, *labels)
                    case Type.COUNTER:
                        metrics.add(metric.name, 3, *labels)
                    case Type.HISTOGRAM:
                        metrics.observe(metric.name, metric.buckets[1], *labels, times=2)
                        metrics.observe(metric.name, 1e9, *labels)
    return metrics


@BOTH
def test_prometheus_reads_every_metric_as_it_was_measured(accept: str, parse: Parse) -> None:
    families = families_of(everything(), accept, parse, "a job", "node-1")
    assert len(families) == len(METRICS)
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert family.type == metric.type
        assert family.documentation == metric.help
        assert accept == "text/plain" or family.unit == metric.unit
        for sample in family.samples:
            assert (sample.labels["run"], sample.labels["node"]) == ("a job", "node-1")
            assert set(sample.labels) - {"run", "node", "le"} == set(metric.labels)
        values = [s.value for s in family.samples if s.name == metric.name]
        expected = {Type.GAUGE: 0.25, Type.COUNTER: 3.0}.get(metric.type)
        assert set(values) == ({expected} if expected is not None else set())


@BOTH
def test_a_histogram_is_cumulative_and_ends_at_infinity(accept: str, parse: Parse) -> None:
    metrics = Metrics()
    for seconds in (0.009, 0.01, 0.011, 400.0):
        metrics.observe("elasticd_step_seconds", seconds, 0)
    (family,) = families_of(metrics, accept, parse).values()
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert (buckets["0.01"], buckets["0.025"], buckets["300.0"], buckets["+Inf"]) == (2, 3, 3, 4)
    by_name = {s.name: s.value for s in family.samples}
    assert by_name["elasticd_step_seconds_count"] == 4
    assert by_name["elasticd_step_seconds_sum"] == pytest.approx(400.03)


@BOTH
@pytest.mark.parametrize("name", ['say "hi"', "back\\slash", "two\nlines", "Grüße", "a,b{c}=d", "\\n"])
def test_a_job_may_have_any_name(name: str, accept: str, parse: Parse) -> None:
    metrics = Metrics()
    metrics.set("elasticd_round", 3)
    (family,) = families_of(metrics, accept, parse, run=name).values()
    assert family.samples[0].labels["run"] == name


@BOTH
def test_values_that_are_no_numbers_are_told_as_such(accept: str, parse: Parse) -> None:
    metrics = Metrics()
    for slot, value in enumerate((math.nan, math.inf, -math.inf)):
        metrics.set("elasticd_loss", value, slot)
    (family,) = families_of(metrics, accept, parse).values()
    told = [s.value for s in family.samples]
    assert math.isnan(told[0]) and told[1:] == [math.inf, -math.inf]


@BOTH
def test_bytes_that_are_no_text_are_shown_as_question_marks(accept: str, parse: Parse) -> None:
    metrics = Metrics()
    metrics.set("elasticd_user_value", 1, 0, "caf\udce9")
    (family,) = families_of(metrics, accept, parse, run="\udcff", node="n\udcff").values()
    assert family.samples[0].labels == {"run": "?", "node": "n?", "slot": "0", "name": "caf?"}


@BOTH
def test_the_agents_own_process_and_python_are_told_as_everywhere(accept: str, parse: Parse) -> None:
    body, _ = expose(everything().copy(), "r", "n", accept)
    values = {sample.name: sample.value for family in parse(body.decode()) for sample in family.samples}
    assert values["process_resident_memory_bytes"] > 1e6 and values["process_cpu_seconds_total"] > 0
    assert 0 < values["process_open_fds"] < values["process_max_fds"] and values["python_info"] == 1


@pytest.mark.parametrize(
    ("accept", "answered"),
    [
        (PROMETHEUS_ASKS, OPENMETRICS + "; escaping=underscores"),
        (PROMETHEUS_3_ASKS, OPENMETRICS + "; escaping=allow-utf-8"),
        ("application/openmetrics-text", OPENMETRICS),
        ("text/plain", TEXT),
        ("*/*", TEXT),
        ("", TEXT),
        ("application/openmetrics-text; version=1.x", TEXT),
    ],
)
def test_openmetrics_is_served_if_accepted_and_the_text_format_otherwise(accept: str, answered: str) -> None:
    body, content_type = expose(everything().copy(), "r", "n", accept)
    assert content_type == answered
    assert body.endswith(b"# EOF\n") == answered.startswith(OPENMETRICS)


def test_a_counter_is_there_before_anything_was_counted() -> None:
    metrics = Metrics()
    metrics.start("elasticd_worker_exits_total", 0)
    metrics.start("elasticd_rounds_total")
    measured = metrics.copy()
    assert set(measured.values["elasticd_worker_exits_total"].values()) == {0.0}
    assert measured.values["elasticd_rounds_total"]["worker_failed",] == 0


def test_a_copy_does_not_change_with_the_book() -> None:
    metrics = Metrics()
    metrics.add("elasticd_rounds_total", 1, "start")
    copy = metrics.copy()
    metrics.add("elasticd_rounds_total", 1, "start")
    metrics.forget("elasticd_rounds_total", "start")
    assert copy.values["elasticd_rounds_total"] == {("start",): 1.0}


@pytest.mark.parametrize(
    "misuse",
    [
        lambda metrics: metrics.set("elasticd_unheard_of", 1),
        lambda metrics: metrics.set("elasticd_rounds_total", 1, "start"),
        lambda metrics: metrics.add("elasticd_rounds_total", 1),
        lambda metrics: metrics.add("elasticd_rounds_total", -1, "start"),
    ],
)
def test_only_what_the_catalogue_has_can_be_measured(misuse: Callable[[Metrics], None]) -> None:
    with pytest.raises((KeyError, AssertionError)):
        misuse(Metrics())


@pytest.mark.skipif(promtool.PROMTOOL is None, reason="promtool (Debian: prometheus) is not installed")
def test_promtool_has_nothing_to_say_of_any_metric() -> None:
    body, _ = expose(everything().copy(), "r", "n")
    assert promtool.lint(body) == ""
