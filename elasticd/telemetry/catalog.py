"""Every metric: its name, type, unit, labels and help. A released metric keeps its name and meaning.

The number of label values is bounded. A label means the same in every metric that has it: see ``LABELS``.
Every sample has ``run``, since ``job`` is Prometheus's own label, and ``node``. A point in time is in seconds
since the epoch: an age is ``time() - METRIC`` in PromQL.

* The agent of a node exports the metrics of the node's slots.
* Every agent exports the gauges of the whole job, as it knows them: use ``max by (run)``. A gauge marked
  "reported by the leader" comes from the leader alone.
* One agent counts an event of the whole job, and the counter is 0 at the others. Use ``sum by (run)`` of the
  increases; a new leader is then no reset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from elasticd.core.facts import Cause, Phase
from elasticd.core.ledger import Kind
from elasticd.telemetry.status import SlotState


class Type(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``labels``: the labels besides ``run`` and ``node``. ``values``: the values of the last
    label, where all values are known in advance. ``buckets``: the upper bounds in the metric's unit, without
    infinity."""

    name: str
    type: Type
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


LABELS: Final[Mapping[str, str]] = {
    "run": "The job's name.",
    "node": "The node whose agent exports the sample.",
    "slot": "Number of the slot on the node.",
    "slot_state": "What the slot does.",
    "node_state": "What the node does in the job.",
    "phase": "What the job does.",
    "cause": "Why a round began.",
    "kind": "What time was spent on.",
    "exit": "How a worker ended.",
    "result": "What became of a checkpoint.",
    "holds": "Whose checkpoints the memory holds.",
    "lease": "What became of the lease of the node.",
    "name": "The script's name of a value that it reports.",
    "reason": "Why the clock of a GPU is reduced.",
    "error": "Whether a memory error was corrected.",
    "xid": "NVIDIA's number of the error.",
    "version": "The version of elasticd.",
}
"""Every label, and its meaning in all metrics that have it."""

_RESUMED: Final = tuple(c for c in Cause if c not in (Cause.START, Cause.STOPPED))
_SLOT: Final = ("slot",)
_STEP_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_FAULT_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_REQUEST_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_SAVE_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


def _gauge(name: str, help: str, unit: str = "", labels: tuple[str, ...] = (), *values: str) -> Metric:
    return Metric(f"elasticd_{name}", Type.GAUGE, help, unit, labels, values)


def _counter(name: str, help: str, unit: str = "", labels: tuple[str, ...] = (), *values: str) -> Metric:
    return Metric(f"elasticd_{name}_total", Type.COUNTER, help, unit, labels, values)


