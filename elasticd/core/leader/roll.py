"""The roll: what the leader asks of every node, answered for all nodes at once.

The leader decides at each event, and most events concern one node of perhaps ten thousand. So no decision
goes through all nodes. The roll marks the members of the round, and counts the places for workers. Each event
brings the roll up to date for the nodes that it concerns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from itertools import chain, islice
from operator import attrgetter
from typing import Final

from elasticd.core import budget as budgets
from elasticd.core import seating
from elasticd.core.age import Age
from elasticd.core.facts import Failure, Member, Node, Phase, Quarantine, Report, Round, Spec, Stall
from elasticd.core.hang.judging import Doing, Group
from elasticd.core.persistent_map import PersistentMap


@dataclass(frozen=True, slots=True)
class Registered:
    """A node as the leader sees it. ``created``: the revision of its registration. ``seen_at``: when this
    leader first saw this incarnation. ``news_at``: when it saw the present record. Seconds since the
    epoch."""

    node: Node
    created: int
    seen_at: float
    news_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ReceivedStall:
    """An agent's report of workers that stand still, and when the leader received it. ``groups``: of the
    report's looks, which are made once, and not when all nodes have reported."""

    stall: Stall
    at: float
    groups: tuple[Group, ...]


class Mark(StrEnum):
    """What the leader sees of a member of the round: of its registration, and of its report of the round."""

    MISSING = auto()  # not registered
    REPLACED = auto()  # missing, and another incarnation of its node is registered
    HOLDING = auto()  # has workers in the round, or holds a state from before the return to a checkpoint
    LEFT = auto()  # has no worker in the round any more
    DECLINED = auto()  # has left the round without taking part
    OUTLIVING = auto()  # has left the round with the state that the round's workers agreed on
    PARTED = auto()  # outliving, and each of its workers in the round holds a part of a sharded state
    FENCED = auto()  # its workers were killed, since its lease was running out
    LEAVING = auto()  # is to leave the job
    TO_REPORT = auto()  # its release came, and the report that belongs to the release did not
    FINISHED = auto()
    RETURNED = auto()
    CHECKPOINTED = auto()
    BROKEN = auto()
    FAILED = auto()  # reports a failure
    FATAL = auto()  # reports a failure that is to end the job
    RAISED = auto()  # reports a failure of a worker that raised an exception of its own
    ASTRAY = auto()  # reports a value that is not finite
    STILL = auto()  # reports workers that make no steps
    STOPPED = auto()  # reports a worker that is stopped


class Standing(StrEnum):
    """What a registered node is to the round."""

    MEMBER = auto()  # of a round that is live or closes
    WAITING = auto()
    DRAINING = auto()  # is to leave the job


SHOWN_MAX = 8  # nodes that a reason names; it gives the number of the others
NOBODY: Final[PersistentMap[Member]] = PersistentMap()
NO_SLOTS: Final[PersistentMap[tuple[int, ...]]] = PersistentMap()


