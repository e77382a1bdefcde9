"""Whether the memory of nodes has room for the sharded state that a world is to hold.

Only what is known counts: the state, and the copies that workers keep of it in the memory of the host. What
else a worker needs is not known. So a world that has room here may still die of memory; without room, a world
always would.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from elasticd.core.facts import Limits, Members, Node
from elasticd.core.state_memory import StateMemory


class Shortage(NamedTuple):
    """A world of ``have`` workers has no room for its state. ``state``: the bytes that the workers would hold
    together. ``each``: the bytes for each worker, on the node that has the least. ``need``: how many workers
    with ``each`` bytes would hold the state; 0 if no number of workers would."""

    have: int
    need: int
    state: int
    each: int


def find(nodes: Sequence[Node], members: Members, limits: Limits) -> Shortage | None:
    """Return what the members lack to hold the job's state; None if they have room, or if that is not known.
    ``nodes``: the members' among them."""
    state, seats, have = _state_of(nodes), members.by_node, members.workers
    rooms = [
        node.memory // len(seats[node.name].slots) for node in nodes if node.memory and node.name in seats
    ]
    if state is None or not rooms or state.of_each(have) <= min(rooms):
        return None
    each = min(rooms)
    return Shortage(have, _need(state, each, have, limits), state.of_each(have) * have, each)


def with_room(nodes: Sequence[Node], members: Members) -> list[Node] | None:
    """Return the nodes, each with places for the workers that it has memory for in a world of the members'
    size; None if all members have room. A node whose memory is not known has room."""
    state = _state_of(nodes)
    if state is None:
        return None
    seats, of_each = members.slots_by_node, state.of_each(members.workers)
    most = of_each * max(map(len, seats.values()), default=0)
    scarce = [node for node in nodes if 0 < node.memory < most]
    if not any(node.memory < len(seats.get(node.name, ())) * of_each for node in scarce):
        return None
    if has_none_for_one_state(nodes):
        return []  # no world has room
    rooms = [(node, node.memory // of_each if node.memory and of_each else len(node.slots)) for node in nodes]
    return [
        node if places >= (node.most or len(node.slots)) else replace(node, most=places)
        for node, places in rooms
        if places
    ]


def has_none_for_one_state(nodes: Sequence[Node]) -> bool:
    """Whether the nodes together have less memory than one whole state takes. False if that is not known."""
    state = _state_of(nodes)
    known = state is not None and all(node.memory for node in nodes)
    least = state.own + state.replicated if state is not None else 0
    return known and sum(node.memory for node in nodes) < least


def _state_of(nodes: Iterable[Node]) -> StateMemory | None:
    """Return what the job's sharded state takes. Workers may know more after their first step, so the largest
    counts, and of equal ones that which knows what is replicated."""
    known = [*filter(None, map(attrgetter("state"), nodes))]
    different = dict(zip(map(id, known), known, strict=True))  # nodes that say the same share one object
    return max(
        different.values(), key=lambda its: (its.own + its.replicated, its.replicated, its), default=None
    )


def _need(state: StateMemory, each: int, have: int, limits: Limits) -> int:
    """Return the size of the smallest world that is larger than ``have`` and holds the state in ``each``
    bytes of each worker; 0 if there is none. ``limits.max`` may be smaller."""
    left = each - state.replicated
    if state.unit > 1 or left <= 0:
        return 0  # each unit holds the whole state, however many units there are
    least = max(have + 1, -(-(state.own + state.redundancy * state.copy) // left))
    least += -least % limits.unit
    return next((size for size in limits.sizes if size >= least), least)
