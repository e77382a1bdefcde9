"""Tells the leader the agent's progress, and publishes the job's status to the live view, the pages, the
metrics and the timeline of the run. Never changes the driver's state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from elasticd.checkpoint.server.save_report import Fate, SaveReport, sentence
from elasticd.core.facts import Node, Progress, Round, SlotProgress
from elasticd.core.lifecycle import Life
from elasticd.core.ports import Seen, Store
from elasticd.core.reasons import Reason, WorkersStarted
from elasticd.daemon.config import RunConfig
from elasticd.daemon.driver import Driver
from elasticd.daemon.gathering import Gathering
from elasticd.daemon.http_pages import Pages, Published
from elasticd.daemon.leader_link.telemetry_follower import JobTelemetry, TelemetryFollower
from elasticd.daemon.meter import Meter
from elasticd.daemon.observer import Observer
from elasticd.daemon.round_watch import RoundWatch
from elasticd.daemon.timekeeper import Timekeeper
from elasticd.daemon.timeline import Timeline
from elasticd.daemon.usage_sampler import Sampler, Samples
from elasticd.telemetry import describe
from elasticd.telemetry.events import EventFile, event, of_agent
from elasticd.telemetry.liveview import TerminalView
from elasticd.telemetry.status import AgentStatus, JobStatus, LocalFacts, Note, Shown, SlotState, job_status
from elasticd.telemetry.steprate import StepRates

SHOW_S = 0.5
TELL_S = 1.0
EVENTS_KEPT = 5
_SHOWN = {  # the states in the words of the status documents and metrics
    Life.STARTING: SlotState.STARTING,
    Life.WAITING: SlotState.READY,
    Life.TRAINING: SlotState.RUNNING,
    Life.FAILING: SlotState.RUNNING,
    Life.DYING: SlotState.RUNNING,
    Life.LEAVING: SlotState.STOPPING,
    Life.STOPPING: SlotState.STOPPING,
    Life.FINISHED: SlotState.FINISHED,
    Life.FAILED: SlotState.FAILED,
    Life.STOPPED: SlotState.IDLE,
    Life.FENCED: SlotState.IDLE,
}


class Publisher:
    """``routine(now)`` publishes the status if it is due, and returns the time of the next call.

    ``read`` returns the heartbeats of this node's workers in a round. Other nodes' progress is watched only
    for a live view.
    """

    def __init__(
        self,
        config: RunConfig,
        driver: Driver,
        store: Store,
        read: Callable[[int], tuple[SlotProgress, ...]],
        view: TerminalView,
        meter: Meter,
        pages: Pages,
        sampler: Sampler,
        timekeeper: Timekeeper,
        gathering: Gathering,
        events: EventFile,
        timeline: Timeline,
        observer: Observer,
    ) -> None:
        self._config = config
        self._driver = driver
        self._heartbeats = read
        self._view = view
        self._meter = meter
        self._pages = pages
        self._sampler = sampler
        self._timekeeper = timekeeper
        self._gathering = gathering
        self._file = events
        self._timeline = timeline
        meter.on_save = self._saved
        self._observer = observer
        self._events: deque[Note] = deque(maxlen=EVENTS_KEPT)
        self._rates = StepRates()
        self._others: Mapping[str, Shown] = {}
        self._whole: Round | None = None
        self._samples: Samples | None = None
        self._told: Progress | None = None
        self._tell_due = self._due = 0.0
        self._follower: TelemetryFollower | None = None
        if view.live and config.etcd is not None:
            self._follower = TelemetryFollower(self._others_seen)
            RoundWatch(store, self._round_seen)

    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()

    def _read(self) -> tuple[SlotProgress, ...]:
        """Return the heartbeats of the crew's round, and none of an earlier round."""
        crew = self._driver.state.crew
        return self._heartbeats(crew.round.number) if crew is not None else ()

    def note(self, reason: Reason, now: float) -> None:
        """Add the reason to the live view, the events and the metrics."""
        self._events.append(Note(now, describe.sentence(reason, now)))
        crew = self._driver.state.crew
        more = (
            {"slots": crew.member.slots, "cause": crew.round.cause}
            if isinstance(reason, WorkersStarted) and crew is not None
            else {}
        )
        self._file.write(event(reason, now, self._config.job, self._config.node, **more))
        self._meter.note(reason, self._heartbeats, now)

    def routine(self, now: float) -> float:
        if now < self._due:
            return self._due
        self._file.nudge()
        self._due = now + (SHOW_S if self._view.live else TELL_S)
        mine = self._read()
        status = self._status(mine, now)
        self._measure(status, mine, now)
        self._timeline.note(status, self._timekeeper.ledger, self._meter.metrics)
        self._view.show(status)
        if now >= self._tell_due:
            self._tell(mine)
            self._tell_due = now + TELL_S
        if self._follower is not None:
            self._follower.follow(self._driver.state.leader)
        return self._due

    def farewell(self, now: float) -> None:
        """Publish the metrics and the last line of the timeline, once the ledger is closed."""
        mine = self._read()
        status = self._status(mine, now)
        self._meter.update(status, mine, self._timekeeper.ledger, now)
        self._timeline.note(status, self._timekeeper.ledger, self._meter.metrics, last=True)

    def _saved(self, report: SaveReport, now: float) -> None:
        """Write an event of the checkpoint's fate. No such event is later than the agent's last event."""
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

    def _measure(self, status: JobStatus, mine: tuple[SlotProgress, ...], now: float) -> None:
        self._meter.update(status, mine, self._timekeeper.ledger, now)
        own = status.own
        self._sampler.pids = {s.slot: s.pid for s in own.slots if s.pid} if own is not None else {}
        samples = self._sampler.latest
        if samples is not self._samples:
            self._samples = samples
            if samples.itself is not None:
                self._meter.used_itself(samples.itself)
            for slot, (pid, used) in samples.workers.items():
                self._meter.used(slot, pid, used)
            for slot, reading in samples.gpus.items():
                self._meter.gpu(slot, reading)
                self._observer.look_at_gpu(slot, reading, now)
        self._meter.compare(self._observer.lags(self._config.node), self._observer.gpus.bad)
        self._pages.publish(Published(status, self._meter.metrics.copy()))

    # ------------------------------------------------------------ to the leader

    def _progress(self, slots: tuple[SlotProgress, ...]) -> Progress | None:
        crew, held_back = self._driver.state.crew, self._driver.state.takedown.held_back
        told = self._told is not None and self._told.held_back
        if crew is None and not held_back and not told:
            return None
        number, used = crew.round.number if crew is not None else 0, self._meter.footprint
        return Progress(self._config.node, number, slots, used.own, used.replicas, held_back)

    def _tell(self, slots: tuple[SlotProgress, ...]) -> None:
        progress = self._progress(slots)
        if progress is not None and progress != self._told:
            self._told = progress
            self._gathering.tell(progress=progress)

    # ------------------------------------------------------------ the job's status

    def _others_seen(self, known: JobTelemetry | None) -> None:
        """Keep the nodes' progress. Runs on the follower's thread."""
        told = known.nodes.values() if known is not None else ()
        self._others = {f"progress/{one.node}": one.progress for one in told if one.progress is not None}

    def _round_seen(self, seen: Seen) -> None:
        """Keep the round with all its members. Runs on the store's thread."""
        self._whole = next((e.fact for e in reversed(seen.entries) if isinstance(e.fact, Round)), None)

    def _status(self, mine: tuple[SlotProgress, ...], now: float) -> JobStatus:
        state, unready = self._driver.state, self._unready()
        waits = [describe.waiting(w, now) for w in self._driver.waiting]  # type: ignore[arg-type]
        local = LocalFacts(
            AgentStatus(self._config.node, not unready, unready, tuple(self._events)),
            self._states(),
            (state.etcd.full, *waits) if state.etcd.full else tuple(waits),
            complete=self._config.etcd is None,
        )
        facts = self._facts(mine, now)
        return job_status(
            self._config.job, facts, now, self._rates, local=local, etcd_full=bool(state.etcd.full)
        )

    def _facts(self, mine: tuple[SlotProgress, ...], now: float) -> dict[str, Shown]:
        """Return the facts that this agent knows. Its own node's facts are newer than etcd's."""
        state, view, name = self._driver.state, self._driver.view, self._config.node
        seen = {key: e.fact for key, e in state.seen.items() if e.fact is not None}
        known: dict[str, Shown] = {**self._others, **seen}
        known["spec"] = state.spec or state.wanted
        whole, round = self._whole, state.round
        if whole is not None and round is not None and round.extent and whole.number == round.number:
            known["round"] = replace(round, members=whole.members)
        me, own, port = state.me, state.registration.own, state.store_port
        released = state.released.round
        known[me.key] = (own.fact if own is not None else None) or Node(
            name, me.incarnation, me.address, me.slots, released, port, me.pid, me.host
        )
        known[f"ledger/{name}"] = self._timekeeper.ledger.record(name, now)
        for key, fact in (
            (f"progress/{name}", self._progress(mine)),
            ("budget", view.budget if view is not None else None),
            ("checkpoint", self._meter.checkpoint),
            ("stragglers", self._observer.found),
        ):
            if fact is not None:
                known[key] = fact
            else:
                known.pop(key, None)
        return known

    def _states(self) -> dict[int, SlotState]:
        """Return the states of this node's slots that have a worker, by slot."""
        crew = self._driver.state.crew
        lives = {**self._driver.state.standbys, **(crew.workers if crew is not None else {})}
        return {slot: _SHOWN[life] for slot, life in lives.items()}

    def _unready(self) -> str:
        """Return a sentence if this node cannot train; else an empty string."""
        state = self._driver.state
        if state.departure is not None or state.exiting is not None:
            return "this node is leaving the job"
        if not state.registration.joined:
            return "this node has not joined the job yet"
        # Training goes on while etcd is away.
        if state.registered or state.etcd.silent is not None:
            return ""
        return "this node is not registered in etcd"
