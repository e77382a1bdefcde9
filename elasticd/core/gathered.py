"""What the nodes have told the leader: the last telemetry of each node, and the sums that ``elasticd status``
and the end of the job need.

An agent tells cumulative values, and tells the values again to another leader. So after one period a new
leader knows all nodes that live. The summary in etcd has what no node will tell again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Final

from elasticd.core.facts import ForgottenNodes, NodeLedger, NodeTelemetry, Round, SlotTime, Summary
from elasticd.core.ledger import totals
from elasticd.core.persistent_map import PersistentMap

KEPT_MAX: Final = 64  # nodes in a summary
FORGOTTEN_MAX: Final = 3000  # nodes whose return a leader still notices: a value in etcd has 1.5 MB at most
TELL_S: Final = 1.0  # the least time between two messages of an agent
HEARD_PER_S: Final = 500  # nodes that the leader hears of in a second: a quarter of a processor
ENDED_PER_S: Final = 1000  # nodes that send their last telemetry in a second, at the end of a job
SUMMARY_BYTES_S: Final = 1024  # bytes a second that summaries add to etcd, which its raft log also keeps
SUMMARY_S: Final = 1.0  # the least time between two writes of the summary
PROBE_S: Final = 5.0  # the time between two writes by which the leader notices a full etcd
SLOT_BYTES: Final = 280  # the approximate size of a slot in a summary
FORGOTTEN_BYTES: Final = 200  # the approximate size of a node in ``ForgottenNodes``


@dataclass(frozen=True, slots=True)
class Gathered:
    """What the leader knows from the nodes' telemetry. ``run``: see ``NodeLedger``. ``spent``, ``gone``: see
    ``Summary``. ``restored``: whether the summary of earlier leaders is included. ``forgotten``: the ledgers
    of lost nodes whose time is part of ``gone``; such a node may come back. ``ended``: how many of ``nodes``
    have sent their last message."""

    run: int
    nodes: PersistentMap[NodeTelemetry] = field(default_factory=PersistentMap)
    spent: Mapping[str, float] = field(default_factory=lambda: totals(()))
    gone: Mapping[str, float] = field(default_factory=lambda: totals(()))
    restored: bool = False
    forgotten: PersistentMap[NodeLedger] = field(default_factory=PersistentMap)
    ended: int = 0

    @property
    def ledgers(self) -> tuple[NodeLedger, ...]:
        """The last ledgers of all nodes, by name."""
        nodes = self.nodes.to_dict()
        return tuple(told.ledger for _, told in sorted(nodes.items()) if told.ledger is not None)


def hear(known: Gathered, told: NodeTelemetry) -> Gathered:
    """Return ``known`` with the telemetry that a node has told."""
    known = _recalled(known, told.node)
    before = known.nodes.get(told.node)
    ledger = told.ledger if told.ledger is not None and told.ledger.run == known.run else None
    if before is not None:
        same = before.incarnation == told.incarnation
        told = replace(
            told,
            progress=told.progress or (before.progress if same else None),
            paces=told.paces or (before.paces if same else None),
            ledger=ledger or before.ledger,
        )
    elif ledger is not told.ledger:
        told = replace(told, ledger=ledger)
    spent = known.spent
    if ledger is not None:
        old = (before.ledger,) if before is not None and before.ledger is not None else ()
        spent = _changed(spent, old, (ledger,))
    ended = known.ended + told.last - (before is not None and before.last)
    return replace(known, nodes=known.nodes.updated({told.node: told}), spent=spent, ended=ended)


def restore(known: Gathered, kept: Summary | None, forgotten: ForgottenNodes | None = None) -> Gathered:
    """Return what is known after the summary of earlier leaders was read, and which nodes these leaders have
    forgotten (None: there is none). What nodes have told since is newer."""
    known = replace(known, restored=True)
    if kept is None or kept.run != known.run:
        return known
    spent = {kind: known.spent[kind] + kept.gone.get(kind, 0.0) for kind in known.spent}
    known = replace(known, spent=spent, gone={kind: kept.gone.get(kind, 0.0) for kind in known.gone})
    for told in kept.nodes:
        newer = known.nodes.get(told.node)
        if newer is None:
            known = hear(known, told)
        elif newer.ledger is None:
            known = hear(known, replace(newer, ledger=told.ledger))
    if forgotten is not None and forgotten.run == known.run:
        known = _with_forgotten(known, forgotten)
    return known


def to_keep(known: Gathered) -> ForgottenNodes:
    """Return what a successor needs to know of forgotten nodes."""
    spent = {
        name: {kind: round(seconds, 3) for kind, seconds in totals((ledger,)).items() if seconds}
        for name, ledger in known.forgotten.to_dict().items()
    }
    return ForgottenNodes(known.run, spent)


def kept_for(known: Gathered, node: str) -> NodeLedger | None:
    """Return the ledger that an earlier agent of the node has left."""
    before = _recalled(known, node).nodes.get(node)
    return before.ledger if before is not None else None


def summarize(
    known: Gathered, own: str, present: Collection[str] | None, now: float, *, final: bool = False
) -> tuple[Gathered, Summary]:
    """Return the summary to write, and what is known without the nodes that are lost and have no room in the
    summary. ``own``: the leader's node. ``present``: the nodes that are registered, if they are known."""
    there = known.nodes if present is None else present
    lost = [name for name in known.nodes if name not in there and name != own]
    first = chain([own], lost, (name for name in known.nodes if name in there and name != own))
    small = len(known.nodes) <= KEPT_MAX
    kept = [
        name for name in islice(first, None if small else min(1 + len(lost), KEPT_MAX)) if name in known.nodes
    ]
    known = _forget(known, set(lost).difference(kept))
    nodes = tuple(replace(known.nodes[name], paces=None) for name in kept)
    return known, Summary(known.run, now, _rounded(known.spent), _rounded(known.gone), nodes, final)


