"""Write dashboards/*.json: python deploy/grafana/generate.py (needs grafana-foundation-sdk)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableRefresh

SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
RUN = '{run=~"$run"}'
SLOT = '{run=~"$run", node=~"$node"}'
FAULT = "{{cause}}"
WORKER = "{{node}}/{{slot}}"


@dataclass(frozen=True)
class Panel:
    """``queries``: pairs of an expression and its legend. ``now``: show the present value, not a curve.
    ``most``: the upper end of the scale."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    help: str = ""
    stacked: bool = False
    now: bool = False
    most: float | None = None


@dataclass(frozen=True)
class Board:
    """A dashboard. ``variables``: pairs of a label to choose by, and the metric that has its values."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    variables: tuple[tuple[str, str], ...] = ()


def now(title: str, expr: str, unit: str = "short") -> Panel:
    return Panel(title, ((expr, "{{run}}"),), unit, now=True)


def mean(histogram: str) -> str:
    """Return the mean of the observations of 15 minutes; no value without an observation."""
    total, count = (f"sum by (run) (increase({histogram}_{part}{RUN}[15m]))" for part in ("sum", "count"))
    return f"{total} / ({count} > 0)"


RUNS = ("run", "elasticd_round")
NODES = ("node", 'elasticd_round{run=~"$run"}')

JOB = Board(
    "job",
    "elasticd: a job",
    (
        now("Workers", f"run:elasticd_world_size:max{RUN}"),
        now("Goodput, last hour", f"run:elasticd_goodput:ratio1h{RUN}", "percentunit"),
        now("Since the last step", f"time() - run:elasticd_last_step_timestamp_seconds:max{RUN}", "s"),
        now("Restarts left", f"max by (run) (elasticd_restart_budget_left{RUN})"),
        now(
            "Age of the newest checkpoint",
            f"time() - max by (run) (elasticd_checkpoint_timestamp_seconds{RUN})",
            "s",
        ),
        now("Round", f"max by (run) (elasticd_round{RUN})"),
        Panel(
            "World size",
            (
                (f"run:elasticd_world_size:max{RUN}", "{{run}} now"),
                (f"max by (run) (elasticd_world_min{RUN})", "{{run}} min"),
                (f"max by (run) (elasticd_world_max{RUN})", "{{run}} max"),
            ),
        ),
        Panel("Steps a second", ((f"run:elasticd_steps:rate1m{RUN}", "{{run}}"),), "ops"),
        Panel(
            "Where the time goes",
            ((f"run_kind:elasticd_time_seconds:rate5m{RUN}", "{{run}} {{kind}}"),),
            help="The number of slots in each kind of time: the average of five minutes.",
            stacked=True,
        ),
        Panel("Goodput", ((f"run:elasticd_goodput:ratio5m{RUN}", "{{run}}"),), "percentunit", most=1),
        Panel(
            "Rounds by cause",
            ((f"sum by (run, cause) (increase(elasticd_rounds_total{RUN}[5m])) > 0", "{{run}} {{cause}}"),),
            stacked=True,
        ),
        Panel(
            "From a fault to the next step",
            (
                (mean("elasticd_recover_seconds"), "{{run}} recovered"),
                (mean("elasticd_detect_seconds"), "{{run}} detected"),
            ),
            "s",
            "The mean over 15 minutes.",
        ),
        Panel(
            "Nodes by state",
            ((f"max by (run, node_state) (elasticd_members{RUN})", "{{run}} {{node_state}}"),),
            stacked=True,
        ),
        Panel("Phase", ((f"max by (run, phase) (elasticd_job_phase{RUN}) == 1", "{{run}} {{phase}}"),)),
        Panel(
            "Samples a second",
            ((f"sum by (run) (rate(elasticd_samples_total{RUN}[1m]))", "{{run}}"),),
            "ops",
            "Of scripts that tell them.",
        ),
        Panel(
            "Loss",
            ((f"avg by (run) (elasticd_loss{RUN})", "{{run}}"),),
            help="The mean of the losses that the workers reported last. Only scripts that report a loss.",
        ),
        Panel(
            "Time for a checkpoint",
            (
                (mean("elasticd_checkpoint_duration_seconds"), "{{run}} until the commit"),
                (mean("elasticd_checkpoint_blocked_seconds"), "{{run}} training is blocked"),
            ),
            "s",
            "The mean over 15 minutes.",
        ),
        Panel(
            "Checkpoints by result",
            (
                (
                    f"sum by (run, result) (increase(elasticd_checkpoints_total{RUN}[5m])) > 0",
                    "{{run}} {{result}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Size of the newest checkpoint",
            ((f"max by (run) (elasticd_checkpoint_size_bytes{RUN})", "{{run}}"),),
            "bytes",
        ),
        Panel(
            "etcd request time, 99th percentile",
            ((f"run_node:elasticd_etcd_request_seconds:p99_5m{RUN}", "{{run}} {{node}}"),),
            "s",
        ),
    ),
    (RUNS,),
)

WORKERS = Board(
    "workers",
    "elasticd: health of workers",
    (
        Panel("Up", ((f"elasticd_worker_up{SLOT}", WORKER),), most=1),
        Panel(
            "Since the last step",
            ((f"time() - elasticd_worker_last_step_timestamp_seconds{SLOT}", WORKER),),
            "s",
        ),
        Panel("Steps a second", ((f"rate(elasticd_worker_steps_total{SLOT}[1m])", WORKER),), "ops"),
        Panel(
            "Time of a step, mean",
            (
                (
                    (
                        f"rate(elasticd_step_seconds_sum{SLOT}[1m]) "
                        f"/ (rate(elasticd_step_seconds_count{SLOT}[1m]) > 0)"
                    ),
                    WORKER,
                ),
            ),
            "s",
        ),
        Panel(
            "Samples a second",
            ((f"rate(elasticd_samples_total{SLOT}[1m])", WORKER),),
            "ops",
            "Of scripts that tell them.",
        ),
        Panel(
            "Restarts within five minutes, by cause",
            ((f"increase(elasticd_worker_restarts_total{SLOT}[5m]) > 0", f"{WORKER} {FAULT}"),),
        ),
        Panel(
            "Exits within five minutes",
            ((f"increase(elasticd_worker_exits_total{SLOT}[5m]) > 0", f"{WORKER} {{{{exit}}}}"),),
        ),
        Panel("Hung", ((f"increase(elasticd_hangs_total{SLOT}[15m])", WORKER),)),
        Panel(
            "Time of a step relative to peers",
            ((f"elasticd_worker_slowdown_ratio{SLOT}", WORKER),),
            help="Without the time spent waiting for other workers. 1.2: a fifth slower than the median.",
        ),
        Panel(
            "Stragglers and bad GPUs",
            (
                (f"elasticd_worker_straggling{SLOT} == 1", f"{WORKER} lags behind"),
                (f"elasticd_slot_bad{SLOT} == 1", f"{WORKER} has a bad GPU"),
            ),
            stacked=True,
        ),
        Panel(
            "State",
            ((f"elasticd_slot_state{SLOT} == 1", f"{WORKER} {{{{slot_state}}}}"),),
        ),
        Panel("Memory", ((f"elasticd_worker_resident_memory_bytes{SLOT}", WORKER),), "bytes"),
        Panel("CPUs in use", ((f"rate(elasticd_worker_cpu_seconds_total{SLOT}[1m])", WORKER),)),
        Panel("GPU in use", ((f"elasticd_gpu_utilization_ratio{SLOT}", WORKER),), "percentunit", most=1),
        Panel(
            "GPU memory in use",
            ((f"elasticd_gpu_memory_used_bytes{SLOT} / elasticd_gpu_memory_size_bytes{SLOT}", WORKER),),
            "percentunit",
            most=1,
        ),
        Panel("GPU temperature", ((f"elasticd_gpu_temperature_celsius{SLOT}", WORKER),), "celsius"),
        Panel("GPU power", ((f"elasticd_gpu_power_watts{SLOT}", WORKER),), "watt"),
        Panel(
            "GPU throttled",
            ((f"elasticd_gpu_throttled{SLOT} == 1", f"{WORKER} {{{{reason}}}}"),),
            stacked=True,
        ),
        Panel(
            "GPU errors",
            (
                (f"elasticd_gpu_xid_errors_total{SLOT}", f"{WORKER} XID {{{{xid}}}}"),
                (f"elasticd_gpu_ecc_errors_total{SLOT}", f"{WORKER} memory, {{{{error}}}}"),
            ),
        ),
    ),
    (RUNS, NODES),
)

FLEET = Board(
    "fleet",
    "elasticd: all jobs",
    (
        now("Jobs", "count(run:elasticd_world_size:max)"),
        now("Workers", "sum(run:elasticd_world_size:max)"),
        now("Agents scraped", 'sum(up{job="elasticd"})'),
        now("Alerts", 'count(ALERTS{alertstate="firing"}) or vector(0)'),
        Panel("World size", (("run:elasticd_world_size:max", "{{run}}"),), stacked=True),
        Panel("Goodput", (("run:elasticd_goodput:ratio5m", "{{run}}"),), "percentunit", most=1),
        Panel(
            "Faults of the last 15 minutes",
            (("sum by (run) (run_cause:elasticd_faults:increase15m)", "{{run}}"),),
        ),
        Panel(
            "Since the last step",
            (("time() - run:elasticd_last_step_timestamp_seconds:max", "{{run}}"),),
            "s",
        ),
        Panel(
            "Where the time goes",
            (("sum by (kind) (run_kind:elasticd_time_seconds:rate5m)", "{{kind}}"),),
            stacked=True,
        ),
        Panel(
            "Age of the newest checkpoint",
            (("time() - max by (run) (elasticd_checkpoint_timestamp_seconds)", "{{run}}"),),
            "s",
        ),
        Panel(
            "Firing alerts",
            (('ALERTS{alertstate="firing"}', "{{alertname}} {{run}} {{node}} {{slot}}"),),
            stacked=True,
        ),
        Panel("etcd answers", (("min by (run) (elasticd_etcd_up)", "{{run}}"),), most=1),
        Panel(
            "CPUs that agents use",
            (("sum by (run) (rate(elasticd_agent_cpu_seconds_total[1m]))", "{{run}}"),),
        ),
        Panel(
            "Memory of agents", (("sum by (run) (elasticd_agent_resident_memory_bytes)", "{{run}}"),), "bytes"
        ),
    ),
)

BOARDS = (JOB, WORKERS, FLEET)


def drawn(panel: Panel, number: int, numbers_wide: int) -> stat.Panel | timeseries.Panel:
    if panel.now:
        built: stat.Panel | timeseries.Panel = stat.Panel().height(4).span(numbers_wide)
    else:
        stacking = common.StackingConfig().mode(StackingMode.NORMAL if panel.stacked else StackingMode.NONE)
        built = timeseries.Panel().height(8).span(12).min(0).fill_opacity(40 if panel.stacked else 5)
        built = built.stacking(stacking)
        if panel.most is not None:
            built = built.max(panel.most)
    built = built.id(number).title(panel.title).description(panel.help).unit(panel.unit).datasource(SOURCE)
    for letter, (expr, legend) in zip("ABCDEF", panel.queries, strict=False):
        query = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(letter)
        built = built.with_target(query.instant() if panel.now else query.range())
    return built


def text_of(board: Board) -> str:
    """Return the dashboard as JSON."""
    made = dashboard.Dashboard(board.title).uid(f"elasticd-{board.name}").tags(["elasticd"]).editable()
    made = made.time("now-1h", "now").refresh("10s").tooltip(DashboardCursorSync.CROSSHAIR)
    made = made.with_variable(dashboard.DatasourceVariable("source").label("source").type("prometheus"))
    for label, of in board.variables:
        variable = dashboard.QueryVariable(label).label(label).datasource(SOURCE)
        variable = variable.query(f"label_values({of}, {label})").refresh(
            VariableRefresh.ON_TIME_RANGE_CHANGED
        )
        made = made.with_variable(variable.multi(True).include_all(True).all_value(".+"))
    wide = 24 // max(1, sum(panel.now for panel in board.panels))  # the numbers fill one row
    for number, panel in enumerate(board.panels, 1):
        made = made.with_panel(drawn(panel, number, wide))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def files() -> Iterator[tuple[Path, str]]:
    for board in BOARDS:
        yield Path(__file__).parent / "dashboards" / f"{board.name}.json", text_of(board)


if __name__ == "__main__":
    for path, text in files():
        path.write_text(text)
        print(path, file=sys.stderr)
