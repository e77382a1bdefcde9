"""Leads the job while this agent holds the leader's key: what the leader watches, decides and writes.

The leader watches what every agent watches, and more. ``elasticd.core.leader`` decides, and each decision is
one guarded transaction. The view takes what the leader wrote from etcd's answer. Only the members of a large
round, and the deletion of all keys below a prefix, come by the watches. The next decision waits until the
view shows what was written.

An agent's own release often lets the leader form the next round at once. If the leading agent is about to
write its record or its report, and the leader would then change the round, both are written in one
transaction. If that closes the round, and no member is in it any more, the transaction holds the next round,
too. Without that, a round of one node would wait for etcd several times. So the agent's writes wait while
those of the leader are under way: etcd would apply the agent's afterwards in any case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from elasticd.core import agent, leader
from elasticd.core.agent.agent_state import AgentState
from elasticd.core.agent_messages import RoundWritten, Transact
from elasticd.core.facts import Paces, Round
from elasticd.core.ports import (
    Answer,
    Applied,
    Changes,
    Entry,
    Guard,
    Listing,
    Put,
    Seen,
    StillThere,
    Store,
    Write,
    entry_of,
)
from elasticd.core.reasons import Reason
from elasticd.core.round_parts import PartSizes, has_parts
from elasticd.daemon.round_watch import RoundWatch

SCOPES: Final = ("nodes/", "reports/", "budget", "stalls/", "hang", "stragglers")
RETRY_S: Final = 0.2
# Keys that the leader writes, and that reach it in several ways.
_OF_THE_JOB: Final = ("spec", "round", "budget")


@dataclass(frozen=True, slots=True)
class LeaderSaw:
    """News of keys that only the leader watches. ``term``: the leadership that watches the keys."""

    term: int
    scope: str
    seen: Seen


@dataclass(frozen=True, slots=True)
class LeaderAnswered:
    """The answer to a transaction of the leader. ``guards``, ``rest``: the transactions that follow it."""

    term: int
    answer: Answer
    guards: tuple[Guard, ...] = ()
    rest: tuple[tuple[Write, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class BothAnswered:
    """The answer to a transaction with writes of the leader and of its agent. ``action``: the agent's."""

    term: int
    action: Transact
    answer: Answer


LeaderNews = LeaderSaw | LeaderAnswered | BothAnswered


@dataclass(slots=True)
class _Term:
    """One leadership.

    ``asked``: the writes under way. ``shown``: the newest revision that the view has of each key that reaches
    it in several ways, such as by a watch and by the answer to a write; -1: none yet. Older news of such a
    key may come after newer news. ``written``: the revision of what this node last wrote, by key. The view
    must show it before the next decision: a late listing may have undone what came from the answer.
    ``reasons``: of the writes under way. ``retry_at``: the earliest time of the next decision. ``waiting``:
    why the job waits. ``tried``: the reasons of writes that are not done yet, though they were asked for; a
    retry does not log them again. ``reads_parts``: the members of a round in parts are being followed.
    """

    number: int
    created: int
    view: leader.View
    ends: list[Callable[[], None]]
    shown: dict[str, int]
    asked: tuple[Write, ...] = ()
    reasons: tuple[Reason, ...] = ()
    written: dict[str, int] = field(default_factory=dict)
    retry_at: float = 0.0
    waiting: tuple[Reason, ...] = ()
    tried: tuple[Reason, ...] = ()
    reads_parts: bool = False

    def is_news(self, entry: Entry) -> bool:
        """Whether the view shows neither this state of the key nor a later one. Note what the view shows from
        now on. News of a key that comes in one way is always new."""
        shown = self.shown.get(entry.key)
        if shown is None:
            return True
        self.shown[entry.key] = max(shown, entry.revision)
        return entry.revision > shown

    def take_on(self, plan: leader.Plan) -> tuple[Reason, ...]:
        """Note that this plan is carried out. Return its reasons that are new."""
        said = (*self.waiting, *self.tried)
        self.waiting = plan.waiting if plan.writes else plan.reasons
        if plan.writes:
            self.asked, self.reasons = plan.writes, plan.reasons
        return tuple(reason for reason in (*plan.waiting, *plan.reasons) if reason not in said)

    def end_attempt(self, *, done: bool) -> tuple[Write, ...]:
        """Note that the writes under way are done, or were refused. Return them."""
        writes, reasons = self.asked, self.reasons
        self.asked = self.reasons = ()
        others = tuple(reason for reason in self.tried if reason not in reasons)
        self.tried = others if done else (*others, *reasons)
        return writes

    def guards_of(self, plan: leader.Plan) -> tuple[Guard, ...]:
        """Return the guards of the plan, and that this agent still leads."""
        return StillThere("leader", self.created), *plan.guards

    def shows_what_is_written(self) -> bool:
        return all(self.shown[key] >= revision for key, revision in self.written.items())

    def take(self, entries: Iterable[Entry], now: float) -> bool:
        """Take what is news into the view. Return whether there was any."""
        news = tuple(entry for entry in entries if self.is_news(entry))
        if news:
            self.view = leader.see(self.view, Changes(news), "", now)  # only a listing has a scope
        return bool(news)


