"""The leader's view of the job, and how news from the store changes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter, is_
from typing import Final

from elasticd.core import seating
from elasticd.core.facts import (
    Budget,
    Hang,
    Members,
    Node,
    Paces,
    Phase,
    Report,
    Round,
    Spec,
    Stall,
    Stragglers,
)
from elasticd.core.hang.judging import in_groups
from elasticd.core.leader import comparing
from elasticd.core.leader.comparing import PaceComparison
from elasticd.core.leader.roll import Mark, ReceivedStall, Registered, Roll
from elasticd.core.persistent_map import PersistentMap
from elasticd.core.ports import Changes, Entry, Listing, Put, Seen, Unchanged, Write, entry_of
from elasticd.core.round_parts import PART_SIZES, PartSizes

NOT_LISTED: Final[PersistentMap[Registered]] = PersistentMap()
FINDINGS = ("hang", "stragglers")  # keys that the leader writes besides the round


def _are_the_same(facts: tuple[object, ...], others: tuple[object, ...]) -> bool:
    return len(facts) == len(others) and all(map(is_, facts, others))


@dataclass(frozen=True, slots=True)
class Judged:
    """A judgement that found no hang. It holds while the facts ``of`` stay the same, until ``until`` at the
    latest (None: without limit)."""

    of: tuple[object, ...] = ()
    until: float | None = None

    def holds(self, of: tuple[object, ...], now: float) -> bool:
        return _are_the_same(of, self.of) and (self.until is None or now < self.until)


NOT_JUDGED: Final = Judged()


@dataclass(frozen=True, slots=True)
class Seated:
    """The members of the next round of a large job. A decision of its own has found them, so that other news
    need not wait for both the search and the write. They hold while the facts ``of`` stay the same."""

    of: tuple[object, ...] = ()
    members: Members = field(default_factory=Members)

    def hold(self, of: tuple[object, ...]) -> bool:
        return _are_the_same(of, self.of)


NOT_SEATED: Final = Seated()


@dataclass(frozen=True, slots=True)
class View:
    """All that the leader knows.

    ``revisions``: of ``spec``, ``round``, ``budget``, ``hang`` and ``stragglers``, as far as they have been
    listed. ``absence_counts_from``: before this time a node that is not registered may only be late, since
    etcd was away and leases ran out. ``hang``, ``stragglers``: what this or an earlier leader last wrote.
    ``hang_at``: when ``hang`` was seen. ``judged``: the last judgement that found no hang. ``seated``:
    members of the next round that the last decision found. ``part_sizes``: how this leader stores rounds.
    ``roll``: of the spec, the round, the nodes, the reports and the stalls; ``up_to_date`` brings it up to
    date.
    """

    spec: Spec | None = None
    round: Round | None = None
    budget: Budget = field(default_factory=Budget)
    revisions: Mapping[str, int] = field(default_factory=dict)
    nodes: PersistentMap[Registered] | None = None
    reports: PersistentMap[Report] | None = None
    absence_counts_from: float = 0.0
    stragglers: Stragglers | None = None
    comparison: PaceComparison = field(default_factory=PaceComparison)
    stalls: PersistentMap[ReceivedStall] = field(default_factory=PersistentMap)
    hang: Hang | None = None
    hang_at: float = 0.0
    judged: Judged = NOT_JUDGED
    seated: Seated = NOT_SEATED
    part_sizes: PartSizes = PART_SIZES
    roll: Roll = field(default_factory=Roll, compare=False)

    @property
    def complete(self) -> bool:
        return (
            self.spec is not None
            and {"round", "budget"} <= self.revisions.keys()
            and self.nodes is not None
            and self.reports is not None
        )

    def up_to_date(self) -> View:
        """Bring ``roll`` up to date with the facts of the view. Without a round, or before all facts have
        come, return the view unchanged."""
        if not self.complete or self.round is None:
            return self
        assert self.spec is not None
        assert self.nodes is not None
        assert self.reports is not None
        roll = self.roll.follow(self.spec, self.round, self.nodes, self.reports, self.stalls)
        return self if roll is self.roll else replace(self, roll=roll)

    def next_world(self, budget: Budget, now: float) -> int:
        """Return the size of the largest world that could follow the round, with this budget."""
        assert self.spec is not None
        assert self.round is not None
        if not self.spec.inplace:  # no worker keeps a sharded state, for which there must be memory
            return self.roll.world_without(budget.quarantines, now)
        nodes = self.roll.candidates(live=self.round.phase is Phase.LIVE)
        return seating.form(nodes, self.round, self.spec.limits, budget.quarantines, now).workers

    def mark_of_lost(self, now: float) -> Mark:
        """Return the mark of the members that have been replaced, or have been absent for too long to be
        merely late."""
        return Mark.MISSING if now >= self.absence_counts_from else Mark.REPLACED

    def unchanged(self, key: str) -> Unchanged:
        """Return the guard that the key has not changed since the leader saw it."""
        return Unchanged(key, self.revisions[key])

    def at_revision(self, key: str, revision: int, **facts: object) -> View:
        """Return the view with a newer revision of the key, and with the fields in ``facts``."""
        return replace(self, revisions={**self.revisions, key: revision}, **facts)  # type: ignore[arg-type]


def see(view: View, seen: Seen, scope: str, now: float) -> View:
    """Return the view after news of ``scope``: a key, or a prefix that ends in a slash."""
    if isinstance(seen, Listing):
        listed = {*map(attrgetter("key"), seen.entries)}
        gone = [Entry(key, None, seen.revision, 0) for key in _known(view, scope) if key not in listed]
        return _mark_listed(_apply(view, (*gone, *seen.entries), now), scope, seen.revision).up_to_date()
    if isinstance(seen, Changes):
        return _apply(view, seen.entries, now).up_to_date()
    raise AssertionError(f"not news of the store: {seen!r}")


def foresee(view: View, writes: Iterable[Write], now: float) -> View | None:
    """Return the view after a registered agent's own writes, which are about to be made. None if the writes
    are not of the agent's record or its report."""
    asked = tuple(writes)
    entries = tuple(entries_of(view, asked, 0))
    return _apply(view, entries, now).up_to_date() if len(entries) == len(asked) else None