def is_whole(known: Gathered, ended: Round | None) -> bool:
    """Whether all members of the job's last round have told their last. Of a large round, not all names are
    known. ``ended``: None if the job goes on: nothing is awaited."""
    if ended is None:
        return True
    if known.ended < ended.nodes:
        return False  # asked after each node's last
    return all(name in known.nodes and known.nodes[name].last for name in ended.by_node)


def tell_every_s(nodes: int) -> float:
    """Return the seconds between two messages of one node to the leader, in a job of ``nodes`` nodes."""
    return max(TELL_S, nodes / HEARD_PER_S)


def end_within_s(nodes: int) -> float:
    """Return the seconds over which ``nodes`` nodes send their last telemetry at the end of a job; 0: all
    send at once. A leader cannot answer 10,000 nodes in two seconds."""
    return nodes / ENDED_PER_S if nodes > ENDED_PER_S else 0.0


def summarize_every_s(summary: Summary, forgotten: int = 0) -> float:
    """Return the seconds between ``summary`` and the next one. ``forgotten``: the number of nodes whose names
    were written with ``summary``."""
    slots = sum(len(told.ledger.slots) for told in summary.nodes if told.ledger is not None)
    return max(SUMMARY_S, (SLOT_BYTES * slots + FORGOTTEN_BYTES * forgotten) / SUMMARY_BYTES_S)


def _forget(known: Gathered, names: Iterable[str]) -> Gathered:
    names = list(names)
    if not names:
        return known
    ledgers = {name: ledger for name in names if (ledger := known.nodes[name].ledger) is not None}
    room = max(0, FORGOTTEN_MAX - len(known.forgotten))
    return replace(
        known,
        nodes=known.nodes.updated(dict.fromkeys(names)),
        gone=_changed(known.gone, (), ledgers.values()),
        forgotten=known.forgotten.updated(dict(islice(ledgers.items(), room))),
        ended=known.ended - sum(known.nodes[name].last for name in names),
    )


def _with_forgotten(known: Gathered, forgotten: ForgottenNodes) -> Gathered:
    """Return what is known with the nodes that earlier leaders have forgotten. Of such a node only the time
    of all slots together is known: the ledger made here gives that time to slot 0."""
    ledgers = {
        name: NodeLedger(name, 0.0, (SlotTime(0, spent),), known.run)
        for name, spent in forgotten.spent.items()
    }
    known = replace(known, forgotten=known.forgotten.updated(ledgers))
    for name in ledgers:
        back = known.nodes.get(name)
        if back is not None:  # the node is back, and its ledger may repeat time that ``gone`` has
            told = (back.ledger,) if back.ledger is not None else ()
            spent, ended = _changed(known.spent, told, ()), known.ended - back.last
            known = hear(replace(known, spent=spent, ended=ended), back)
    return known


def _recalled(known: Gathered, name: str) -> Gathered:
    """Return what is known if the node is back, perhaps after this leader forgot the node."""
    ledger = known.forgotten.get(name)
    if ledger is None:
        return known
    return replace(
        known,
        nodes=known.nodes.updated({name: NodeTelemetry(name, "", ledger=ledger)}),
        gone=_changed(known.gone, (ledger,), ()),
        forgotten=known.forgotten.updated({name: None}),
    )


def _changed(
    spent: Mapping[str, float], old: Iterable[NodeLedger], new: Iterable[NodeLedger]
) -> dict[str, float]:
    more, less = totals(new), totals(old)
    return {kind: spent[kind] + more[kind] - less[kind] for kind in spent}


def _rounded(spent: Mapping[str, float]) -> dict[str, float]:
    return {kind: round(max(0.0, seconds), 3) for kind, seconds in spent.items()}
