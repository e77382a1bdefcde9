"""What the dashboards show; generate.py draws it.

The dashboard of all jobs leads to the dashboard of a job, and that one to the dashboard of a node's workers.
No curve of the first two is of one worker, so that they are readable with any number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticd.telemetry.catalog import BY_NAME

OF_RUN = 'run="$run"'
OF_NODE = 'run="$run", node="$node"'
RUN = f"{{{OF_RUN}}}"
NODE = f"{{{OF_NODE}}}"
WINDOW = "[$__rate_interval]"


@dataclass(frozen=True)
class Limits:
    """The values from which on a panel is yellow, then red. If ``red`` is less than ``yellow``, smaller
    values are worse."""

    yellow: float
    red: float


@dataclass(frozen=True)
class Link:
    """``to``: the address of a dashboard below /d/."""

    title: str
    to: str


@dataclass(frozen=True)
class States:
    """A query for the state of each thing that ``by`` tells apart. A state is its number, from 1, in the
    catalogue's list of values."""

    metric: str
    label: str
    by: str
    where: str = ""

    @property
    def values(self) -> tuple[str, ...]:
        return BY_NAME[self.metric].values

    @property
    def expr(self) -> str:
        where = f", {self.where}" if self.where else ""
        each = (
            f'{n} * {self.metric}{{{self.label}="{value}"{where}}}' for n, value in enumerate(self.values, 1)
        )
        return f"max by ({self.by}) ({' or '.join(each)})"


@dataclass(frozen=True)
class Number:
    """One present value."""

    title: str
    expr: str
    unit: str = "short"
    limits: Limits | None = None


@dataclass(frozen=True)
class Curves:
    """``queries``: pairs of an expression and its legend. ``bars``: what happened at a time, stacked.
    ``most``: the upper end of the scale. ``leads_to``: the link of each curve."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    help: str = ""
    stacked: bool = False
    bars: bool = False
    most: float | None = None
    limits: Limits | None = None
    leads_to: Link | None = None


@dataclass(frozen=True)
class Timeline:
    """The states of things over time, a row for each. ``legend``: the name of a row. ``height``: in units of
    Grafana's grid."""

    title: str
    states: States
    legend: str
    height: int = 8
    leads_to: Link | None = None


@dataclass(frozen=True)
class Column:
    title: str
    query: str | States
    unit: str = "short"
    limits: Limits | None = None


@dataclass(frozen=True)
class Table:
    """A row for each thing that the labels ``by`` tell apart, which are all that the columns'
    queries keep. ``worst``: the column to sort by, largest first. ``leads_to``: the link of each row."""

    title: str
    by: tuple[str, ...]
    columns: tuple[Column, ...]
    worst: str
    leads_to: Link


Panel = Number | Curves | Timeline | Table


@dataclass(frozen=True)
class Event:
    """A mark in all curves where a counter has grown. ``by``: the labels that say what happened."""

    title: str
    counter: str
    by: tuple[str, ...]
    color: str

    @property
    def expr(self) -> str:
        """Grafana asks for every minute. The windows overlap, for no increase to be missed between two."""
        return f"sum by ({', '.join(self.by)}) (increase({self.counter}[2m])) > 0"