def entries_of(view: View, writes: Iterable[Write], revision: int) -> Iterator[Entry]:
    """Yield the entries that these writes leave in etcd, at this revision. Writes of other keys than a
    registered node's record and its report are skipped."""
    for write in writes:
        kind, _, name = write.key.partition("/")
        registered = view.nodes.get(name) if view.nodes is not None else None
        if registered is not None and kind in ("nodes", "reports") and isinstance(write, Put):
            yield entry_of(write, revision, registered.created)


def hear_paces(view: View, several: Iterable[Paces]) -> View:
    """Return the view after nodes have told their paces."""
    comparison = view.comparison
    if view.spec is not None:
        comparison = comparing.follow(comparison, view.round, view.spec.policy)
    for paces in several:
        comparison = comparing.hear(comparison, paces.node, paces, view.round)
    return view if comparison is view.comparison else replace(view, comparison=comparison)


def _known(view: View, scope: str) -> list[str]:
    match scope:
        case "spec" | "round" | "budget" | "stragglers" | "hang":
            return [scope]
        case "nodes/":
            return [f"nodes/{name}" for name in view.nodes or ()]
        case "reports/":
            return [f"reports/{name}" for name in view.reports or ()]
        case "stalls/":
            return [f"stalls/{name}" for name in view.stalls]
    raise AssertionError(f"the leader does not watch {scope!r}")


def _mark_listed(view: View, scope: str, revision: int) -> View:
    if scope == "nodes/" and view.nodes is None:
        return replace(view, nodes=PersistentMap())
    if scope == "reports/" and view.reports is None:
        return replace(view, reports=PersistentMap())
    if scope in FINDINGS:
        return view.at_revision(scope, max(view.revisions.get(scope, 0), revision))
    return view


def _revision_of(e: Entry) -> int:
    """Return the revision of the key; 0 if it does not exist."""
    return e.revision if e.fact is not None else 0


def _apply(view: View, entries: tuple[Entry, ...], now: float) -> View:
    nodes: dict[str, Registered | None] = {}
    reports: dict[str, Report | None] = {}
    stalls: dict[str, ReceivedStall | None] = {}
    there = view.nodes if view.nodes is not None else NOT_LISTED
    for e in entries:
        kind, _, name = e.key.partition("/")
        match kind, e.fact:
            case "nodes", (Node() | None) as node:
                before = nodes[name] if name in nodes else there.get(name) if there else None
                nodes[name] = _registered(node, before, e.created, now)
            case "reports", (Report() | None) as report:
                reports[name] = report
            case "stalls", (Stall() | None) as stall:
                known = stalls[name] if name in stalls else view.stalls.get(name)
                same = known is not None and known.stall == stall
                stalls[name] = known if same else _received(stall, now)
            case "spec", (Spec() | None) as fact:
                view = view.at_revision("spec", _revision_of(e), spec=fact)
            case "round", (Round() | None) as fact:
                view = view.at_revision("round", _revision_of(e), round=fact)
            case "budget", (Budget() | None) as fact:
                view = view.at_revision("budget", _revision_of(e), budget=fact or Budget())
            case _:
                view = _apply_finding(view, e, now)
    if nodes and (view.nodes is not None or any(nodes.values())):
        view = replace(view, nodes=(view.nodes or PersistentMap()).updated(nodes))
    if reports and (view.reports is not None or any(reports.values())):
        view = replace(view, reports=(view.reports or PersistentMap()).updated(reports))
    if stalls:
        view = replace(view, stalls=view.stalls.updated(stalls))
    for name in (name for name, node in nodes.items() if node is None and name in view.comparison.paces):
        view = replace(view, comparison=comparing.hear(view.comparison, name, None, view.round))
    if view.spec is None:
        return view
    comparison = comparing.follow(view.comparison, view.round, view.spec.policy)
    return view if comparison is view.comparison else replace(view, comparison=comparison)


def _received(stall: Stall | None, now: float) -> ReceivedStall | None:
    return ReceivedStall(stall, now, in_groups(stall.looks)) if stall is not None else None


def _registered(node: Node | None, before: Registered | None, created: int, now: float) -> Registered | None:
    if node is None:
        return None
    same = before is not None and before.node.incarnation == node.incarnation
    return Registered(node, created, before.seen_at if before is not None and same else now, now)


def _apply_finding(view: View, e: Entry, now: float) -> View:
    """Return the view after news of the keys ``hang`` and ``stragglers``.

    The leader knows its own writes before the watch reports them, so an older verdict may arrive after a
    newer one.
    """
    match e.key, e.fact:
        case "hang", (Hang() | None) as hang:
            if e.revision > view.revisions.get("hang", -1):
                return view.at_revision("hang", e.revision, hang=hang, hang_at=now)
        case "stragglers", (Stragglers() | None) as stragglers:
            if e.revision > view.revisions.get("stragglers", -1):
                return view.at_revision("stragglers", e.revision, stragglers=stragglers)
    return view