@dataclass(frozen=True, slots=True)
class Roll:
    """The roll of the first five fields. ``marked``: the members with each mark. ``first``: by mark, the
    earliest failure of that kind. ``holders``: by the age of a state, the slots of registered nodes that hold
    such a state. ``standing``: how many registered nodes are members, wait or drain. ``free``: how many
    workers there are for the next world, whatever its limits and quarantines; ``held``: how many more once
    the members have released the round. ``came_at``: when the last node came that may be in the next world,
    if there was one since the round began."""

    spec: Spec | None = None
    round: Round | None = None
    nodes: PersistentMap[Registered] = field(default_factory=PersistentMap)
    reports: PersistentMap[Report] = field(default_factory=PersistentMap)
    stalls: PersistentMap[ReceivedStall] = field(default_factory=PersistentMap)
    marked: Mapping[Mark, PersistentMap[Member]] = field(default_factory=dict)
    first: Mapping[Mark, Failure | None] = field(default_factory=dict)
    holders: Mapping[Age, PersistentMap[tuple[int, ...]]] = field(default_factory=dict)
    standing: Mapping[Standing, int] = field(default_factory=dict)
    free: int = 0
    held: int = 0
    came_at: float = 0.0

    # ------------------------------------------------------------ questions

    def __getitem__(self, mark: Mark) -> PersistentMap[Member]:
        """Return the members with the mark, by the name of their node."""
        return self.marked.get(mark, NOBODY)

    @property
    def places(self) -> int:
        """How many workers there are for the next world, whatever its limits and quarantines. While the round
        is live, the places of its members count."""
        return self.free + self.held if self._is_live else self.free

    def names(self, mark: Mark, *, but: Mark | None = None) -> tuple[str, ...]:
        """Return the nodes of the members with the mark, and without the mark ``but``, in the order of
        ranks."""
        others = self[but] if but is not None else NOBODY
        return in_rank_order(m for name, m in self[mark].to_dict().items() if name not in others)

    def some(self, mark: Mark, *, but: Mark | None = None) -> tuple[tuple[str, ...], int]:
        """Return at most ``SHOWN_MAX`` of ``names``, and the number of the others."""
        mine, others = self[mark], self[but] if but is not None else NOBODY
        shown = islice((name for name in mine if name not in others), SHOWN_MAX)
        return in_rank_order(mine[name] for name in shown), max(0, self.count(mark, but=but) - SHOWN_MAX)

    def count(self, mark: Mark, *, but: Mark | None = None) -> int:
        """Return the number of ``names``, which is known sooner than the names of nearly all members."""
        mine, others = self[mark], self[but] if but is not None else NOBODY
        few, many = sorted((mine, others), key=len)
        return len(mine) - sum(name in many for name in few)

    def needed(self, mark: Mark) -> Iterator[Member]:
        """Yield the members with the mark, except the members that may go. A node whose workers have finished
        may leave, unless the others may still need its store."""
        assert self.round is not None
        for name in self[mark]:
            member = self.round.by_node[name]
            if name not in self[Mark.FINISHED] or member is self.round.members[0]:
                yield member

    def reports_of(self, mark: Mark) -> list[Report]:
        """Return the reports of the members with the mark."""
        if not self[mark]:
            return []
        reports = self.reports.to_dict()
        return [reports[name] for name in self[mark]]

    @property
    def newest_age(self) -> Age | None:
        """The age of the newest state that workers hold."""
        return max(self.holders, default=None)

    def newest_holders(self, nodes: Sequence[Node]) -> Mapping[str, tuple[int, ...]]:
        """Return the slots of these nodes, and perhaps of others, that hold the newest state on these
        nodes."""
        for age in sorted(self.holders, reverse=True):
            holders = self.holders[age].to_dict()
            if not holders.keys().isdisjoint(node.name for node in nodes):
                return holders
        return {}

    def candidates(self, *, live: bool = False) -> Sequence[Node]:
        """Return ``seating.candidates`` of all nodes: members in the order of ranks, then the other nodes in
        order of arrival."""
        assert self.spec is not None
        assert self.round is not None
        known, members = self.nodes.to_dict(), self.round.by_node
        replaced = {*self[Mark.REPLACED]}
        there = [*filter(None, map(known.get, members))]
        if replaced:
            there = [one for one in there if one.node.name not in replaced]
        newcomers = [known[name] for name in {*(known.keys() - members.keys()), *replaced}]
        there += sorted(newcomers, key=attrgetter("created"))
        return seating.candidates([*map(attrgetter("node"), there)], self.spec, self.round, live=live)

    def world_without(self, quarantines: Sequence[Quarantine], now: float) -> int:
        """Return the size of the largest world without the slots in quarantine."""
        assert self.spec is not None
        places = self.places
        for name in {q.node for q in quarantines if q.until > now}:
            node = self._candidate(self.nodes.get(name))
            if node is not None:
                places += _room(node, self.spec, quarantines, now) - _room(node, self.spec)
        return self.spec.limits.largest(places)

    # ------------------------------------------------------------ bringing it up to date

    def follow(
        self,
        spec: Spec,
        round: Round,
        nodes: PersistentMap[Registered],
        reports: PersistentMap[Report],
        stalls: PersistentMap[ReceivedStall],
    ) -> Roll:
        """Return the roll of these facts. Of the same round, whatever its phase, only what differs is looked
        at."""
        same = spec is self.spec and round is self.round
        if same and nodes is self.nodes and reports is self.reports and stalls is self.stalls:
            return self
        holders = self._holders_of(nodes)
        after = replace(
            self, spec=spec, round=round, nodes=nodes, reports=reports, stalls=stalls, holders=holders
        )
        if same or self._goes_on(spec, round):
            return after._with_changes(self, _differences(self, after))
        after = Roll(spec, round, nodes, reports, stalls, holders=holders)
        ordinary = after._ordinary()
        return after._with(ordinary)._with_changes(Roll(), _others(after, ordinary))

    def _holders_of(self, nodes: PersistentMap[Registered]) -> Mapping[Age, PersistentMap[tuple[int, ...]]]:
        """Return ``holders`` of these nodes. They do not depend on the round."""
        if nodes is self.nodes:
            return self.holders
        changes: dict[Age, dict[str, tuple[int, ...] | None]] = {}
        for name, now, was in nodes.differences(self.nodes):
            if was is not None and was.node.age is not None:
                changes.setdefault(was.node.age, {})[name] = None
            if now is not None and now.node.age is not None:
                changes.setdefault(now.node.age, {})[name] = now.node.holders
        after = {age: self.holders.get(age, NO_SLOTS).updated(changed) for age, changed in changes.items()}
        return {age: slots for age, slots in {**self.holders, **after}.items() if slots}

    def _goes_on(self, spec: Spec, round: Round) -> bool:
        """Whether all that the roll has found out still holds, but for nodes that are asked to leave."""
        if self.spec is None or self.round is None:
            return False
        return self.round.members is round.members and _basis(self.spec, self.round) == _basis(spec, round)

    def _ordinary(self) -> Mapping[str, Registered]:
        """Return the members that have the round's workers and tell of nothing: nearly all, when a round
        begins. Each has the mark HOLDING, and no other."""
        assert self.spec is not None
        assert self.round is not None
        if self.round.phase not in _RUNS:
            return {}
        number, inplace = self.round.number, self.spec.inplace
        names, nodes = map(attrgetter("node"), self.round.members), self.nodes.to_dict()
        others = {*self.stalls, *(d.node for d in self.spec.drain)}
        others.update([report.node for report in self.reports.values() if report.round == number])
        return {
            member.node: known
            for member, known in zip(self.round.members, map(nodes.get, names), strict=True)
            if known is not None and (node := known.node).incarnation == member.incarnation
            if node.released < number and node.fenced < number and not node.draining
            if (not inplace or node.slots == member.slots) and member.node not in others
        }

    def _with(self, ordinary: Mapping[str, Registered]) -> Roll:
        """Return the roll with these members in an empty one."""
        assert self.spec is not None
        assert self.round is not None
        if not ordinary:
            return self
        came_at = max(map(attrgetter("seen_at"), ordinary.values())) if self._is_live else 0.0
        return replace(
            self,
            marked={Mark.HOLDING: self.nodes.with_values(self.round.by_node, ordinary)},
            standing={Standing.MEMBER: len(ordinary)},
            held=seating.rooms([*map(attrgetter("node"), ordinary.values())], self.spec.limits),
            came_at=came_at,
        )

    def _with_changes(self, before: Roll, changed: Iterable[tuple[str, _Known, _Known]]) -> Roll:
        """Return the roll after what has changed since ``before``."""
        assert self.round is not None
        changes: dict[Mark, dict[str, Member | None]] = {}
        told: list[tuple[Report | None, Report | None]] = []
        free, held, came_at, standing = self.free, self.held, self.came_at, Counter(self.standing)
        for name, was, now in changed:
            member = self.round.by_node.get(name)
            if member is not None:
                if was[1] is not now[1]:
                    told.append((was[1], now[1]))
                had, has = before._marks(member, *was), self._marks(member, *now)
                if has != had:
                    for mark in {*had, *has}:
                        changes.setdefault(mark, {})[name] = member if mark in has else None
            if was[0] is now[0] and before.spec is self.spec:
                continue
            if was[0] is not None and before.round is not None:
                standing[before._standing(was[0])] -= 1
            if now[0] is not None:
                standing[self._standing(now[0])] += 1
            was_free, was_held = before._rooms(was[0])
            is_free, is_held = self._rooms(now[0])
            free, held = free + is_free - was_free, held + is_held - was_held
            if now[0] is not None and now[0].seen_at > came_at and self._candidate(now[0]) is not None:
                came_at = now[0].seen_at
        marked = {**self.marked, **{mark: self[mark].updated(changed) for mark, changed in changes.items()}}
        after = replace(self, marked=marked, standing=standing, free=free, held=held, came_at=came_at)
        return after._with_failures(told) if told else after

    def _with_failures(self, told: Sequence[tuple[Report | None, Report | None]]) -> Roll:
        """Return the roll, whose marks are up to date, after these reports have changed."""
        first: dict[Mark, Failure | None] = {}
        for mark, failure_of in _FAILURE_OF.items():
            gone, new = (
                [failure_of(one) for one in reports if one is not None and self._is_of_member(one)]
                for reports in zip(*told, strict=True)
            )
            before = self.first.get(mark)
            if before is not None and before in gone and before not in new:
                before, new = None, [failure_of(one) for one in self.reports_of(mark)]
            first[mark] = budgets.earliest([before, *new])
        return replace(self, first=first)

    def _marks(
        self,
        member: Member,
        known: Registered | None,
        report: Report | None,
        received: ReceivedStall | None,
    ) -> Sequence[Mark]:
        spec, round = self.spec, self.round
        if spec is None or round is None:
            return ()
        marks: list[Mark] = []
        if report is not None and self._is_of_member(report):
            marks += _told(report)
        if received is not None and _is_of(received.stall, round, member):
            stopped = any(group.doing is Doing.STOPPED for group in received.groups)
            marks += [Mark.STILL, Mark.STOPPED] if stopped else [Mark.STILL]
        if known is None:
            return [*marks, Mark.MISSING]
        node = known.node
        if node.incarnation != member.incarnation:
            return [*marks, Mark.MISSING, Mark.REPLACED]
        if node.released < round.number:
            marks.append(Mark.HOLDING)
        else:
            marks.append(Mark.LEFT)
            if node.declined == round.number:
                marks.append(Mark.DECLINED)
            if node.told and node.told > _ends(node, report):
                marks.append(Mark.TO_REPORT)
            if round.anew and node.holders:
                marks.append(Mark.HOLDING)
            if node.age is not None and node.age.agreed == round.number:
                marks.append(Mark.OUTLIVING)
                if node.sharded and node.fenced < round.number and _has_all_parts(node, member):
                    marks.append(Mark.PARTED)
        if node.draining or (spec.drain and seating.is_drained(node, spec)):
            marks.append(Mark.LEAVING)
        if node.fenced >= round.number:
            marks.append(Mark.FENCED)
        return marks

    def _standing(self, known: Registered) -> Standing:
        assert self.round is not None
        if known.node.draining:
            return Standing.DRAINING
        member = self.round.member(known.node.name, known.node.incarnation)
        runs = self.round.phase in _RUNS
        return Standing.MEMBER if runs and member is not None else Standing.WAITING

    def _is_of_member(self, report: Report) -> bool:
        assert self.round is not None
        if report.round != self.round.number:
            return False
        return self.round.member(report.node, report.incarnation) is not None

    @property
    def _is_live(self) -> bool:
        return self.round is not None and self.round.phase is Phase.LIVE

    def _candidate(self, known: Registered | None) -> Node | None:
        if known is None or self.spec is None or self.round is None:
            return None
        return seating.candidate(known.node, self.spec, self.round, live=self._is_live)

    def _rooms(self, known: Registered | None) -> tuple[int, int]:
        """Return how many workers of the node can be in the next world, and how many more once the node has
        released the round."""
        if known is None or self.spec is None or self.round is None:
            return 0, 0
        free = _room(seating.candidate(known.node, self.spec, self.round), self.spec)
        if known.node.name not in self.round.by_node:
            return free, 0
        return free, _room(seating.candidate(known.node, self.spec, self.round, live=True), self.spec) - free


