"""The members of a large round, in records of their own.

All agents watch the round, and each change of the round reaches each of them. So the record of a large round
has no members, but their number and a digest. The members are in parts. A part has the members whose node's
name has the same hash, so an agent reads one part, once a round. The leader reads all parts.

A part's key has the round's number and the digest of all members. So a part never changes, and parts of
different plans for the same round cannot be mixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby
from operator import attrgetter
from typing import Final
from zlib import crc32

from elasticd.core.facts import Extent, Member, MemberPart, Round
from elasticd.core.ports import Put

FOLDER: Final = "members/"


@dataclass(frozen=True, slots=True)
class PartSizes:
    """How a round is stored. ``members``: the members of a part, on average; a round with no more of them
    has no parts. ``at_once``: the parts in one transaction. etcd takes 128 operations and 1.5 MiB."""

    members: int = 64
    at_once: int = 32


PART_SIZES: Final = PartSizes()


def record_of(round: Round, sizes: PartSizes) -> Round:
    """Return the record of a round whose members are all known."""
    whole = replace(round, extent=None)
    if len(round.members) <= sizes.members:
        return whole
    count, leaving = -(-len(round.members) // sizes.members), whole.leaving_workers
    if round.extent is not None:  # of these members, who were read from their parts
        extent = replace(round.extent, leaving=leaving, parts=count)
    else:
        extent = Extent(whole.world_size, whole.nodes, leaving, count, _digest(round.members))
    return replace(round, members=(), extent=extent)


def parts_of(round: Round, record: Round) -> tuple[Put, ...]:
    """Return the parts that belong to the record of the round. A small round has none."""
    if record.extent is None:
        return ()
    parts: list[list[Member]] = [[] for _ in range(record.extent.parts)]
    for member in round.members:
        parts[part_of(member.node, len(parts))].append(member)
    return tuple(Put(part_key(record, n), MemberPart(tuple(part))) for n, part in enumerate(parts))


def without_parts(round: Round, sizes: PartSizes) -> Round:
    """Return the record of a round whose parts are deleted. Only a small round keeps its members."""
    record = record_of(round, sizes)
    return record if record.extent is None else replace(record, extent=replace(record.extent, parts=0))


def has_parts(round: Round | None) -> bool:
    """Whether the round has parts."""
    return round is not None and round.extent is not None and round.extent.parts > 0


def part_of(node: str, parts: int) -> int:
    """Return the number of the part that has the node, if the node is a member."""
    return crc32(node.encode(errors="surrogatepass")) % parts


def folder_of(number: int) -> str:
    """Return the beginning of the keys of all parts of the rounds with this number."""
    return f"{FOLDER}{number:010}."


def part_key(round: Round, part: int | None) -> str:
    """Return the key of a part of the round; None: the beginning of the keys of all its parts."""
    assert round.extent is not None
    return f"{folder_of(round.number)}{round.extent.digest}.{'' if part is None else part}"


def join(round: Round, parts: Iterable[MemberPart]) -> Round:
    """Return the round with the members of these parts."""
    members = (member for part in parts for member in part.members)
    return replace(round, members=tuple(sorted(members, key=attrgetter("base_rank"))))


def whole(round: Round, facts: Mapping[str, object]) -> Round:
    """Return the round with all members that ``facts``, by key, have."""
    if round.extent is None:
        return round
    keys = part_key(round, None)
    return join(round, (f for key, f in facts.items() if key.startswith(keys) and isinstance(f, MemberPart)))


def fits(round: Round) -> bool:
    """Whether the round has as many members and workers as its extent says, with consecutive ranks."""
    assert round.extent is not None
    rank = 0
    for place, member in enumerate(round.members):
        if (member.base_rank, member.place) != (rank, place):
            return False
        rank += len(member.slots)
    return (rank, len(round.by_node)) == (round.extent.workers, round.extent.nodes)


def _digest(members: Sequence[Member]) -> str:
    """Return a digest of the members. Their ranks follow from their slots."""
    alike = groupby(members, attrgetter("slots"))  # most nodes have the same slots
    told = [f"{slots} {' '.join([f'{m.node} {m.incarnation}' for m in run])}" for slots, run in alike]
    return blake2b("\n".join(told).encode(errors="surrogatepass"), digest_size=8).hexdigest()