@dataclass(frozen=True)
class Board:
    """A dashboard. ``variables``: pairs of a label to choose by, and the metric that has its values.
    ``links`` keep the chosen values."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    events: tuple[Event, ...]
    variables: tuple[tuple[str, str], ...] = ()
    links: tuple[Link, ...] = ()


def mean(histogram: str, by: str = "run", where: str = RUN) -> str:
    """Return the mean of the observations; no value without an observation."""
    total, count = (f"sum by ({by}) (rate({histogram}_{part}{where}{WINDOW}))" for part in ("sum", "count"))
    return f"{total} / ({count} > 0)"


def per_second(counter: str, by: str, where: str = RUN) -> str:
    return f"sum by ({by}) (rate({counter}{where}{WINDOW}))"


def increases(counter: str, by: str, where: str = RUN) -> str:
    """Return the increases, without those of 0."""
    return f"sum by ({by}) (increase({counter}{where}{WINDOW})) > 0"


def spread(expr: str, least: str, most: str) -> tuple[tuple[str, str], ...]:
    """Return three curves, however many the expression has."""
    return (f"max({expr})", most), (f"quantile(0.5, {expr})", "median"), (f"min({expr})", least)


def failures(where: str, *by: str) -> Event:
    counter = f'elasticd_worker_exits_total{{{where}, exit!="success"}}'
    return Event("Failures", counter, by, "red")


def since(timestamp: str, by: str = "run") -> str:
    return f"time() - max by ({by}) ({timestamp})"


STALLED = Limits(120, 600)
GOODPUT = Limits(0.9, 0.8)
CHECKPOINT_OLD = Limits(1800, 3600)
SLOWER = Limits(1.05, 1.1)  # as `straggler_ratio` of the policy
LAST_STEP = "elasticd_worker_last_step_timestamp_seconds"
NEWEST_STEP = "run:elasticd_last_step_timestamp_seconds:max"
CHECKPOINT = "elasticd_checkpoint_timestamp_seconds"
UNIT = f"max by (run) (elasticd_world_unit{RUN})"
NOT_IN_WORLD = f'sum by (slot_state) (elasticd_slot_state{{{OF_RUN}, slot_state=~"idle|ready"}})'
ROUNDS = Event("Rounds", f"elasticd_rounds_total{RUN}", ("cause",), "blue")
STEP_S = mean("elasticd_step_seconds", "node, slot")
THIS_JOB = Link("This job", "elasticd-job?var-run=${__field.labels.run}")

FLEET = Board(
    "fleet",
    "elasticd: all jobs",
    (
        Number("Jobs", "count(run:elasticd_world_size:max)"),
        Number("Workers", "sum(run:elasticd_world_size:max)"),
        Number("Agents scraped", 'sum(up{job="elasticd"})'),
        Number("Alerts", 'count(ALERTS{alertstate="firing"}) or vector(0)', limits=Limits(1, 5)),
        Table(
            "Each job",
            ("run",),
            (
                Column("phase", States("elasticd_job_phase", "phase", "run")),
                Column("workers", "max by (run) (run:elasticd_world_size:max)"),
                Column("workers of a unit", "max by (run) (elasticd_world_unit)"),
                Column("goodput", "max by (run) (run:elasticd_goodput:ratio1h)", "percentunit", GOODPUT),
                Column("since the last step", since(NEWEST_STEP), "s", STALLED),
                Column("restarts left", "max by (run) (elasticd_restart_budget_left)", limits=Limits(2, 1)),
                Column(
                    "alerts",
                    'count by (run) (ALERTS{alertstate="firing"}) or 0 * run:elasticd_world_size:max',
                    limits=Limits(1, 5),
                ),
            ),
            worst="alerts",
            leads_to=Link("This job", "elasticd-job?var-run=${__data.fields.run}"),
        ),
        Timeline("Phase", States("elasticd_job_phase", "phase", "run"), "{{run}}", leads_to=THIS_JOB),
        Curves("World size", (("run:elasticd_world_size:max", "{{run}}"),), stacked=True, leads_to=THIS_JOB),
        Curves(
            "Goodput",
            (("run:elasticd_goodput:ratio5m", "{{run}}"),),
            "percentunit",
            most=1,
            limits=GOODPUT,
            leads_to=THIS_JOB,
        ),
        Curves(
            "Faults of the last 15 minutes",
            (("sum by (run) (run_cause:elasticd_faults:increase15m)", "{{run}}"),),
            limits=Limits(1, 3),
            leads_to=THIS_JOB,
        ),
        Curves(
            "Since the last step",
            ((since(NEWEST_STEP), "{{run}}"),),
            "s",
            limits=STALLED,
            leads_to=THIS_JOB,
        ),
        Curves(
            "Where the time goes",
            (("sum by (kind) (run_kind:elasticd_time_seconds:rate5m)", "{{kind}}"),),
            help="The number of slots in each kind of time: the average of five minutes.",
            stacked=True,
        ),
        Curves(
            "Age of the newest checkpoint",
            ((since(CHECKPOINT), "{{run}}"),),
            "s",
            limits=CHECKPOINT_OLD,
            leads_to=THIS_JOB,
        ),
        Curves(
            "Firing alerts",
            (('count by (alertname, run) (ALERTS{alertstate="firing"})', "{{alertname}} {{run}}"),),
            stacked=True,
            leads_to=THIS_JOB,
        ),
        Curves("etcd answers", (("min by (run) (elasticd_etcd_up)", "{{run}}"),), most=1, leads_to=THIS_JOB),
        Curves(
            "CPUs that agents use", ((per_second("elasticd_agent_cpu_seconds_total", "run", ""), "{{run}}"),)
        ),
        Curves(
            "Memory of agents", (("sum by (run) (elasticd_agent_resident_memory_bytes)", "{{run}}"),), "bytes"
        ),
        Curves(
            "Agents by version",
            (("count by (version) (elasticd_build_info)", "{{version}}"),),
            stacked=True,
        ),
    ),
    (Event("Failures", 'elasticd_worker_exits_total{exit!="success"}', ("run",), "red"),),
)

JOB = Board(
    "job",
    "elasticd: a job",
    (
        Number("Workers", f"run:elasticd_world_size:max{RUN}"),
        Number("Goodput, last hour", f"run:elasticd_goodput:ratio1h{RUN}", "percentunit", GOODPUT),
        Number("Since the last step", since(NEWEST_STEP + RUN), "s", STALLED),
        Number("Restarts left", f"max by (run) (elasticd_restart_budget_left{RUN})", limits=Limits(2, 1)),
        Number("Age of the newest checkpoint", since(CHECKPOINT + RUN), "s", CHECKPOINT_OLD),
        Number("Round", f"max by (run) (elasticd_round{RUN})"),
        Timeline("Phase", States("elasticd_job_phase", "phase", "run", OF_RUN), "{{run}}", height=4),
        Curves(
            "World size",
            (
                (f"run:elasticd_world_size:max{RUN}", "now"),
                (f"max by (run) (elasticd_world_min{RUN})", "min"),
                (f"max by (run) (elasticd_world_max{RUN})", "max"),
            ),
        ),
        Curves("Steps a second", ((f"run:elasticd_steps:rate1m{RUN}", "of the slowest worker"),), "ops"),
        Curves(
            "Where the time goes",
            ((f"run_kind:elasticd_time_seconds:rate5m{RUN}", "{{kind}}"),),
            help="The number of slots in each kind of time: the average of five minutes.",
            stacked=True,
        ),
        Curves(
            "Goodput",
            ((f"run:elasticd_goodput:ratio5m{RUN}", "productive"),),
            "percentunit",
            most=1,
            limits=GOODPUT,
        ),
        Curves("Rounds by cause", ((increases("elasticd_rounds_total", "cause"), "{{cause}}"),), bars=True),
        Curves(
            "Outages by cause",
            ((increases("elasticd_outage_seconds_total", "cause"), "{{cause}}"),),
            "s",
            "From faults, and decisions to resize, to the first step after each.",
            bars=True,
        ),
        Curves(
            "From a fault to the next step",
            (
                (mean("elasticd_recover_seconds"), "recovered"),
                (mean("elasticd_detect_seconds"), "detected"),
            ),
            "s",
            limits=Limits(60, 120),
        ),
        Curves(
            "Nodes by state",
            ((f"max by (node_state) (elasticd_members{RUN})", "{{node_state}}"),),
            stacked=True,
        ),
        Curves(
            "Slots by state",
            ((f"sum by (slot_state) (elasticd_slot_state{RUN})", "{{slot_state}}"),),
            stacked=True,
        ),
        Curves("Time of a step", spread(STEP_S, "fastest worker", "slowest worker"), "s"),
        Curves(
            "Units of workers",
            (
                (f"run:elasticd_world_size:max{RUN} / on (run) {UNIT}", "now"),
                (f"max by (run) (elasticd_world_min{RUN}) / on (run) {UNIT}", "min"),
                (f"max by (run) (elasticd_world_max{RUN}) / on (run) {UNIT}", "max"),
            ),
            help="Whole units in the world, of `--unit N`. Without that option each worker is a unit.",
        ),
        Curves(
            "Workers that wait",
            ((NOT_IN_WORLD, "{{slot_state}}"), (UNIT, "of a unit")),
            help="Slots that are not in the world. As many as a unit has could be a unit more.",
        ),
        Table(
            "Each worker",
            ("node", "slot"),
            (
                Column("state", States("elasticd_slot_state", "slot_state", "node, slot", OF_RUN)),
                Column("since the last step", since(LAST_STEP + RUN, "node, slot"), "s", STALLED),
                Column("time of a step", STEP_S, "s"),
                Column(
                    "relative to peers",
                    f"max by (node, slot) (elasticd_worker_slowdown_ratio{RUN})",
                    limits=SLOWER,
                ),
                Column(
                    "memory", f"max by (node, slot) (elasticd_worker_resident_memory_bytes{RUN})", "bytes"
                ),
                Column(
                    "restarts, last hour",
                    f"sum by (node, slot) (increase(elasticd_worker_restarts_total{RUN}[1h]))",
                ),
            ),
            worst="relative to peers",
            leads_to=Link(
                "Workers of this node", "elasticd-workers?${run:queryparam}&var-node=${__data.fields.node}"
            ),
        ),
        Curves(
            "Samples a second",
            ((per_second("elasticd_samples_total", "run"), "samples"),),
            "ops",
            "Only scripts that report their samples.",
        ),
        Curves(
            "Loss",
            ((f"avg by (run) (elasticd_loss{RUN})", "loss"),),
            help="The mean of the losses that the workers reported last. Only scripts that report a loss.",
        ),
        Curves(
            "Time for a checkpoint",
            (
                (mean("elasticd_checkpoint_duration_seconds"), "until the commit"),
                (mean("elasticd_checkpoint_blocked_seconds"), "training is blocked"),
            ),
            "s",
        ),
        Curves(
            "Checkpoints by result",
            ((increases("elasticd_checkpoints_total", "result"), "{{result}}"),),
            bars=True,
        ),
        Curves(
            "Size of the newest checkpoint",
            ((f"max by (run) (elasticd_checkpoint_size_bytes{RUN})", "size"),),
            "bytes",
        ),
        Curves(
            "etcd request time, 99th percentile",
            spread(f"run_node:elasticd_etcd_request_seconds:p99_5m{RUN}", "fastest node", "slowest node"),
            "s",
            limits=Limits(0.25, 0.5),
        ),
    ),
    (ROUNDS, failures(OF_RUN, "node", "exit")),
    (("run", "elasticd_round"),),
    (Link("All jobs", "elasticd-fleet"), Link("Workers of a node", "elasticd-workers")),
)


def each(title: str, expr: str, unit: str = "short", legend: str = "", **more: Any) -> Curves:
    """Return a curve for each slot of the node."""
    return Curves(title, ((expr, f"slot {{{{slot}}}}{legend}"),), unit, **more)


WORKERS = Board(
    "workers",
    "elasticd: the workers of a node",
    (
        Timeline(
            "State",
            States("elasticd_slot_state", "slot_state", "node, slot", OF_NODE),
            "slot {{slot}}",
        ),
        each("Since the last step", since(LAST_STEP + NODE, "node, slot"), "s", limits=STALLED),
        each("Steps a second", per_second("elasticd_worker_steps_total", "node, slot", NODE), "ops"),
        each("Time of a step, mean", mean("elasticd_step_seconds", "node, slot", NODE), "s"),
        each(
            "Time of a step relative to peers",
            f"elasticd_worker_slowdown_ratio{NODE}",
            help="Without the time spent waiting for other workers. 1.2: a fifth slower than the median.",
            limits=SLOWER,
        ),
        each(
            "Samples a second",
            per_second("elasticd_samples_total", "node, slot", NODE),
            "ops",
            help="Only scripts that report their samples.",
        ),
        each("Hung", f"increase(elasticd_hangs_total{NODE}{WINDOW})"),
        each(
            "Restarts by cause",
            increases("elasticd_worker_restarts_total", "node, slot, cause", NODE),
            legend=" {{cause}}",
            bars=True,
        ),
        each(
            "Exits",
            increases("elasticd_worker_exits_total", "node, slot, exit", NODE),
            legend=" {{exit}}",
            bars=True,
        ),
        Curves(
            "Stragglers and bad GPUs",
            (
                (f"elasticd_worker_straggling{NODE} == 1", "slot {{slot}} lags behind"),
                (f"elasticd_slot_bad{NODE} == 1", "slot {{slot}} has a bad GPU"),
            ),
            stacked=True,
        ),
        each("Memory", f"elasticd_worker_resident_memory_bytes{NODE}", "bytes"),
        each("CPUs in use", per_second("elasticd_worker_cpu_seconds_total", "node, slot", NODE)),
        each("GPU in use", f"elasticd_gpu_utilization_ratio{NODE}", "percentunit", most=1),
        each(
            "GPU memory in use",
            f"elasticd_gpu_memory_used_bytes{NODE} / elasticd_gpu_memory_size_bytes{NODE}",
            "percentunit",
            most=1,
            limits=Limits(0.9, 0.97),
        ),
        each("GPU temperature", f"elasticd_gpu_temperature_celsius{NODE}", "celsius", limits=Limits(80, 90)),
        each("GPU power", f"elasticd_gpu_power_watts{NODE}", "watt"),
        each("GPU throttled", f"elasticd_gpu_throttled{NODE} == 1", legend=" {{reason}}", stacked=True),
        Curves(
            "GPU errors",
            (
                (f"elasticd_gpu_xid_errors_total{NODE}", "slot {{slot}} XID {{xid}}"),
                (f"elasticd_gpu_ecc_errors_total{NODE}", "slot {{slot}} memory, {{error}}"),
            ),
        ),
    ),
    (ROUNDS, failures(OF_NODE, "slot", "exit")),
    (("run", "elasticd_round"), ("node", f"elasticd_round{RUN}")),
    (Link("All jobs", "elasticd-fleet"), Link("The job", "elasticd-job")),
)

BOARDS = (FLEET, JOB, WORKERS)