_FAILURE_OF: Final[Mapping[Mark, Callable[[Report], Failure | None]]] = {
    Mark.FAILED: attrgetter("failure"),
    Mark.FATAL: attrgetter("fatal"),
    Mark.RAISED: attrgetter("raised"),
}
_RUNS: Final = (Phase.LIVE, Phase.CLOSING)
_Known = tuple[Registered | None, Report | None, ReceivedStall | None]


def _basis(spec: Spec, round: Round) -> tuple[object, ...]:
    """Return what the marks, standings and places of all nodes depend on, besides the members."""
    limits, runs = spec.limits, round.phase in _RUNS
    return spec.inplace, limits.unit, limits.within, round.number, round.anew, runs


def _differences(before: Roll, after: Roll) -> Iterator[tuple[str, _Known, _Known]]:
    """Yield the nodes that are not the same in the two rolls, as each of them has it."""
    assert before.spec is not None
    assert after.spec is not None
    names = chain(
        after.nodes.differing(before.nodes),
        after.reports.differing(before.reports),
        after.stalls.differing(before.stalls),
        [d.node for d in after.spec.drained ^ before.spec.drained],
    )
    for name in dict.fromkeys(names):
        was = before.nodes.get(name), before.reports.get(name), before.stalls.get(name)
        yield name, was, (after.nodes.get(name), after.reports.get(name), after.stalls.get(name))


