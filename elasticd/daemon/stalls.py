"""What agents tell each other of workers that stand still, through etcd, and what the leader concludes.

Of a world of several nodes none sees enough: a worker that waits is no worse than the one it waits for,
wherever that is. So each tells, and the leader judges them together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from elasticd.core.facts import Hang, Phase, Stall
from elasticd.core.hang import REPEAT_S, Allowance, Doing, Look, Verdict, judge
from elasticd.core.leader.members import has_left
from elasticd.core.ports import Delete, Entry, Listing, Put, Seen, StillThere, Store, Write
from elasticd.daemon.driver import Driver


class Stalls:
    """One agent's side of it. Times: CLOCK_MONOTONIC of this node."""

    def __init__(self, driver: Driver, store: Store) -> None:
        self._driver = driver
        self._store = store
        self._told = False
        self._stalls: Mapping[str, tuple[Stall, float]] = {}
        self._news: deque[Seen] = deque()
        self._found: Hang | None = None
        self._following: tuple[int, Callable[[], None]] | None = None
        self._concluded = self._asked = (0, -REPEAT_S)  # of which round, and when
        store.watch("hang", self._hang_seen)

    # ------------------------------------------------------------ of this node

    def tell(self, stall: Stall) -> None:
        """How this node's workers stand still."""
        self._told = True
        self._write(Put(f"stalls/{stall.node}", stall, leased=True))

    def untell(self) -> None:
        """They make steps again: what was concluded has passed, and says nothing of the next time."""
        if self._found is not None and not self._found.asks:
            self._found = None
        if self._told:
            self._told = False
            self._write(Delete(f"stalls/{self._driver.state.me.node}"))

    def _write(self, write: Write) -> None:
        """A lost one is made up for by the next look."""
        state = self._driver.state
        if state.own is not None and state.own.fact is not None and not state.silent:
            guard = StillThere(state.me.key, state.own.created)
            self._store.transact((guard,), (write,), lambda answer: None)

    @property
    def busy(self) -> bool:
        """Whether somebody tells of workers that stand still, and this agent is to conclude from it."""
        return bool(self._stalls or self._news)

    def verdict_for(self, round_number: int) -> Verdict | None:
        """The leader's, on this very round."""
        found = self._found
        known = found is not None and found.round == round_number and not found.asks
        return found.verdict if found is not None and known else None

    def question(self, round_number: int) -> Hang | None:
        """The leader's to all nodes of this round, what their workers do."""
        found = self._found
        return found if found is not None and found.round == round_number and found.asks else None

    def _hang_seen(self, seen: Seen) -> None:
        for entry in seen.entries:
            if entry.key == "hang":
                self._found = entry.fact if isinstance(entry.fact, Hang) else None

    # ------------------------------------------------------------ of all, for the leader

    def lead(self, at: float) -> None:
        """Conclude from all nodes' stalls, while this agent leads."""
        leads = self._driver.state.leads
        if self._following is not None and (leads is None or leads.created != self._following[0]):
            self._following[1]()
            self._following, self._stalls = None, {}
            self._news.clear()
        if leads is None:
            return
        if self._following is None:
            self._following = (leads.created, self._store.watch("stalls/", self._news.append, prefix=True))
        self._take_in(at)
        self._conclude(leads, at)

    def _take_in(self, at: float) -> None:
        while self._news:
            seen = self._news.popleft()
            known = {} if isinstance(seen, Listing) else dict(self._stalls)
            for entry in seen.entries:
                _keep(known, entry, at)
            self._stalls = known

    def _conclude(self, leads: Entry, at: float) -> None:
        view = self._driver.view
        round = self._driver.state.round
        if not self._stalls or view is None or round is None:
            return
        if round.phase not in (Phase.LIVE, Phase.CLOSING):
            return
        if _lately(self._concluded, round.number, at):
            return
        finished = {
            name for name, r in (view.reports or {}).items() if r.round == round.number and r.finished
        }
        told: list[tuple[Stall, float]] = []
        silent = False
        for member in round.members:
            known = self._stalls.get(member.node)
            current = known is not None and known[0].round == round.number
            if known is not None and current and known[0].incarnation == member.incarnation:
                told.append(known)
            elif member.node not in finished and not has_left(view, member, round.number):
                silent = True  # it makes steps, or has not said yet
        if not told:
            return
        looks = _all_looks(told, at)
        if silent:  # it is only asked where somebody hangs for certain
            looks = [look for look in looks if look.doing is Doing.STOPPED]
        verdict = judge(looks, _most_patient([stall.allowed for stall, _ in told]))
        if verdict is None or (silent and _lately(self._asked, round.number, at)):
            return
        if silent:
            self._asked = (round.number, at)
        else:
            self._concluded = (round.number, at)
        guard = StillThere("leader", leads.created)
        put = Put("hang", Hang(round.number, verdict, asks=silent), leased=True)
        self._store.transact((guard,), (put,), lambda answer: None)


def _lately(done: tuple[int, float], round_number: int, at: float) -> bool:
    """Whether it was done in this very round, and not long ago."""
    return done[0] == round_number and at < done[1] + REPEAT_S


def _keep(known: dict[str, tuple[Stall, float]], entry: Entry, at: float) -> None:
    name = entry.key.partition("/")[2]
    if isinstance(entry.fact, Stall):
        known[name] = (entry.fact, at)
    else:
        known.pop(name, None)


def _all_looks(told: Sequence[tuple[Stall, float]], at: float) -> list[Look]:
    """As old as they are by now."""
    return [
        replace(look, still_s=look.still_s + (at - since)) for stall, since in told for look in stall.looks
    ]


def _most_patient(allowances: Sequence[Allowance]) -> Allowance:
    return Allowance(
        stopped_s=max(a.stopped_s for a in allowances),
        asleep_s=max(a.asleep_s for a in allowances),
        waiting_s=max(a.waiting_s for a in allowances),
        busy_s=max(a.busy_s for a in allowances),
        unasked_s=max(a.unasked_s for a in allowances),
    )
