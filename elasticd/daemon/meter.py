"""Fills the metrics from the driver's state, heartbeats and reports. Never changes the driver's state."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elasticd import __version__
from elasticd.checkpoint.server.save_report import Fate, Footprint, SaveReport
from elasticd.core.agent import AgentState
from elasticd.core.facts import Cause, Checkpoint, Phase, SlotProgress
from elasticd.core.leader import Mark, Standing
from elasticd.core.ledger import Ledger
from elasticd.core.measuring import SlotLag
from elasticd.core.page_layout import PageContents
from elasticd.core.ports import Seen
from elasticd.core.reasons import (
    FailureCharged,
    Reason,
    RoundFormed,
    ScriptCheckpointed,
    StandbysStarted,
    WorkerEnded,
    WorkersHung,
    WorkersLeaving,
    WorkersStarted,
    WorkersStopping,
)
from elasticd.daemon.config import RunConfig
from elasticd.daemon.driver import Driver
from elasticd.daemon.store_news import news_of
from elasticd.daemon.timedstore import TimedStore
from elasticd.procs.usage import Usage
from elasticd.telemetry.catalog import BY_NAME, METRICS, Type
from elasticd.telemetry.gpus import GpuReading
from elasticd.telemetry.metrics import Metrics
from elasticd.telemetry.outage import Outage
from elasticd.telemetry.status import JobStatus, SlotState, SlotStatus

# Returns the times of a slot's steps after a given step, in seconds since the epoch; some may be missing.
StepTimes = Callable[[int, int], tuple[float, ...]]

# Returns the contents of the pages of this round's workers, by slot.
ReadPages = Callable[[], Mapping[int, PageContents]]

_HAS_WORKER = (SlotState.STARTING, SlotState.RUNNING, SlotState.STOPPING)
# Exported before their first event. The metrics of a GPU are not, since not every slot has a GPU.
_COUNTED = [
    metric
    for metric in METRICS
    if metric.type in (Type.COUNTER, Type.HISTOGRAM) and not metric.name.startswith("elasticd_gpu_")
]
_BY_SLOT = (
    "worker_rank",
    "worker_last_step_timestamp_seconds",
    "worker_resident_memory_bytes",
    "committed_step",
    "loss",
)


@dataclass(frozen=True, slots=True)
class _Worker:
    """The last heartbeat read from a worker. ``since``: the time of the first reading."""

    pid: int
    round: int
    since: float
    step: int = 0
    at: float = 0.0
    cpu_s: float = 0.0


class Meter:
    """Keeps ``metrics`` up to date. ``note`` takes each reason, ``update`` the present status. Use on the
    agent's thread only."""

    def __init__(
        self,
        config: RunConfig,
        driver: Driver,
        store: TimedStore,
        step_times: StepTimes,
        saves: deque[SaveReport] | None = None,
        page_contents: ReadPages = dict,
        footprint: Callable[[], Footprint] = Footprint,
    ) -> None:
        self._saves: deque[SaveReport] = deque() if saves is None else saves
        # Called with each report once it is counted.
        self.on_save: Callable[[SaveReport, float], None] = lambda report, now: None
        self._step_times = step_times
        self._page_contents = page_contents
        self._footprint = footprint
        self._pages_before: dict[int, PageContents] = {}
        self._driver = driver
        self._store = store
        self._workers: dict[int, _Worker] = {}
        self._started: set[int] = set()  # slots that have had a worker
        self._still = Outage()
        self._last_step_at = 0.0
        self._own_cpu_s = 0.0
        self._checkpoint: Checkpoint | None = None
        self._listed = False
        self._saved: set[str] | None = None  # the checkpoints' names at the last update
        store.watch("checkpoint", self._checkpoint_seen)
        self.metrics = metrics = Metrics()
        metrics.set("elasticd_build_info", 1, __version__)
        for metric in _COUNTED:
            if "slot" not in metric.labels:
                metrics.start(metric.name)
        self._slots: set[int] = set()
        self._shown: set[int] = set()  # slots that some status has shown
        self._begin(driver.state.me.slots[: config.limits.max])

    def _begin(self, slots: Iterable[int]) -> None:
        """Export metrics of these slots, starting at 0."""
        for slot in set(slots) - self._slots:
            self._slots.add(slot)
            for metric in _COUNTED:
                if "slot" in metric.labels:
                    self.metrics.start(metric.name, slot)

    # ------------------------------------------------------------ reasons

    def note(self, reason: Reason, read: Callable[[int], Sequence[SlotProgress]], now: float) -> None:
        """Count a decision of the agent or the leader. ``read`` returns the heartbeats of a round; ``note``
        calls it to count the last steps before the decision."""
        metrics, crew = self.metrics, self._driver.state.crew
        if isinstance(reason, WorkerEnded | WorkersLeaving | WorkersStopping):
            self._look(read(crew.round.number) if crew is not None else (), now)
            self._listen()
        match reason:
            case RoundFormed(cause=cause):
                metrics.add("elasticd_rounds_total", 1, cause)
            case ScriptCheckpointed():
                metrics.set("elasticd_checkpoint_timestamp_seconds", now)
            case FailureCharged():
                metrics.add("elasticd_failures_charged_total", 1)
            case WorkersStarted(ranks=ranks):
                self._count_the_last(read)
                if crew is not None:
                    for slot in crew.member.slots:
                        metrics.set("elasticd_worker_hung", 0, slot)
                    slots = [s for s in crew.member.slots if crew.member.rank_of(s) in ranks]
                    self._begin(slots)
                    kept = self._driver.state.inplace  # the workers keep their process
                    for slot in self._started.intersection(slots) if not kept else ():
                        metrics.add("elasticd_worker_restarts_total", 1, slot, crew.round.cause)
                    self._started.update(slots)
            case StandbysStarted(slots=slots):
                for slot in self._started.intersection(slots):
                    metrics.add("elasticd_worker_restarts_total", 1, slot, _why(self._driver.state))
                self._started.update(slots)
            case WorkerEnded(slot=slot, code=code):
                kind = "signal" if code < 0 else "error" if code else "success"
                metrics.add("elasticd_worker_exits_total", 1, slot, kind)
            case WorkersHung(verdict=verdict):
                for look in verdict.guilty:
                    if look.node == self._driver.state.me.node:
                        metrics.add("elasticd_hangs_total", 1, look.slot)
                        metrics.set("elasticd_worker_hung", 1, look.slot)

    # ------------------------------------------------------------ the present status

    def update(self, status: JobStatus, beats: Sequence[SlotProgress], ledger: Ledger, now: float) -> None:
        self._look(beats, now)
        self._listen()
        for slot, account in ledger.slots.items():
            for kind, seconds in account.own.items():
                self.metrics.count_to("elasticd_time_seconds_total", seconds, slot, kind)
        self._update_slots(status)
        self._update_job(status, now)
        self._update_etcd()
        self._update_checkpoint()
        self._update_saves(now)

    def used(self, slot: int, pid: int, used: Usage) -> None:
        """Take the usage of the process ``pid``, if it is still the slot's worker."""
        worker = self._workers.get(slot)
        if worker is None or worker.pid != pid:
            return
        self.metrics.set("elasticd_worker_resident_memory_bytes", used.resident_bytes, slot)
        self.metrics.add("elasticd_worker_cpu_seconds_total", max(0.0, used.cpu_s - worker.cpu_s), slot)
        # A reading may lack a process that ended meanwhile. The next one has its time again.
        self._workers[slot] = replace(worker, cpu_s=max(used.cpu_s, worker.cpu_s))

    def used_itself(self, used: Usage) -> None:
        self.metrics.set("elasticd_agent_resident_memory_bytes", used.resident_bytes)
        self.metrics.add("elasticd_agent_cpu_seconds_total", max(0.0, used.cpu_s - self._own_cpu_s))
        self._own_cpu_s = used.cpu_s

    def gpu(self, slot: int, reading: GpuReading) -> None:
        """Take the last reading of the slot's GPU."""
        for name, value in (
            ("utilization_ratio", reading.utilization),
            ("memory_used_bytes", reading.memory_used),
            ("memory_size_bytes", reading.memory_size),
            ("temperature_celsius", reading.celsius),
            ("power_watts", reading.watts),
        ):
            self.metrics.set(f"elasticd_gpu_{name}", value, slot)
        for kind in BY_NAME["elasticd_gpu_throttled"].values:
            self.metrics.set("elasticd_gpu_throttled", reading.throttled.get(kind), slot, kind)
        for kind, count in reading.ecc.items():
            self.metrics.count_to("elasticd_gpu_ecc_errors_total", count, slot, kind)
        for xid in reading.xids:
            self.metrics.add("elasticd_gpu_xid_errors_total", 1, slot, xid)

    def compare(self, lags: Mapping[int, SlotLag], bad: Mapping[int, str]) -> None:
        """Take the comparison of workers with their peers, and the bad GPUs, both by slot."""
        for slot in self._slots:
            stands = lags.get(slot)
            self.metrics.set("elasticd_slot_bad", slot in bad, slot)
            self.metrics.set("elasticd_worker_straggling", stands is not None and stands.straggling, slot)
            ratio = stands.ratio if stands is not None else None
            self.metrics.set("elasticd_worker_slowdown_ratio", ratio, slot)

    def _update_slots(self, status: JobStatus) -> None:
        lines = {line.slot: line for line in status.own.slots} if status.own is not None else {}
        self._shown |= lines.keys()
        for slot in self._shown:  # a slot above a lowered --max is not in the status any more
            line = lines.get(slot, SlotStatus(slot, SlotState.IDLE))
            has_worker = line.state in _HAS_WORKER and line.until_gone is None
            self.metrics.set("elasticd_worker_up", has_worker, slot)
            if not has_worker:
                self.metrics.set("elasticd_worker_hung", 0, slot)
            self.metrics.choose("elasticd_slot_state", line.state, slot)
            worker = self._workers.get(slot)
            if has_worker and line.rank is not None and worker is not None:
                self.metrics.set("elasticd_worker_rank", line.rank, slot)
                self.metrics.set(
                    "elasticd_worker_last_step_timestamp_seconds", worker.at or worker.since, slot
                )
            else:
                for name in _BY_SLOT:
                    self.metrics.forget(f"elasticd_{name}", slot)
                if not has_worker and slot in self._pages_before:
                    self._fall_silent(slot)

    def _fall_silent(self, slot: int) -> None:
        """Forget the slot's last values, but not its counts: the process may go on in the next round."""
        page = self._pages_before[slot]
        for name, _ in page.values:
            self.metrics.forget("elasticd_user_value", slot, name)
        self._pages_before[slot] = replace(page, committed=None, loss=None, values=())

    def _listen(self) -> None:
        """Add to the workers' counts, and set their last values."""
        metrics = self.metrics
        for slot, page in self._page_contents().items():
            before = self._pages_before.get(slot, PageContents())
            if before.pid != page.pid:
                for name, _ in before.values:
                    metrics.forget("elasticd_user_value", slot, name)
                before = PageContents()
            if page.pid == 0 or page == before:
                continue
            self._pages_before[slot] = page
            metrics.add("elasticd_samples_total", max(0, page.samples - before.samples), slot)
            metrics.add("elasticd_nonfinite_steps_total", max(0, page.nonfinite - before.nonfinite), slot)
            if page.committed is not None:
                metrics.set("elasticd_committed_step", page.committed, slot)
            if page.loss is not None:
                metrics.set("elasticd_loss", page.loss, slot)
            for name, value in page.values:
                metrics.set("elasticd_user_value", value, slot, name)

    def _look(self, beats: Sequence[SlotProgress], now: float) -> None:
        """Count the steps since the last look, and the recoveries that ended with them."""
        crew, round = self._driver.state.crew, self._driver.state.round
        if round is not None:
            self._still = self._still.see(round, self._last_step_at)
        if crew is not None:
            for beat in beats:
                if beat.slot in crew.member.slots:
                    self._read(beat, crew.round.number, now)
        if round is not None:  # look again, since the round may have made its first step and ended meanwhile
            self._still = self._still.see(round, self._last_step_at)

    def _read(self, beat: SlotProgress, round: int, now: float) -> None:
        before = self._workers.get(beat.slot)
        if before is None or beat.pid not in (0, before.pid):
            before = _Worker(beat.pid, round, now)
        elif before.round != round or beat.step < before.step:
            # The same process is in another round, and its CPU time continues.
            before = _Worker(before.pid, round, now, cpu_s=before.cpu_s)
        steps = beat.step - before.step
        if steps > 0:
            self.metrics.add("elasticd_worker_steps_total", steps, beat.slot)
            times = self._step_times(beat.slot, before.step)[:steps]
            if len(times) < steps:  # the page holds only the newest times
                if before.step:
                    each_s = max(0.0, beat.at - before.at) / steps
                    self.metrics.observe("elasticd_step_seconds", each_s, beat.slot, times=steps)
                times = (beat.at,)
            else:
                known = (before.at, *times) if before.step else times
                gaps = [max(0.0, b - a) for a, b in itertools.pairwise(known)]
                self.metrics.observe_all("elasticd_step_seconds", gaps, beat.slot)
            self._stepped(times[0], beat.at)
        self._workers[beat.slot] = replace(before, pid=beat.pid or before.pid, step=beat.step, at=beat.at)

    def _count_the_last(self, read: Callable[[int], Sequence[SlotProgress]]) -> None:
        """Count the last steps of workers that keep their process from the previous round. Called before the
        workers enter the new round."""
        ends = max((worker.round for worker in self._workers.values()), default=0)
        for beat in read(ends) if ends else ():
            before = self._workers.get(beat.slot)
            if before is not None and (before.pid, before.round) == (beat.pid, ends):
                steps = max(0, beat.step - before.step)
                self.metrics.add("elasticd_worker_steps_total", steps, beat.slot)
                self._workers[beat.slot] = replace(before, step=before.step + steps)

    def _stepped(self, first_at: float, last_at: float) -> None:
        self._last_step_at = max(self._last_step_at, last_at)
        self._still, recovery = self._still.first_step(first_at)
        crew = self._driver.state.crew
        if recovery is None or crew is None or crew.member.base_rank != 0:
            return
        if recovery.detect_s is not None:
            self.metrics.observe("elasticd_detect_seconds", recovery.detect_s)
        self.metrics.observe("elasticd_recover_seconds", recovery.recover_s)
        self.metrics.add("elasticd_outage_seconds_total", recovery.recover_s, recovery.cause)

    def _update_job(self, s: JobStatus, now: float) -> None:
        metrics, state, view = self.metrics, self._driver.state, self._driver.view
        metrics.set("elasticd_round", s.round)
        metrics.set("elasticd_world_size", s.world_size)
        live = state.round is not None and state.round.phase is Phase.LIVE
        metrics.set("elasticd_world_nodes", state.round.nodes if state.round is not None and live else 0)
        metrics.set("elasticd_world_min", s.limits.min if s.limits else None)
        metrics.set("elasticd_world_max", s.limits.max if s.limits else None)
        metrics.set("elasticd_world_unit", s.limits.unit if s.limits else None)
        metrics.choose("elasticd_job_phase", s.phase)
        metrics.set("elasticd_leader", state.leads is not None)
        metrics.set("elasticd_restart_budget_left", s.budget_left)
        metrics.set("elasticd_restart_budget_size", state.policy.restarts_max)
        metrics.set("elasticd_etcd_up", state.etcd.silent is None and state.etcd.lease_until is not None)
        metrics.set("elasticd_etcd_full", bool(state.etcd.full))
        if view is None or not view.complete or view.round is None:
            for kind in (*Standing, "lost"):
                metrics.forget("elasticd_members", kind)
            metrics.forget("elasticd_slots_quarantined")
            return
        for standing in Standing:
            metrics.set("elasticd_members", view.roll.standing.get(standing, 0), standing)
        runs = view.round.phase in (Phase.LIVE, Phase.CLOSING)
        metrics.set("elasticd_members", len(view.roll[Mark.MISSING]) if runs else 0, "lost")
        metrics.set("elasticd_slots_quarantined", sum(q.until > now for q in view.budget.quarantines))

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The committed checkpoints, as etcd last had them."""
        return self._checkpoint

    @property
    def footprint(self) -> Footprint:
        """The memory of this node that holds checkpoints."""
        return self._footprint()

    def _update_checkpoint(self) -> None:
        held = self._footprint()
        self.metrics.set("elasticd_checkpoint_memory_bytes", held.own, "own")
        self.metrics.set("elasticd_checkpoint_memory_bytes", held.replicas, "replicas")
        found = self._checkpoint
        names = {saved.name for saved in found.saved} if found is not None else set()
        if self._saved is not None and self._driver.state.leads is not None:
            self.metrics.add("elasticd_checkpoints_total", len(names - self._saved), "committed")
        if self._listed:
            self._saved = names
        newest = found.newest if found is not None else None
        if newest is not None:
            self.metrics.set("elasticd_checkpoint_timestamp_seconds", newest.at)
            self.metrics.set("elasticd_checkpoint_step", newest.step)
            self.metrics.set("elasticd_checkpoint_size_bytes", newest.size)

    def _update_saves(self, now: float) -> None:
        """Count the saver's reports. Every saver reports its node's copies; the saver that commits reports
        the rest."""
        for _ in range(len(self._saves)):
            save = self._saves.popleft()
            match save.fate:
                case Fate.COPIED:
                    self.metrics.observe("elasticd_checkpoint_blocked_seconds", save.blocked_s)
                case Fate.COMMITTED:
                    self.metrics.observe("elasticd_checkpoint_duration_seconds", save.took_s)
                case Fate.SKIPPED | Fate.FAILED:
                    self.metrics.add("elasticd_checkpoints_total", 1, save.fate)
            self.on_save(save, now)

    def _checkpoint_seen(self, news: Seen) -> None:
        """Keep the checkpoint record. Runs on the store's thread."""
        for entry in news_of("checkpoint", news):
            self._checkpoint = entry.fact if isinstance(entry.fact, Checkpoint) else None
        self._listed = True

    def _update_etcd(self) -> None:
        for _ in range(len(self._store.requests_s)):
            self.metrics.observe("elasticd_etcd_request_seconds", self._store.requests_s.popleft())
        for _ in range(len(self._store.leases)):
            self.metrics.add("elasticd_etcd_lease_renewals_total", 1, self._store.leases.popleft())


def _why(state: AgentState) -> Cause:
    """Return the cause of a standby's start. A standby starts once the slot's last process has ended, so the
    round may not be closed yet."""
    crew, round = state.crew, state.round
    if round is not None and round.closing is not None:
        return round.closing
    if crew is not None and crew.report.exits:
        return min(crew.report.exits, key=lambda exit: exit.at).cause
    return round.cause if round is not None and round.cause is not Cause.START else Cause.WORKER_FAILED
