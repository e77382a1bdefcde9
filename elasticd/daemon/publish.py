"""Tells the world how the agent is doing: progress to etcd, a snapshot to the live view and to who asks
over HTTP.

Reads the driver's state, never changes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from elasticd.checkpoint.server.save_report import Fate, SaveReport, sentence
from elasticd.core import budget as budgets
from elasticd.core.facts import Phase, Progress, SlotProgress
from elasticd.core.lifecycle import Life
from elasticd.core.ports import Applied, Entry, Listing, Put, Seen, StillThere, Store
from elasticd.core.reasons import Reason, WorkersHung, WorkersStarted
from elasticd.daemon.config import RunConfig
from elasticd.daemon.course import Course
from elasticd.daemon.driver import Driver
from elasticd.daemon.meter import Meter
from elasticd.daemon.pace import Pace
from elasticd.daemon.pages import Pages, Published
from elasticd.daemon.sampler import Sampler, Samples
from elasticd.daemon.stragglers import Comparison
from elasticd.daemon.timekeeper import Timekeeper
from elasticd.telemetry import describe
from elasticd.telemetry.events import EventFile, event, of_agent
from elasticd.telemetry.snapshot import Event, SlotLine, SlotState, Snapshot
from elasticd.telemetry.view import View

SHOW_S = 0.5
WRITE_S = 1.0
EVENTS_KEPT = 5
_SHOWN = {  # in the words of the status documents and metrics
    Life.STARTING: SlotState.STARTING,
    Life.WAITING: SlotState.READY,
    Life.TRAINING: SlotState.RUNNING,
    Life.FAILING: SlotState.RUNNING,
    Life.LEAVING: SlotState.STOPPING,
    Life.STOPPING: SlotState.STOPPING,
    Life.FINISHED: SlotState.FINISHED,
    Life.FAILED: SlotState.FAILED,
    Life.STOPPED: SlotState.IDLE,
    Life.FENCED: SlotState.IDLE,
}


class Publisher:
    """``routine(now)`` publishes what is due and returns when the next is.

    ``read``: the heartbeats of this node's workers of a round. Other nodes' are followed only where somebody
    looks at a live view.
    """

    def __init__(
        self,
        config: RunConfig,
        driver: Driver,
        store: Store,
        read: Callable[[int], tuple[SlotProgress, ...]],
        view: View,
        meter: Meter,
        pages: Pages,
        sampler: Sampler,
        timekeeper: Timekeeper,
        events: EventFile,
        course: Course,
        comparison: Comparison,
    ) -> None:
        self._config = config
        self._driver = driver
        self._store = store
        self._heartbeats = read
        self._view = view
        self._meter = meter
        self._pages = pages
        self._sampler = sampler
        self._timekeeper = timekeeper
        self._file = events
        self._course = course
        meter.on_save = self._saved
        self._comparison = comparison
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._paces: dict[tuple[str, int], Pace] = {}
        self._others: Mapping[str, Progress] = {}
        self._samples: Samples | None = None
        self._written: Progress | None = None
        self._writing = False
        self._write_due = self._due = 0.0
        if view.live and config.etcd is not None:
            store.watch("progress/", self._progress_seen, prefix=True)

    def _read(self) -> tuple[SlotProgress, ...]:
        """Of the round that the state knows of: its workers may not have been started yet, and those of
        the one before it are not to be taken for them."""
        crew = self._driver.state.crew
        return self._heartbeats(crew.round.number) if crew is not None else ()

    def note(self, reason: Reason, now: float) -> None:
        """Something happened: an event for the live view, and maybe one to count."""
        self._events.append(Event(now, describe.sentence(reason, now)))
        crew = self._driver.state.crew
        more = (
            {"slots": crew.member.slots, "cause": crew.round.cause}
            if isinstance(reason, WorkersStarted) and crew is not None
            else {}
        )
        self._file.write(event(reason, now, self._config.job, self._config.node, **more))
        self._meter.note(reason, self._heartbeats, now)
        if isinstance(reason, WorkersHung):
            self._timekeeper.hung(reason.round, now)
        self._timekeeper.look(self._read(), now)

    def routine(self, now: float) -> float:
        if now < self._due:
            return self._due
        self._file.nudge()
        self._due = now + (SHOW_S if self._view.live else WRITE_S)
        mine = self._read()
        snapshot = self._snapshot(mine, now)
        self._measure(snapshot, mine, now)
        self._course.note(snapshot, self._timekeeper.ledger, self._meter.metrics, now)
        self._view.show(snapshot)
        if now >= self._write_due:
            self._write_progress(mine)
            self._write_due = now + WRITE_S
        return self._due

    def farewell(self, now: float) -> None:
        """What there is to say of the last moments, once the ledger is closed."""
        mine = self._read()
        snapshot = self._snapshot(mine, now)
        self._meter.update(snapshot, mine, self._timekeeper.ledger, now)
        self._course.note(snapshot, self._timekeeper.ledger, self._meter.metrics, now, last=True)

    def _saved(self, report: SaveReport, now: float) -> None:
        """An event of what became of a checkpoint; none is younger than the agent's last."""
        if report.fate is Fate.COPIED:
            return
        well = report.fate is Fate.COMMITTED
        facts = {"took_s": round(report.took_s, 3), "size": report.size} if well else {}
        self._file.write(
            of_agent(
                f"checkpoint.{report.fate}",
                now,
                self._config.job,
                self._config.node,
                sentence(report),
                level="info" if well else "warning",
                step=report.step,
                name=report.name,
                **facts,
            )
        )

    # ------------------------------------------------------------ to who asks over HTTP

    def _measure(self, snapshot: Snapshot, mine: tuple[SlotProgress, ...], now: float) -> None:
        self._timekeeper.look(mine, now)
        self._meter.update(snapshot, mine, self._timekeeper.ledger, now)
        self._sampler.pids = {
            line.slot: line.pid for line in snapshot.slots if line.node == snapshot.node and line.pid
        }
        samples = self._sampler.latest
        if samples is not self._samples:
            self._samples = samples
            if samples.itself is not None:
                self._meter.used_itself(samples.itself)
            for slot, (pid, used) in samples.workers.items():
                self._meter.used(slot, pid, used)
            for slot, reading in samples.gpus.items():
                self._meter.gpu(slot, reading)
                self._comparison.look_at_gpu(slot, reading)
        self._meter.compare(self._comparison.standings, self._comparison.bad)
        spent = self._timekeeper.ledger.spent
        self._pages.publish(Published(snapshot, self._meter.metrics.copy(), spent, self._unready(), now))

    def _unready(self) -> str:
        """Why this node neither trains nor could, in a sentence; empty if it does or could."""
        state = self._driver.state
        if state.departure is not None or state.exiting is not None:
            return "this node is leaving the job"
        if not state.joined:
            return "this node has not joined the job yet"
        # An etcd that is away stops nobody from training.
        return "" if state.registered or state.silent is not None else "this node is not registered in etcd"

    # ------------------------------------------------------------ to etcd

    def _write_progress(self, slots: tuple[SlotProgress, ...]) -> None:
        """At most one write under way; a lost one is made up for by the next."""
        state = self._driver.state
        crew, own = state.crew, state.own
        if self._writing or crew is None or own is None or own.fact is None or state.silent:
            return
        held = self._meter.footprint
        progress = Progress(self._config.node, crew.round.number, slots, held.own, held.replicas)
        if progress == self._written:
            return
        self._writing = True

        def answered(answer: object) -> None:
            self._writing = False
            if isinstance(answer, Applied):
                self._written = progress

        self._store.transact(
            (StillThere(state.me.key, own.created),),
            (Put(f"progress/{self._config.node}", progress, leased=True),),
            answered,
        )

    # ------------------------------------------------------------ to the live view

    def _progress_seen(self, seen: Seen) -> None:
        known = {} if isinstance(seen, Listing) else dict(self._others)
        for entry in seen.entries:
            _keep(known, entry)
        self._others = known

    def _snapshot(self, mine: tuple[SlotProgress, ...], now: float) -> Snapshot:
        state = self._driver.state
        spec, round, view = state.spec, state.round, self._driver.view
        policy, failed = state.policy_source.policy, round.failure if round is not None else None
        waits = [describe.waiting(w, now) for w in self._driver.waiting]  # type: ignore[arg-type]
        if state.full:
            waits.insert(0, state.full)
        return Snapshot(
            job=self._config.job,
            node=self._config.node,
            round=round.number if round else 0,
            phase=str(round.phase) if round else "starting",
            world_size=round.world_size if round and round.phase is Phase.LIVE else 0,
            limits=spec.limits if spec else self._config.limits,
            slots=(*self._own_lines(mine, now), *self._other_lines(now)),
            restarts=round.restarts if round else 0,
            budget_left=budgets.left(view.budget, policy, now) if view is not None else None,
            waiting="; ".join(waits),
            events=tuple(self._events),
            last_failure=Event(failed.exit.at, describe.failure(failed)) if failed is not None else None,
        )

    def _own_lines(self, mine: tuple[SlotProgress, ...], now: float) -> list[SlotLine]:
        state = self._driver.state
        crew, node = state.crew, self._config.node
        beats = {b.slot: b for b in mine}
        lines = []
        for slot in state.me.slots:
            if crew is None or slot not in crew.member.slots:
                if state.me.slots.index(slot) < self._config.limits.max:
                    lines.append(SlotLine(node, slot, self._idle_state(node, slot, now)))
                continue
            beat = beats.get(slot, SlotProgress(slot, crew.member.rank_of(slot), 0, 0, 0.0))
            what = _SHOWN[crew.workers[slot]]
            if what is SlotState.RUNNING and not beat.step:
                what = SlotState.STARTING
            lines.append(self._line(node, beat, what, now))
        return lines

    def _other_lines(self, now: float) -> list[SlotLine]:
        round = self._driver.state.round
        number = round.number if round else 0
        return [
            self._line(name, beat, SlotState.RUNNING if beat.step else SlotState.STARTING, now)
            for name, progress in sorted(self._others.items())
            if name != self._config.node and progress.round == number
            for beat in progress.slots
        ]

    def _line(self, node: str, beat: SlotProgress, what: SlotState, now: float) -> SlotLine:
        pace = self._paces.setdefault((node, beat.slot), Pace())
        pace.read(now, beat.step)
        per_s = pace.steps_per_s if what is SlotState.RUNNING else None
        return SlotLine(node, beat.slot, what, beat.rank, beat.pid, beat.of_job, per_s, beat.tells)

    def _idle_state(self, node: str, slot: int, now: float) -> SlotState:
        life = self._driver.state.reserve.get(slot)
        if life is not None:
            return _SHOWN[life]
        view = self._driver.view
        out = view.budget.quarantines if view else ()
        away = any(q.node == node and q.slot == slot and q.until > now for q in out)
        return SlotState.QUARANTINED if away else SlotState.IDLE


def _keep(known: dict[str, Progress], entry: Entry) -> None:
    name = entry.key.partition("/")[2]
    if isinstance(entry.fact, Progress):
        known[name] = entry.fact
    else:
        known.pop(name, None)
