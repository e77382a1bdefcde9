"""What a node of a rendezvous does next, from what etcd shows. Facts in, a verdict out.

Every node decides by the same rules on its own view; who may write is settled by etcd, since a
round is written only if the last one is unchanged and the writer's lease still lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elasticd.torchrun.records import NodeRecord, RendezvousRound, Seat


@dataclass(frozen=True, slots=True)
class Seen:
    """A node whose lease lives. ``created``: the revision it came at. ``since``: when its present
    record was first seen here, in seconds of the caller's clock."""

    record: NodeRecord
    created: int
    since: float


@dataclass(frozen=True, slots=True)
class RendezvousView:
    """What one node sees: the last round, if there was any, and the nodes alive."""

    round: RendezvousRound | None
    nodes: Mapping[str, Seen]


@dataclass(frozen=True, slots=True)
class Rules:
    """``min_nodes`` and ``max_nodes`` bound a world, both inclusive. ``settle_s``: how long newcomers
    are given company before a round forms below the maximum. ``last_call_s``: if given, every
    round below the maximum waits this long once there are enough nodes, as torch's own does."""

    min_nodes: int
    max_nodes: int
    settle_s: float
    last_call_s: float | None = None


@dataclass(frozen=True, slots=True)
class Register:
    """This node's key is gone or was never there: write it."""


@dataclass(frozen=True, slots=True)
class EnterRound:
    """This node is in a new round."""

    round: RendezvousRound
    rank: int


@dataclass(frozen=True, slots=True)
class Form:
    """Write this round, if the last one is still what it was."""

    round: RendezvousRound


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until something changes, or until ``until`` (seconds of the caller's clock).
    ``redundant``: the world is full without this node, so its patience is not used up."""

    why: str
    until: float | None = None
    redundant: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """The rendezvous is closed."""

    round: RendezvousRound


@dataclass(frozen=True, slots=True)
class Unreachable:
    """This node and an older one cannot both be reached by the others: one has an address that
    means something else on every machine."""

    node: str
    address: str


Verdict = Register | EnterRound | Form | Wait | Rejected | Unreachable


def decide(me: str, address: str, view: RendezvousView, rules: Rules, now: float) -> Verdict:
    """What ``me``, a node at ``address`` that wants to be in a round, does next."""
    last = view.round
    if last is not None and last.closed is not None and (not last.closed.failed or living(view)):
        return Rejected(last)  # a failed attempt is over once its nodes are gone; the next starts afresh
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
            f"for {_names(busy)} of round {last.number if last else 0} to come",
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
    """How many changes of membership make the world of round ``entered`` outdated; 0: train on.

    Counted are members lost, members and newcomers waiting for the next round, and this node
    itself if the others may have gone on without it.
    """
    last = view.round
    if last is None:
        return 1  # the whole record is gone, and with it the claim that this world is the live one
    if last.closed is not None:
        # Finished: whoever still trains may end in peace. Failed: nobody can go on.
        return 1 if last.closed.failed else 0
    if me not in view.nodes or last.number != entered:
        return 1
    alive = living(view)
    lost = len(last.seats) - len(alive)
    returning = sum(is_waiting(node, view) for node in alive)
    room = max(rules.max_nodes - len(alive), 0)
    return lost + returning + min(len(view.nodes) - len(alive), room)


def lost_members(round_: RendezvousRound, view: RendezvousView) -> list[str]:
    """Members of ``round_`` that will never arrive in it: gone, or already waiting for another."""
    return [
        seat.node
        for seat in round_.seats
        if seat.node not in view.nodes or view.nodes[seat.node].record.after >= round_.number
    ]


def living(view: RendezvousView) -> list[str]:
    """The members of the last round that still live, in the order of their ranks."""
    return [seat.node for seat in view.round.seats if seat.node in view.nodes] if view.round else []


def is_waiting(node: str, view: RendezvousView) -> bool:
    """Whether a living node has come for a round after the last one."""
    return view.round is None or (
        view.round.rank_of(node) is None or view.nodes[node].record.after >= view.round.number
    )


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def _patience_ends(chosen: list[str], newcomers: list[str], view: RendezvousView, rules: Rules) -> float:
    """Survivors of the last round wait for nobody; newcomers rarely come alone."""
    if len(chosen) >= rules.max_nodes:
        return float("-inf")
    if rules.last_call_s is not None:
        enough_since = sorted(view.nodes[n].since for n in chosen)[rules.min_nodes - 1]
        return enough_since + rules.last_call_s
    return max((view.nodes[n].since + rules.settle_s for n in newcomers), default=float("-inf"))


def _names(nodes: list[str]) -> str:
    return ", ".join(nodes[:5]) + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")