def _others(roll: Roll, ordinary: Mapping[str, Registered]) -> Iterator[tuple[str, _Known, _Known]]:
    """Yield the nodes and members but the ordinary ones, as the roll has them, and as an empty one has it."""
    assert roll.round is not None
    nodes, reports, stalls = roll.nodes.to_dict(), roll.reports.to_dict(), roll.stalls.to_dict()
    for name in [name for name in {**roll.round.by_node, **nodes} if name not in ordinary]:
        yield name, (None, None, None), (nodes.get(name), reports.get(name), stalls.get(name))


def _room(
    node: Node | None, spec: Spec | None, quarantines: Sequence[Quarantine] = (), now: float = 0.0
) -> int:
    if node is None or spec is None:
        return 0
    return seating.room(node, spec.limits, quarantines, now)


def _is_of(stall: Stall, round: Round, member: Member) -> bool:
    return stall.round == round.number and stall.incarnation == member.incarnation


def in_rank_order(members: Iterable[Member]) -> tuple[str, ...]:
    return tuple(m.node for m in sorted(members, key=lambda m: m.base_rank))


def _told(report: Report) -> list[Mark]:
    told = {
        Mark.FINISHED: report.finished,
        Mark.RETURNED: report.returned,
        Mark.CHECKPOINTED: report.checkpointed,
        Mark.BROKEN: report.broken,
    }
    if report.exits:  # the report then knows its first failures, and need not look when all have reported
        told |= {
            Mark.FAILED: report.failure is not None,
            Mark.FATAL: report.fatal is not None,
            Mark.RAISED: report.raised is not None,
            Mark.ASTRAY: report.astray is not None,
        }
    return [mark for mark, holds in told.items() if holds]


def _has_all_parts(node: Node, member: Member) -> bool:
    return node.holders == member.slots or set(node.holders) >= set(member.slots)


def _ends(node: Node, report: Report | None) -> int:
    """Return ``Report.ends`` of the round that the node has released."""
    of_that = report is not None and (report.incarnation, report.round) == (node.incarnation, node.released)
    return report.ends if report is not None and of_that else 0