class Leading:
    """The leadership of one agent. The agent's thread makes all calls. ``post`` gets events for ``saw``,
    ``answered`` and ``both_answered``, on any thread; ``say`` gets the reasons of decisions.

    ``has_half_a_decision``: the next call should be ``lead``, since other news might undo the half that is
    made.
    """

    def __init__(
        self,
        store: Store,
        post: Callable[[LeaderNews], None],
        say: Callable[[Reason], None],
        part_sizes: PartSizes,
    ) -> None:
        self._store = store
        self._post = post
        self._say = say
        self._part_sizes = part_sizes
        self._term: _Term | None = None
        self._terms = 0
        self._held: deque[Transact] = deque()  # the agent's writes that wait for the answer to the leader's
        self.has_half_a_decision = False

    @property
    def view(self) -> leader.View | None:
        """The leader's view; None unless this agent leads."""
        return self._term.view if self._term else None

    @property
    def waiting(self) -> tuple[Reason, ...]:
        """Why the job waits; empty unless this agent leads."""
        return self._term.waiting if self._term else ()

    # ------------------------------------------------------------ news

    def saw(self, news: LeaderSaw, now: float) -> bool:
        """Take the news into the view. Return whether the news was new to this leadership."""
        term = self._term_of(news.term)
        if term is None or (news.scope == "round" and _is_old(news.seen, term.view)):
            return False
        if isinstance(news.seen, Listing):
            term.shown |= {key: news.seen.revision for key in term.shown if key.startswith(news.scope)}
            term.view = leader.see(term.view, news.seen, news.scope, now)
            return True
        return term.take(news.seen.entries, now)

    def follow(self, entry: Entry, now: float) -> bool:
        """Take a key that every agent watches into the leader's view. Return whether it was new to the view.

        Of a round in parts the agent reads one part only. So the leader then watches the round itself, with
        all parts: the agent may hear of a round later than the leader does.
        """
        term = self._term
        if term is None:
            return False
        apart = isinstance(entry.fact, Round) and has_parts(entry.fact)
        if entry.key != "round" or not (apart or term.reads_parts):
            return term.take((entry,), now)
        if not term.reads_parts:
            term.reads_parts = True
            term.ends.append(RoundWatch(self._store, partial(self._watched, term.number, "round")).end)
        return False

    def hear_paces(self, paces: tuple[Paces, ...]) -> bool:
        """Take the paces into the view. Return whether they change what the leader finds."""
        if not self._term:
            return False
        before, self._term.view = self._term.view, leader.hear_paces(self._term.view, paces)
        return self._term.view.comparison.found is not before.comparison.found

    def answered(self, news: LeaderAnswered, now: float) -> RoundWritten | None:
        """Return the round that was written, for the agent. None if it was not, or has parts."""
        term = self._term_of(news.term)
        if term is None:
            return None
        if news.rest and isinstance(news.answer, Applied):
            self._write(term, news.guards, news.rest)
            return None
        return _take_answer(term, news.answer, (), now)

    def both_answered(self, news: BothAnswered, now: float) -> RoundWritten | None:
        """Return what ``answered`` returns."""
        term = self._term_of(news.term)
        return _take_answer(term, news.answer, news.action.writes, now) if term is not None else None

    # ------------------------------------------------------------ decisions

    def lead(self, state: AgentState, now: float) -> float | None:
        """Decide, if this agent leads. Return the time of the next decision, if nothing happens before."""
        self.has_half_a_decision = False
        entry = state.leads
        if self._term and (entry is None or entry.created != self._term.created):
            self.stop()
        if entry is None:
            return None
        if self._term is None:
            self._term = self._start(entry, state, now)
        term = self._term
        if not _may_decide(term, state):
            return None
        if now < (until := max(term.retry_at, agent.report_waits_until(state))):
            return until
        term.view = _with_absence(term.view, state)
        plan = leader.decide(term.view, now)
        if plan.judged is not term.view.judged or plan.seated is not term.view.seated:
            term.view = replace(term.view, judged=plan.judged, seated=plan.seated)
        self.has_half_a_decision = plan.seated is not leader.NOT_SEATED
        news = term.take_on(plan)
        if plan.writes:
            self._write(term, term.guards_of(plan), (*plan.ahead, plan.writes))
        for reason in news:
            self._say(reason)
        return plan.wake_at

    def hold(self, action: Transact) -> bool:
        """Return whether these writes of the agent wait: because the leader of a small job has asked for
        writes itself, or because earlier writes wait."""
        if not self._held and not (self._has_asked and self._term and _is_small(self._term.view)):
            return False
        self._held.append(action)
        return True

    def let_go(self) -> Iterator[Transact]:
        """Yield the writes that need not wait any longer, in order. Make each before you ask for the next,
        which waits again if the leader then asks for writes."""
        while self._held and not self._has_asked:
            yield self._held.popleft()

    @property
    def _has_asked(self) -> bool:
        return self._term is not None and bool(self._term.asked)

    def write_both(self, action: Transact, state: AgentState, now: float) -> tuple[Reason, ...] | None:
        """If the leader will change the round because of these writes of its agent, make all in one
        transaction. Return the reasons, which are not said yet; None if nothing is written."""
        term, leads = self._term, state.leads
        if term is None or leads is None or leads.created != term.created or now < term.retry_at:
            return None
        if not _may_decide(term, state) or not _is_small(term.view):
            return None
        foreseen = leader.foresee(_with_absence(term.view, state), action.writes, now)
        plan = leader.decide_and_go_on(foreseen, now) if foreseen is not None else leader.Plan()
        if not plan.may_be_joined or not any(write.key == "round" for write in plan.writes):
            return None
        news = term.take_on(plan)
        self._store.transact(
            (*action.guards, *term.guards_of(plan)),
            (*action.writes, *plan.writes),
            lambda answer: self._post(BothAnswered(term.number, action, answer)),
        )
        return news

    def stop(self) -> None:
        if self._term:
            for end in self._term.ends:
                end()
            self._term = None

    # ------------------------------------------------------------

    def _term_of(self, number: int) -> _Term | None:
        return self._term if self._term is not None and self._term.number == number else None

    def _start(self, entry: Entry, state: AgentState, now: float) -> _Term:
        self._terms += 1
        number = self._terms
        ends = [
            self._store.watch(scope, partial(self._watched, number, scope), prefix=scope.endswith("/"))
            for scope in SCOPES
        ]
        shown = dict.fromkeys((state.me.key, state.me.report_key, *_OF_THE_JOB), -1)
        self._term = _Term(number, entry.created, leader.View(part_sizes=self._part_sizes), ends, shown)
        for key in ("spec", "round"):
            if key in state.seen:
                self.follow(state.seen[key], now)
        return self._term

    def _watched(self, term: int, scope: str, seen: Seen) -> None:
        self._post(LeaderSaw(term, scope, seen))

    def _write(self, term: _Term, guards: tuple[Guard, ...], batches: tuple[tuple[Write, ...], ...]) -> None:
        """Apply the first batch. Its answer leads to the rest."""
        number, rest = term.number, batches[1:]
        self._store.transact(
            guards, batches[0], lambda answer: self._post(LeaderAnswered(number, answer, guards, rest))
        )