def _seconds(name: str, help: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Metric:
    return Metric(f"elasticd_{name}_seconds", Type.HISTOGRAM, help, "seconds", labels, buckets=buckets)


METRICS: Final[tuple[Metric, ...]] = (
    # -------------------------------------------------------- a slot and its worker
    _gauge("worker_up", "1 while a worker runs in the slot, else 0.", "", _SLOT),
    _gauge(
        "slot_state",
        "1 for the state the slot is in, 0 for the others.",
        "",
        ("slot", "slot_state"),
        *SlotState,
    ),
    _gauge("worker_rank", "Rank of the slot's worker; absent without one.", "", _SLOT),
    _counter("worker_steps", "Optimizer steps made in the slot, by all its workers together.", "", _SLOT),
    _seconds(
        "step",
        "Time of one optimizer step; above 250 steps a second, the mean of each second.",
        _STEP_S,
        _SLOT,
    ),
    _gauge(
        "worker_last_step_timestamp_seconds",
        "Time of the worker's last step, or of its start before the first; absent without a worker.",
        "seconds",
        _SLOT,
    ),
    _counter(
        "worker_restarts",
        "Workers started in the slot in place of an earlier one, by the cause of the round.",
        "",
        ("slot", "cause"),
        *_RESUMED,
    ),
    _counter(
        "worker_exits",
        "Workers that ended by themselves, not because their round was over.",
        "",
        ("slot", "exit"),
        "success",
        "error",
        "signal",
    ),
    _gauge("worker_resident_memory_bytes", "Resident memory of the worker and its children.", "bytes", _SLOT),
    _counter("worker_cpu_seconds", "CPU time used in the slot, children included.", "seconds", _SLOT),
    # -------------------------------------------------------- reported by scripts that use elasticd.worker
    _counter("samples", "Samples that the slot's workers have trained on.", "", _SLOT),
    _gauge("committed_step", "The step that every rank has applied.", "", _SLOT),
    _gauge("loss", "The loss that the script reported last.", "", _SLOT),
    _gauge("user_value", "A value that the script reports under its own name.", "", ("slot", "name")),
    # -------------------------------------------------------- health
    _gauge("worker_hung", "1 while the slot's worker is judged hung, else 0.", "", _SLOT),
    _counter("hangs", "Workers that were judged hung.", "", _SLOT),
    _gauge("slot_bad", "1 while the slot's GPU has reported a hardware error, else 0.", "", _SLOT),
    _gauge("worker_straggling", "1 while the worker is judged slower than its peers, else 0.", "", _SLOT),
    _gauge(
        "worker_slowdown_ratio",
        "The worker's own time for a step, communication taken out, over the median of its peers'.",
        "ratio",
        _SLOT,
    ),
    _counter("nonfinite_steps", "Steps with a loss or gradient that was NaN or infinite.", "", _SLOT),
    # -------------------------------------------------------- the GPU of a slot, where NVML knows one
    _gauge("gpu_utilization_ratio", "Share of time in which a kernel ran.", "ratio", _SLOT),
    _gauge("gpu_memory_used_bytes", "GPU memory in use, by all processes.", "bytes", _SLOT),
    _gauge("gpu_memory_size_bytes", "GPU memory in total.", "bytes", _SLOT),
    _gauge("gpu_temperature_celsius", "Temperature of the GPU.", "celsius", _SLOT),
    _gauge("gpu_power_watts", "Power the GPU draws.", "watts", _SLOT),
    _gauge(
        "gpu_throttled",
        "1 while the GPU's clock is reduced, by reason.",
        "",
        ("slot", "reason"),
        "power",
        "thermal",
        "hardware",
        "sync",
    ),
    _counter(
        "gpu_ecc_errors",
        "Memory errors since the driver was loaded.",
        "",
        ("slot", "error"),
        "corrected",
        "uncorrected",
    ),
    _counter("gpu_xid_errors", "XID errors that the driver reported, by number.", "", ("slot", "xid")),
    # -------------------------------------------------------- time
    _counter(
        "time_seconds",
        "Time of the slot, every second in exactly one kind. A step that is under way is in none yet. A "
        "repeated step is replayed if the script uses elasticd.worker, else productive.",
        "seconds",
        ("slot", "kind"),
        *Kind,
    ),
    # -------------------------------------------------------- the job
    _gauge("round", "Number of the present round; it only grows.", "", ()),
    _gauge("world_size", "Workers in the present round; 0 while none is live.", "", ()),
    _gauge("world_nodes", "Nodes in the present round; 0 while none is live.", "", ()),
    _gauge("world_min", "Fewest workers the job runs with.", "", ()),
    _gauge("world_max", "Most workers the job runs with.", "", ()),
    _gauge("world_unit", "Workers of a unit; the world size is a multiple of this number.", "", ()),
    _gauge(
        "job_phase", "1 for the phase the job is in, 0 for the others.", "", ("phase",), "starting", *Phase
    ),
    _gauge("leader", "1 where this agent leads the job, else 0.", "", ()),
    _gauge(
        "members",
        "Nodes by state; reported by the leader.",
        "",
        ("node_state",),
        "member",
        "waiting",
        "draining",
        "lost",
    ),
    _gauge(
        "slots_quarantined", "Slots in quarantine because they failed alone; reported by the leader.", "", ()
    ),
    _counter("rounds", "Rounds formed, by cause; counted by the leader.", "", ("cause",), *Cause),
    _counter("failures_charged", "Failures charged to the restart budget; counted by the leader.", "", ()),
    _gauge("restart_budget_left", "Failures the job still survives; reported by the leader.", "", ()),
    _gauge("restart_budget_size", "Failures the job survives within its window.", "", ()),
    _seconds(
        "detect",
        "From a fault to the decision to end the round; counted on the node of rank 0. The fault is the exit "
        "of a worker, else the last step before it. If the leader's node is alone in the round, the decision "
        "may come once the other workers have left the round.",
        _FAULT_S,
    ),
    _seconds(
        "recover",
        "From a fault, or the decision to resize, to the first step after it; counted on the node of rank 0.",
        _FAULT_S,
    ),
    _counter(
        "outage_seconds",
        "From faults, and decisions to resize, to the first step after each, by cause; counted on the node "
        "of rank 0.",
        "seconds",
        ("cause",),
        *_RESUMED,
    ),
    # -------------------------------------------------------- checkpoints
    _gauge(
        "checkpoint_timestamp_seconds",
        "Time of the newest committed checkpoint, or at which the script reported a checkpoint of its own on "
        "this node.",
        "seconds",
    ),
    _gauge("checkpoint_step", "Step of the newest committed checkpoint.", "", ()),
    _gauge("checkpoint_size_bytes", "Size of the newest committed checkpoint.", "bytes", ()),
    _gauge(
        "checkpoint_memory_bytes",
        "Shared memory for checkpoints on this node: of its own workers, and copies for other nodes.",
        "bytes",
        ("holds",),
        "own",
        "replicas",
    ),
    _seconds("checkpoint_duration", "From the copy of the state to the commit of its checkpoint.", _SAVE_S),
    _seconds("checkpoint_blocked", "Time for which a checkpoint held up the training loop.", _SAVE_S),
    _counter("checkpoints", "Checkpoints by result.", "", ("result",), "committed", "skipped", "failed"),
    # -------------------------------------------------------- etcd and the agent
    _gauge("etcd_up", "1 while etcd answers this agent, else 0.", "", ()),
    _gauge("etcd_full", "1 while etcd has no room for what this agent writes, else 0.", "", ()),
    _seconds("etcd_request", "Time of this agent's requests that etcd answered.", _REQUEST_S),
    _counter(
        "etcd_lease_renewals",
        "Renewals of this agent's lease: answered, not answered by etcd, and leases that ran out.",
        "",
        ("lease",),
        "renewed",
        "unanswered",
        "lost",
    ),
    _gauge("build_info", "1, labeled with the version of elasticd that the agent runs.", "", ("version",)),
    _counter("agent_cpu_seconds", "CPU time used by the agent itself.", "seconds", ()),
    _gauge("agent_resident_memory_bytes", "Resident memory of the agent itself.", "bytes", ()),
)

BY_NAME: Final = {metric.name: metric for metric in METRICS}
