"""What the leader knows of the job, and how news of the store changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elasticd.core.facts import Budget, Node, Report, Round, Spec, Stragglers
from elasticd.core.ports import Changes, Entry, Listing, Seen


@dataclass(frozen=True, slots=True)
class Registered:
    """A node as the leader sees it. ``created``: revision of its registration; ``seen_at``: when
    this leader first saw this incarnation; ``news_at``: when the record as it is. Seconds since the epoch."""

    node: Node
    created: int
    seen_at: float
    news_at: float = 0.0


@dataclass(frozen=True, slots=True)
class View:
    """All the leader knows. A revision is None until its key has been listed, 0 if it is absent.

    ``absence_counts_from``: before this time a node that is not registered may only be late, since
    etcd was away and leases ran out that nobody could renew.
    """

    spec: Spec | None = None
    spec_revision: int | None = None
    round: Round | None = None
    round_revision: int | None = None
    budget: Budget = field(default_factory=Budget)
    budget_revision: int | None = None
    nodes: Mapping[str, Registered] | None = None
    reports: Mapping[str, Report] | None = None
    absence_counts_from: float = 0.0
    stragglers: Stragglers | None = None

    @property
    def complete(self) -> bool:
        return (
            self.spec is not None
            and self.round_revision is not None
            and self.budget_revision is not None
            and self.nodes is not None
            and self.reports is not None
        )


def see(view: View, seen: Seen, scope: str, now: float) -> View:
    """The view after news of ``scope``: a key, or a prefix that ends in a slash."""
    if isinstance(seen, Listing):
        listed = {e.key for e in seen.entries}
        gone = [Entry(key, None, 0, 0) for key in _known(view, scope) if key not in listed]
        return _mark_listed(_apply(view, (*gone, *seen.entries), now), scope)
    if isinstance(seen, Changes):
        return _apply(view, seen.entries, now)
    raise AssertionError(f"not news of the store: {seen!r}")


def _known(view: View, scope: str) -> list[str]:
    match scope:
        case "spec" | "round" | "budget" | "stragglers":
            return [scope]
        case "nodes/":
            return [f"nodes/{name}" for name in view.nodes or ()]
        case "reports/":
            return [f"reports/{name}" for name in view.reports or ()]
    raise AssertionError(f"the leader does not watch {scope!r}")


def _mark_listed(view: View, scope: str) -> View:
    if scope == "nodes/" and view.nodes is None:
        return replace(view, nodes={})
    if scope == "reports/" and view.reports is None:
        return replace(view, reports={})
    return view


def _apply(view: View, entries: tuple[Entry, ...], now: float) -> View:
    nodes = dict(view.nodes) if view.nodes is not None else None
    reports = dict(view.reports) if view.reports is not None else None
    for e in entries:
        revision = e.revision if e.fact is not None else 0
        kind, _, name = e.key.partition("/")
        match kind, e.fact:
            case "spec", (Spec() | None) as fact:
                view = replace(view, spec=fact, spec_revision=revision)
            case "round", (Round() | None) as fact:
                view = replace(view, round=fact, round_revision=revision)
            case "budget", (Budget() | None) as fact:
                view = replace(view, budget=fact or Budget(), budget_revision=revision)
            case "stragglers", (Stragglers() | None) as fact:
                view = replace(view, stragglers=fact)
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
            case _:
                pass  # a key of no interest to the leader
    return replace(view, nodes=nodes, reports=reports)
