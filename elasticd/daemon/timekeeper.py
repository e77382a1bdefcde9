"""Keeps the ledger of this node's slots, in memory and now and then in etcd."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from elasticd.core.agent import State
from elasticd.core.facts import NodeLedger, Phase, Round, SlotProgress
from elasticd.core.ledger import AtWork, Kind, Ledger, Seen, keep_every_s
from elasticd.core.lifecycle import Life
from elasticd.core.ports import Answer, Listing, Put, Store
from elasticd.core.ports import Seen as News
from elasticd.daemon.config import RunConfig
from elasticd.daemon.driver import Driver
from elasticd.daemon.meter import StepTimes

FAREWELL_S = 2.0  # for the last write, and for what the other nodes write last


class Timekeeper:
    """``look`` from time to time, and whenever something has changed, on the agent's one thread."""

    def __init__(
        self, config: RunConfig, driver: Driver, store: Store, step_times: StepTimes, began_at: float
    ) -> None:
        self._step_times = step_times
        self._held: dict[int, tuple[int, int, float, float]] = {}
        self._hung = (0, 0.0)  # the round that was judged hung last, and when
        self._config = config
        self._driver = driver
        self._store = store
        self._began_at = began_at
        self._kept: NodeLedger | None = None  # what an earlier agent of this node left; set by the store
        self._listed = False  # so is this, once it has been seen whether there is any
        self._resumed = False
        self._run = 0
        self._write_due = began_at
        self._round = (0, Phase.WAITING)
        self.ledger = Ledger()
        self.ledger = self.ledger.see(dict.fromkeys(self._slots(), Kind.RENDEZVOUS), began_at)
        store.watch(self._key, self._own_seen)

    @property
    def _key(self) -> str:
        return f"ledger/{self._config.node}"

    def _slots(self) -> Sequence[int]:
        """As many as the job may have workers, and any that has had one: a spare's, or another's place."""
        state = self._driver.state
        limits = (state.spec or state.wanted).limits
        used = {*self.ledger.slots, *(state.crew.member.slots if state.crew is not None else ())}
        return [slot for n, slot in enumerate(state.me.slots) if n < limits.max or slot in used]

    def look(self, beats: Sequence[SlotProgress], now: float) -> None:
        state = self._driver.state
        by_slot = {beat.slot: beat for beat in beats}
        self.ledger = self.ledger.see(self._last_steps(by_slot), now)
        self.ledger = self.ledger.see({s: self._seen(s, by_slot.get(s)) for s in self._slots()}, now)
        if state.spec is not None:
            self._run = state.seen["spec"].created
        joined = state.registration.joined and state.round is not None and not state.over
        if not self._resumed and self._listed and joined:
            self._resumed = True
            if self._kept is not None and self._kept.run == self._run:
                back = {time.slot for time in self._kept.slots}.intersection(state.me.slots)
                self.ledger = self.ledger.see(dict.fromkeys(back - {*self.ledger.slots}, Kind.IDLE), now)
                self.ledger = self.ledger.resume(self._kept, self._began_at)
        round = (state.round.number, state.round.phase) if state.round else self._round
        if now >= self._write_due or round != self._round:
            self._round = round
            self._write_due = now + keep_every_s(now - self._began_at)
            self._write(now, lambda answer: None)

    def hung(self, round: int, now: float) -> None:
        """The workers of this round stand still, as one of them hangs: until it ends, or they make a step
        after all. Call ``look`` then."""
        self._hung = (round, now)

    def _last_steps(self, beats: Mapping[int, SlotProgress]) -> dict[int, Seen]:
        """Of the workers that were at work when last looked at: some may be no longer."""
        crew = self._driver.state.crew
        return {
            slot: self._at_work(account.seen.round, beats[slot])
            for slot, account in self.ledger.slots.items()
            if isinstance(account.seen, AtWork)
            and slot in beats
            and crew is not None
            and crew.round.number == account.seen.round
        }

    def _seen(self, slot: int, beat: SlotProgress | None) -> Seen:
        kind = not_at_work(self._driver.state, slot)
        if kind is not None:
            return kind
        crew = self._driver.state.crew
        assert crew is not None
        round, since = self._hung
        if round == crew.round.number and (beat is None or beat.at <= since):
            return Kind.HUNG
        return self._at_work(crew.round.number, beat) if beat is not None else AtWork(crew.round.number)

    def _at_work(self, round: int, beat: SlotProgress) -> AtWork:
        account = self.ledger.slots.get(beat.slot)
        before = account.seen if account is not None else None
        first_at = before.first_at if isinstance(before, AtWork) and before.round == round else 0.0
        if beat.step and not first_at:
            times = self._step_times(beat.slot, 0)
            first_at = times[0] if len(times) >= beat.step else 0.0
        held_s = max(0.0, beat.held_s - self._held_before(beat, round))
        return AtWork(round, beat.step, beat.at, first_at, beat.base, held_s)

    def _held_before(self, beat: SlotProgress, round: int) -> float:
        """For how long checkpoints had held up this process when it came to the round."""
        pid, of_round, before_s, last_s = self._held.get(beat.slot, (0, 0, 0.0, 0.0))
        if of_round != round:
            before_s = last_s if pid == beat.pid else 0.0
        self._held[beat.slot] = (beat.pid, round, before_s, beat.held_s)
        return before_s

    def farewell(self, now: float) -> tuple[NodeLedger, ...]:
        """Write the last of it; what each node has written that took part. Takes a few seconds at most:
        the other nodes of a job that has ended are given time to write theirs."""
        self.ledger = self.ledger.close(now)
        mine = self.ledger.record(self._config.node, now, self._run)
        if self._config.etcd is None:
            return (mine,)
        written = threading.Event()
        if self._write(now, lambda answer: written.set()):
            written.wait(FAREWELL_S)
        return (mine, *_others(self._store, mine.node, self._driver.state.round))

    # ------------------------------------------------------------ etcd

    def _write(self, now: float, answered: Callable[[Answer], None]) -> bool:
        """Whether it could be tried."""
        state = self._driver.state
        if state.guard is None or not self._resumed:
            return False
        record = self.ledger.record(self._config.node, now, self._run)
        self._store.transact((state.guard,), (Put(self._key, record),), answered)
        return True

    def _own_seen(self, news: News) -> None:
        """Until it has been taken up, what is there is an earlier agent's; or nothing, in a new run."""
        if self._resumed:
            return
        kept = [entry.fact for entry in news.entries if entry.key == self._key]
        if kept or isinstance(news, Listing):
            fact = kept[-1] if kept else None
            self._kept = fact if isinstance(fact, NodeLedger) else None
        self._listed = True