def _may_decide(term: _Term, state: AgentState) -> bool:
    return not term.asked and state.etcd.silent is None and term.shows_what_is_written()


def _with_absence(view: leader.View, state: AgentState) -> leader.View:
    counts_from = state.etcd.absence_counts_from
    return view if view.absence_counts_from == counts_from else replace(view, absence_counts_from=counts_from)


def _take_answer(term: _Term, answer: Answer, own: tuple[Write, ...], now: float) -> RoundWritten | None:
    """Note the answer to the leader's writes. Return the round, if it was written, and has no parts.

    ``own``: what its agent wrote with them.
    """
    writes = term.end_attempt(done=isinstance(answer, Applied))
    if not isinstance(answer, Applied):
        term.retry_at = now + RETRY_S
        return None
    at = answer.revision
    entries = [*leader.entries_of(term.view, own, at)]
    round: RoundWritten | None = None
    for write in writes:
        if isinstance(write, Put) and isinstance(write.fact, Round):
            term.written["round"] = at
            if has_parts(write.fact):
                continue  # a watch brings the round with all its members
            round = RoundWritten(write.fact, at)
        if write.key in (*_OF_THE_JOB, *leader.FINDINGS):
            entries.append(entry_of(write, at, at))
    term.written |= {entry.key: at for entry in entries if entry.key in term.shown}
    term.take(entries, now)
    return round


def _is_small(view: leader.View) -> bool:
    """Whether the job has few nodes. Then a decision takes little time, and a round has no parts."""
    return view.nodes is not None and len(view.nodes) <= view.part_sizes.members


def _is_old(seen: Seen, view: leader.View) -> bool:
    """Whether the news of the round is older than the round in the leader's view."""
    known = view.revisions.get("round", 0)
    return all(entry.revision < known for entry in seen.entries)
