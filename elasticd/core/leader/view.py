"""The leader's view of the job, and how news from the store changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elasticd.core.facts import Budget, Hang, Node, Paces, Report, Round, Spec, Stall, Stragglers
from elasticd.core.leader import comparing
from elasticd.core.leader.comparing import PaceComparison
from elasticd.core.ports import Changes, Entry, Listing, Seen, Unchanged

FINDINGS = ("hang", "stragglers")  # keys that the leader writes besides the round


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
    """An agent's report of workers that stand still, and when the leader received it."""

    stall: Stall
    at: float


@dataclass(frozen=True, slots=True)
class View:
    """All that the leader knows.

    ``revisions``: of ``spec``, ``round``, ``budget``, ``hang`` and ``stragglers``, as far as they have been
    listed. ``absence_counts_from``: before this time a node that is not registered may only be late, since
    etcd was away and leases ran out. ``hang``, ``stragglers``: what this or an earlier leader last wrote.
    ``hang_at``: when ``hang`` was seen.
    """

    spec: Spec | None = None
    round: Round | None = None
    budget: Budget = field(default_factory=Budget)
    revisions: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[str, Registered] | None = None
    reports: Mapping[str, Report] | None = None
    absence_counts_from: float = 0.0
    stragglers: Stragglers | None = None
    comparison: PaceComparison = field(default_factory=PaceComparison)
    stalls: Mapping[str, ReceivedStall] = field(default_factory=dict)
    hang: Hang | None = None
    hang_at: float = 0.0

    @property
    def complete(self) -> bool:
        return (
            self.spec is not None
            and {"round", "budget"} <= self.revisions.keys()
            and self.nodes is not None
            and self.reports is not None
        )

    def unchanged(self, key: str) -> Unchanged:
        """Return the guard that the key has not changed since the leader saw it."""
        return Unchanged(key, self.revisions[key])

    def at_revision(self, key: str, revision: int, **facts: object) -> View:
        """Return the view with a newer revision of the key, and with the fields in ``facts``."""
        return replace(self, revisions={**self.revisions, key: revision}, **facts)  # type: ignore[arg-type]


def see(view: View, seen: Seen, scope: str, now: float) -> View:
    """Return the view after news of ``scope``: a key, or a prefix that ends in a slash."""
    if isinstance(seen, Listing):
        listed = {e.key for e in seen.entries}
        gone = [Entry(key, None, seen.revision, 0) for key in _known(view, scope) if key not in listed]
        return _mark_listed(_apply(view, (*gone, *seen.entries), now), scope, seen.revision)
    if isinstance(seen, Changes):
        return _apply(view, seen.entries, now)
    raise AssertionError(f"not news of the store: {seen!r}")


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
        case "paces/":
            return [f"paces/{name}" for name in view.comparison.paces]
    raise AssertionError(f"the leader does not watch {scope!r}")


def _mark_listed(view: View, scope: str, revision: int) -> View:
    if scope == "nodes/" and view.nodes is None:
        return replace(view, nodes={})
    if scope == "reports/" and view.reports is None:
        return replace(view, reports={})
    if scope in FINDINGS:
        return view.at_revision(scope, max(view.revisions.get(scope, 0), revision))
    return view


def _apply(view: View, entries: tuple[Entry, ...], now: float) -> View:
    kinds = {e.key.partition("/")[0] for e in entries}  # only the maps that change are copied
    nodes = dict(view.nodes) if view.nodes is not None and "nodes" in kinds else None
    reports = dict(view.reports) if view.reports is not None and "reports" in kinds else None
    stalls = dict(view.stalls) if "stalls" in kinds else None
    for e in entries:
        revision = e.revision if e.fact is not None else 0
        kind, _, name = e.key.partition("/")
        match kind, e.fact:
            case "spec", (Spec() | None) as fact:
                view = view.at_revision("spec", revision, spec=fact)
            case "round", (Round() | None) as fact:
                view = view.at_revision("round", revision, round=fact)
            case "budget", (Budget() | None) as fact:
                view = view.at_revision("budget", revision, budget=fact or Budget())
            case "nodes", Node() as node:
                nodes = {} if nodes is None else nodes
                old = nodes.get(name)
                same = old is not None and old.node.incarnation == node.incarnation
                nodes[name] = Registered(node, e.created, old.seen_at if same and old else now, now)
            case "nodes", None:
                if nodes is not None:
                    nodes.pop(name, None)
            case "reports", Report() as report:
                reports = {} if reports is None else reports
                reports[name] = report
            case "reports", None:
                if reports is not None:
                    reports.pop(name, None)
            case "stalls", Stall() as stall if stalls is not None:
                known = stalls.get(name)
                if known is None or known.stall != stall:
                    stalls[name] = ReceivedStall(stall, now)
            case "stalls", None if stalls is not None:
                stalls.pop(name, None)
            case _:
                view = _apply_finding(view, e, name, now)
    if nodes is not None:
        view = replace(view, nodes=nodes)
    if reports is not None:
        view = replace(view, reports=reports)
    if stalls is not None:
        view = replace(view, stalls=stalls)
    if view.spec is None:
        return view
    return replace(view, comparison=comparing.follow(view.comparison, view.round, view.spec.policy))


def _apply_finding(view: View, e: Entry, name: str, now: float) -> View:
    """Return the view after news of the keys ``hang`` and ``stragglers``, or of a node's paces.

    The leader knows its own writes before the watch reports them, so an older verdict may arrive after a
    newer one.
    """
    match e.key.partition("/")[0], e.fact:
        case "hang", (Hang() | None) as hang:
            if e.revision > view.revisions.get("hang", -1):
                return view.at_revision("hang", e.revision, hang=hang, hang_at=now)
        case "stragglers", (Stragglers() | None) as stragglers:
            if e.revision > view.revisions.get("stragglers", -1):
                return view.at_revision("stragglers", e.revision, stragglers=stragglers)
        case "paces", (Paces() | None) as paces:
            heard = comparing.hear(view.comparison, name, paces, view.round)
            return replace(view, comparison=heard)
    return view