def _others(store: Store, node: str, ended: Round | None) -> list[NodeLedger]:
    """What the other nodes have written, once the members of the round that the job ended with have
    done so since it ended; or what there is when the time is over."""
    known: dict[str, NodeLedger] = {}
    whole = threading.Event()
    over = ended is not None and ended.phase is Phase.ENDED
    awaited = {m.node for m in ended.members} - {node} if ended is not None and over else set()

    def seen(news: News) -> None:
        known.update({e.fact.node: e.fact for e in news.entries if isinstance(e.fact, NodeLedger)})
        if ended is None or all(n in known and known[n].at >= ended.since for n in awaited):
            whole.set()

    end = store.watch("ledger/", seen, prefix=True)
    whole.wait(FAREWELL_S)
    end()
    return [ledger for name, ledger in sorted(known.items()) if name != node]


def not_at_work(state: State, slot: int) -> Kind | None:
    """Why no worker is at work in the slot, as far as the agent knows; None if one is."""
    crew, round = state.crew, state.round
    if round is not None and round.phase is Phase.ENDED and state.registration.joined:
        return Kind.IDLE if crew is None or slot not in crew.alive else Kind.RESTARTING
    if crew is not None and slot in crew.member.slots:
        if slot in crew.alive and crew.order is None:
            return None
        if slot in state.standbys:
            return Kind.RENDEZVOUS  # it has left the round, and keeps its process for the next
        done = crew.workers[slot] is Life.FINISHED and crew.order is None
        return Kind.IDLE if done else Kind.RESTARTING
    if round is None or not state.registration.joined:
        return Kind.RENDEZVOUS
    if state.standbys.get(slot) is Life.STARTING:
        return Kind.RESTARTING  # and only then it waits for others
    if round.phase is Phase.WAITING:
        return Kind.WAITING
    member = round.member(state.me.node, state.me.incarnation)
    if member is not None and slot in member.slots:
        return Kind.RENDEZVOUS
    return Kind.IDLE
