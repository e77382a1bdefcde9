"""Decide the next action of a node of a rendezvous, from the facts in etcd.

Every node applies the same rules to its own view. Etcd settles conflicts: a round is written only if the last
round is unchanged and the writer's lease lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elasticd.torchrun.rendezvous_records import NodeRecord, RendezvousRound, Seat


@dataclass(frozen=True, slots=True)
class Seen:
    """A node whose lease lives. ``created``: the revision when its key was created. ``since``: when its
    present record was first seen here, in seconds of the caller's clock."""

    record: NodeRecord
    created: int
    since: float


@dataclass(frozen=True, slots=True)
class RendezvousView:
    """One node's view: the last round, if there is one, and the live nodes."""

    round: RendezvousRound | None
    nodes: Mapping[str, Seen]


@dataclass(frozen=True, slots=True)
class Rules:
    """When a round may form. ``min_nodes``, ``max_nodes``: the bounds of a world, inclusive. ``settle_s``:
    how long new nodes wait for more before a round below the maximum forms. ``last_call_s``: if given, every
    round below the maximum waits this long once there are enough nodes, as in torch's own rendezvous."""

    min_nodes: int
    max_nodes: int
    settle_s: float
    last_call_s: float | None = None


@dataclass(frozen=True, slots=True)
class Register:
    """Write this node's key, which is missing."""


@dataclass(frozen=True, slots=True)
class EnterRound:
    """Enter a new round, of which this node is a member."""

    round: RendezvousRound
    rank: int


@dataclass(frozen=True, slots=True)
class Form:
    """Write this round, if the last round is unchanged."""

    round: RendezvousRound


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a change, or until ``until`` (seconds of the caller's clock). ``redundant``: the world is full
    without this node, so the wait does not count against the join timeout."""

    why: str
    until: float | None = None
    redundant: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """The rendezvous is closed."""

    round: RendezvousRound


@dataclass(frozen=True, slots=True)
class Unreachable:
    """This node and an older node cannot both be reached by the others: one of them has a loopback
    address."""

    node: str
    address: str


Verdict = Register | EnterRound | Form | Wait | Rejected | Unreachable


def decide(me: str, address: str, view: RendezvousView, rules: Rules, now: float) -> Verdict:
    """Return the next action of ``me``, a node at ``address`` that wants to join a round."""
    last = view.round
    if last is not None and last.closed is not None and (not last.closed.failed or living(view)):
        # After a failed attempt, nodes are rejected until all nodes of the attempt have left.
        return Rejected(last)
    mine = view.nodes.get(me)
    for node, seen in view.nodes.items():
        older = mine is None or seen.created < mine.created
        if older and is_loopback(seen.record.address) != is_loopback(address):
            return Unreachable(node, seen.record.address)
    if mine is None:
        return Register()
    if last is not None and last.closed is None and last.number > mine.record.after:
        rank = last.rank_of(me)
        if rank is not None:
            return EnterRound(last, rank)

    alive = living(view)
    busy = [node for node in alive if not is_waiting(node, view)]
    if busy:
        full = last is not None and len(alive) >= rules.max_nodes and last.rank_of(me) is None
        return Wait(
            f"for {_names(busy)} to leave round {last.number if last else 0}",
            redundant=full,
        )

    newcomers = sorted((n for n in view.nodes if n not in alive), key=lambda n: view.nodes[n].created)
    chosen = (alive + newcomers)[: rules.max_nodes]
    if len(chosen) < rules.min_nodes:
        return Wait(f"for {rules.min_nodes} nodes; there are {len(chosen)}: {_names(chosen)}")
    until = _patience_ends(chosen, newcomers, view, rules)
    if until > now:
        return Wait("for more nodes", until)
    leader = min(view.nodes, key=lambda n: view.nodes[n].created)
    if leader != me:
        return Wait(f"for {leader} to form the round", redundant=me not in chosen)
    seats = tuple(Seat(n, view.nodes[n].record.address, view.nodes[n].record.port) for n in chosen)
    return Form(RendezvousRound((last.number if last else 0) + 1, seats))


def changes_pending(me: str, entered: int, view: RendezvousView, rules: Rules) -> int:
    """Return the number of changes of membership that make the world of round ``entered``
    outdated. With 0, the node trains on.

    Counted are lost members, members and new nodes that wait for the next round, and this node itself if the
    others may have continued without it.
    """
    last = view.round
    if last is None:
        return 1  # the round's record was deleted, so another world may be live
    if last.closed is not None:
        # Finished: nodes that still train may finish. Failed: no node can go on.
        return 1 if last.closed.failed else 0
    if me not in view.nodes or last.number != entered:
        return 1
    alive = living(view)
    lost = len(last.seats) - len(alive)
    returning = sum(is_waiting(node, view) for node in alive)
    room = max(rules.max_nodes - len(alive), 0)
    return lost + returning + min(len(view.nodes) - len(alive), room)


def lost_members(round_: RendezvousRound, view: RendezvousView) -> list[str]:
    """Return the members of ``round_`` that will never arrive: their lease has expired, or they already wait
    for another round."""
    return [
        seat.node
        for seat in round_.seats
        if seat.node not in view.nodes or view.nodes[seat.node].record.after >= round_.number
    ]


def living(view: RendezvousView) -> list[str]:
    """Return the live members of the last round, in the order of their ranks."""
    return [seat.node for seat in view.round.seats if seat.node in view.nodes] if view.round else []


def is_waiting(node: str, view: RendezvousView) -> bool:
    """Whether a live node waits for a round after the last one."""
    return view.round is None or (
        view.round.rank_of(node) is None or view.nodes[node].record.after >= view.round.number
    )


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def _patience_ends(chosen: list[str], newcomers: list[str], view: RendezvousView, rules: Rules) -> float:
    """Return the time to form the round. Survivors of the last round wait for nobody; new nodes wait for
    more new nodes."""
    if len(chosen) >= rules.max_nodes:
        return float("-inf")
    if rules.last_call_s is not None:
        enough_since = sorted(view.nodes[n].since for n in chosen)[rules.min_nodes - 1]
        return enough_since + rules.last_call_s
    return max((view.nodes[n].since + rules.settle_s for n in newcomers), default=float("-inf"))


def _names(nodes: list[str]) -> str:
    return ", ".join(nodes[:5]) + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")
