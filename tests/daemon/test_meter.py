"""The metrics that the agent sets, from a state made by the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticd.checkpoint.server.save_report import Fate, Footprint, SaveReport
from elasticd.core import agent
from elasticd.core.checkpoint_names import folder_name
from elasticd.core.facts import (
    Cause,
    Checkpoint,
    Exit,
    Leadership,
    Limits,
    Member,
    NodeLedger,
    Phase,
    Round,
    Saved,
    SlotProgress,
    SlotTime,
    Spec,
)
from elasticd.core.hang.judging import Doing, Look, Verdict, Why
from elasticd.core.ledger import Kind, Ledger
from elasticd.core.lifecycle import Life
from elasticd.core.measuring import SlotLag
from elasticd.core.page_layout import PageContents
from elasticd.core.ports import Changes, Entry, Listing, Seen
from elasticd.core.reasons import StandbysStarted, WorkersHung, WorkersStarted, WorkersStopping
from elasticd.daemon.config import Command, CommandKind, RunConfig
from elasticd.daemon.meter import Meter
from elasticd.procs.usage import Usage
from elasticd.telemetry.catalog import METRICS, Type
from elasticd.telemetry.gpus import GpuReading
from elasticd.telemetry.metrics import Metrics
from elasticd.telemetry.status import JobStatus, SlotState, SlotStatus
from tests.core.build import crew
from tests.telemetry.madeup import job, node

CONFIG = RunConfig("job", "a", "127.0.0.1", Limits(1, 2), 2, Command(CommandKind.SCRIPT, "job.py"), "f")
ME = agent.Identity("a", "a#1", "127.0.0.1", (0, 1), "host", 1)


class Store:
    """Accepts watches, and reports what the test gives it."""

    def __init__(self) -> None:
        self.requests_s: list[float] = []
        self.leases: list[str] = []
        self.seen: dict[str, Callable[[Seen], None]] = {}

    def watch(self, key: str, seen: Callable[[Seen], None]) -> None:
        self.seen[key] = seen


def meter(*, leads: bool = True) -> tuple[Meter, Store]:
    new = agent.AgentState(ME, Spec(Limits(1, 2), Limits(1, 2), "job.py", "f"), agent.AgentConfig(600.0), 0)
    state = SimpleNamespace(
        me=new.me,
        leads=Leadership("a", "a#1") if leads else None,
        crew=None,
        round=None,
        policy=new.policy,
        etcd=new.etcd,
    )
    driver = SimpleNamespace(state=state, view=None)
    store = Store()
    made = Meter(CONFIG, cast(Any, driver), cast(Any, store), lambda slot, after: ())
    return made, store


def checkpoints(*names: str) -> Entry:
    saved = tuple(
        Saved(folder_name(step, 1, n * 8, 1), step, 1, 2, 1000.0 + i, 4096, "d")
        for i, n in enumerate(names, 1)
        for step in (10 * int(n, 16) - 90,)
    )
    return Entry("checkpoint", Checkpoint("/c", saved), 5, 5)


def value(metrics: Metrics, name: str, *labels: object) -> Any:
    return metrics.get(f"elasticd_{name}", *labels)


def test_counters_and_histograms_exist_before_their_first_increase() -> None:
    made, _ = meter()
    counted = {metric.name for metric in METRICS if metric.type in (Type.COUNTER, Type.HISTOGRAM)}
    told_later = {name for name in counted if name.startswith("elasticd_gpu_")}  # not every slot has one
    assert counted - told_later == made.metrics.copy().values.keys() & counted


def test_checkpoints_are_counted_as_they_come_and_the_newest_is_described() -> None:
    made, store = meter()
    store.seen["checkpoint"](Listing((), 1))
    made._update_checkpoint()
    assert value(made.metrics, "checkpoint_step") is None, "nothing is said before there is one"
    store.seen["checkpoint"](Changes((checkpoints("a", "b"),)))
    made._update_checkpoint()
    store.seen["checkpoint"](Changes((checkpoints("b", "c"),)))
    made._update_checkpoint()
    assert value(made.metrics, "checkpoints_total", "committed") == 3
    assert value(made.metrics, "checkpoint_step") == 30
    assert value(made.metrics, "checkpoint_timestamp_seconds") == 1002.0
    assert value(made.metrics, "checkpoint_size_bytes") == 4096


def test_checkpoints_of_before_are_not_counted_again_and_only_the_leader_counts() -> None:
    made, store = meter()
    store.seen["checkpoint"](Listing((checkpoints("a"),), 1))
    made._update_checkpoint()
    made._update_checkpoint()
    assert not value(made.metrics, "checkpoints_total", "committed")
    follower, store = meter(leads=False)
    store.seen["checkpoint"](Listing((), 1))
    follower._update_checkpoint()
    store.seen["checkpoint"](Changes((checkpoints("a"),)))
    follower._update_checkpoint()
    assert not value(follower.metrics, "checkpoints_total", "committed")


def test_what_a_gpu_no_longer_says_is_not_told_on() -> None:
    made, _ = meter()
    made.gpu(0, GpuReading(utilization=0.5, ecc={"corrected": 4}, throttled={"power": True}, xids=(79, 79)))
    assert value(made.metrics, "gpu_utilization_ratio", 0) == 0.5
    assert value(made.metrics, "gpu_xid_errors_total", 0, 79) == 2
    assert value(made.metrics, "gpu_ecc_errors_total", 0, "corrected") == 4
    made.gpu(0, GpuReading(ecc={"corrected": 6}))
    assert value(made.metrics, "gpu_utilization_ratio", 0) is None
    assert value(made.metrics, "gpu_throttled", 0, "power") is None
    assert value(made.metrics, "gpu_ecc_errors_total", 0, "corrected") == 6


def test_the_agents_own_time_only_grows() -> None:
    made, _ = meter()
    for used_s in (2.0, 5.0, 4.0):
        made.used_itself(Usage(1 << 20, used_s))
    assert value(made.metrics, "agent_cpu_seconds_total") == pytest.approx(5.0)


def test_what_the_saver_reports_is_counted() -> None:
    made, _ = meter()
    made._saves.extend(
        [
            SaveReport(Fate.COPIED, 1, blocked_s=0.03),
            SaveReport(Fate.COPIED, 2, blocked_s=0.05),
            SaveReport(Fate.COMMITTED, 1, took_s=0.7),
            SaveReport(Fate.FAILED, 2, why="it was full"),
            SaveReport(Fate.SKIPPED, 3),
            SaveReport(Fate.SKIPPED, 4),
        ]
    )
    saved: list[tuple[Fate, float]] = []
    made.on_save = lambda report, now: saved.append((report.fate, now))
    made._update_saves(7.0)
    assert saved[0] == (Fate.COPIED, 7.0) and len(saved) == 6, "at the time that it was counted"
    assert [value(made.metrics, "checkpoints_total", kind) for kind in ("skipped", "failed")] == [2, 1]
    assert sum(value(made.metrics, "checkpoint_blocked_seconds").counts) == 2
    assert sum(value(made.metrics, "checkpoint_duration_seconds").counts) == 1
    assert not made._saves


def test_what_checkpoints_take_of_the_memory_is_shown_by_whose_they_are() -> None:
    made, _ = meter()
    made._footprint = lambda: Footprint(own=300, replicas=200)
    made._update_checkpoint()
    assert value(made.metrics, "checkpoint_memory_bytes", "own") == 300
    assert value(made.metrics, "checkpoint_memory_bytes", "replicas") == 200


def told(*slots: SlotStatus, budget_left: int | None = None) -> JobStatus:
    return job(node("a", *slots), budget_left=budget_left)


def test_a_process_that_goes_on_in_the_next_round_has_used_no_cpu_time_twice() -> None:
    made, _ = meter()
    made._read(SlotProgress(0, 0, 100, 5, 50.0), 1, 60.0)
    made.used(0, 100, Usage(1 << 20, 90.0))
    for beat in (SlotProgress(0, 0, 0, 0, 0.0), SlotProgress(0, 0, 100, 0, 0.0)):  # the leader is known later
        made._read(beat, 2, 61.0)
    made.used(0, 100, Usage(1 << 20, 91.0))
    assert value(made.metrics, "worker_cpu_seconds_total", 0) == 91.0
    made._read(SlotProgress(0, 0, 200, 0, 0.0), 3, 62.0)
    made.used(0, 200, Usage(1 << 20, 3.0))
    assert value(made.metrics, "worker_cpu_seconds_total", 0) == 94.0, "another process begins at nothing"
    made._read(SlotProgress(0, 0, 200, 4, 63.0), 3, 64.0)
    assert value(made.metrics, "worker_steps_total", 0) == 9


def test_cpu_time_that_a_reading_lacks_is_not_counted_twice() -> None:
    made, _ = meter()
    made._read(SlotProgress(0, 0, 100, 5, 50.0), 1, 60.0)
    for cpu_s in (90.0, 70.0, 91.0):  # a child was reaped while its parent was read
        made.used(0, 100, Usage(1 << 20, cpu_s))
    assert value(made.metrics, "worker_cpu_seconds_total", 0) == 91.0


def test_what_a_process_that_waits_between_two_rounds_had_told_is_counted_once_and_not_shown() -> None:
    made, _ = meter()
    made._page_contents = lambda: {
        0: PageContents(pid=100, samples=800, nonfinite=1, loss=0.5, values=(("top5", 0.9),))
    }
    shown = []
    for state in (SlotState.RUNNING, SlotState.READY, SlotState.READY, SlotState.RUNNING):
        made.note(WorkersStopping(1, Cause.GREW, 2.0), tuple, 60.0)
        made.update(told(SlotStatus(0, state)), (), Ledger(), 61.0)
        shown.append(value(made.metrics, "user_value", 0, "top5"))
    assert (
        value(made.metrics, "samples_total", 0) == 800
        and value(made.metrics, "nonfinite_steps_total", 0) == 1
    )
    assert shown == [0.9, None, None, 0.9]
    made._page_contents = lambda: {0: PageContents(pid=200, samples=8)}
    made.update(told(SlotStatus(0, SlotState.RUNNING)), (), Ledger(), 62.0)
    assert value(made.metrics, "samples_total", 0) == 808, "another process begins at nothing"


def test_a_spare_slot_has_the_metrics_of_other_slots_once_it_has_a_worker() -> None:
    made, _ = meter()
    member = Member("a", "a#1", (0, 5), 0)
    its = crew(Round(2, Phase.LIVE, (member,), "a:1", Cause.GREW, 0.0))
    made._driver = cast(Any, SimpleNamespace(state=SimpleNamespace(crew=its, inplace=True)))
    made.note(WorkersStarted(2, (0, 1), 2), lambda round: (), 6.0)
    made.compare({5: SlotLag(1.5, True)}, {})
    assert value(made.metrics, "worker_steps_total", 5) == 0 == value(made.metrics, "hangs_total", 5)
    assert (
        value(made.metrics, "worker_straggling", 5) == 1
        and value(made.metrics, "worker_straggling", 7) is None
    )


def test_a_process_started_before_the_round_is_closed_is_booked_as_what_will_close_it() -> None:
    made, _ = meter()
    made._started.add(0)
    member = Member("a", "a#1", (0, 1), 0)
    round = Round(1, Phase.LIVE, (member,), "a:1", Cause.START, 0.0)

    def why(**exit: bool) -> list[str]:
        its = crew(round, member, {0: Life.FAILED}, Exit(0, 0, -9, 5.0, **exit))
        made._driver = cast(Any, SimpleNamespace(state=SimpleNamespace(crew=its, round=round)))
        before = {cause: value(made.metrics, "worker_restarts_total", 0, cause) or 0 for cause in Cause}
        made.note(StandbysStarted((0,)), tuple, 6.0)
        return [c for c, n in before.items() if (value(made.metrics, "worker_restarts_total", 0, c) or 0) > n]

    assert why() == ["worker_failed"] and why(hung=True) == ["worker_hung"]
    round = replace(round, closing=Cause.NODE_LOST)
    assert why() == ["node_lost"], "once it is closed, it is known"


def test_a_step_made_on_the_way_out_of_a_round_is_counted_as_the_next_begins() -> None:
    made, _ = meter()
    at_last = {1: (SlotProgress(0, 0, 100, 7, 51.0), SlotProgress(1, 1, 300, 2, 51.0))}
    made._read(SlotProgress(0, 0, 100, 5, 50.0), 1, 60.0)
    made._read(SlotProgress(1, 1, 200, 5, 50.0), 1, 60.0)
    for _ in range(2):
        made.note(WorkersStarted(2, (0, 1), 2), lambda round: at_last.get(round, ()), 61.0)
        made._read(SlotProgress(0, 0, 100, 0, 0.0), 2, 61.0)
    assert value(made.metrics, "worker_steps_total", 0) == 7
    assert value(made.metrics, "worker_steps_total", 1) == 5, "another process's are not"


def test_a_slot_without_a_worker_is_not_hung() -> None:
    made, _ = meter()
    look = Look("a", 1, 1, 7, 60.0, Doing.ASLEEP)
    made.note(WorkersHung(1, Verdict(Why.ASLEEP, (look,))), tuple, 100.0)
    made.update(told(SlotStatus(1, SlotState.RUNNING, 1, 100)), (), Ledger(), 101.0)
    assert value(made.metrics, "worker_hung", 1) == 1
    made.update(told(SlotStatus(1, SlotState.QUARANTINED)), (), Ledger(), 102.0)
    assert value(made.metrics, "worker_hung", 1) == 0


def test_the_time_of_an_earlier_agent_is_no_increase_of_this_ones_counters() -> None:
    made, _ = meter()
    began_at, kept = 1000.0, NodeLedger("a", 980.0, (SlotTime(0, {"productive": 36_000.0}),))
    ledger = Ledger().see({0: Kind.RENDEZVOUS}, began_at)
    exported = []
    for second in range(1, 5):
        ledger = ledger.see({0: Kind.RENDEZVOUS}, began_at + second)
        if second == 2:
            ledger = ledger.resume(kept)
        made.update(told(), (), ledger, began_at + second)
        exported.append(sum(value(made.metrics, "time_seconds_total", 0, kind) for kind in Kind))
    assert exported == [1.0, 2.0, 3.0, 4.0]


def test_an_agent_that_does_not_know_the_budget_exports_no_value() -> None:
    made, _ = meter()
    made.update(told(budget_left=3), (), Ledger(), 1.0)
    assert value(made.metrics, "restart_budget_left") == 3
    made.update(told(), (), Ledger(), 2.0)
    assert value(made.metrics, "restart_budget_left") is None


def test_a_slot_that_the_status_leaves_out_is_idle() -> None:
    """A slot above a lowered --max is such a slot."""
    made, _ = meter()
    made._workers[1] = cast(Any, SimpleNamespace(at=50.0, since=40.0))
    made.update(
        told(SlotStatus(0, SlotState.RUNNING, 0), SlotStatus(1, SlotState.RUNNING, 1)), (), Ledger(), 61.0
    )
    assert value(made.metrics, "worker_up", 1) == 1 == value(made.metrics, "worker_rank", 1)
    made.metrics.set("elasticd_worker_hung", 1, 1)
    made.update(told(SlotStatus(0, SlotState.RUNNING, 0)), (), Ledger(), 62.0)
    assert value(made.metrics, "worker_up", 1) == 0 == value(made.metrics, "worker_hung", 1)
    assert value(made.metrics, "slot_state", 1, "idle") == 1
    assert (
        value(made.metrics, "worker_rank", 1)
        is value(made.metrics, "worker_last_step_timestamp_seconds", 1)
        is None
    )
    assert value(made.metrics, "worker_up", 0) == 1
