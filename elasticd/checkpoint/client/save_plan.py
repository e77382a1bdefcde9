"""Plan a save: which rank writes which part of the state, each part once. Rank 0 gives each rank its
share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import chain
from typing import Final

import msgspec

from elasticd.checkpoint.format.layout import (
    Box,
    Holding,
    RankShare,
    StateForm,
    TensorForm,
    TensorPart,
    bounded,
)

_RANKS_NAMED: Final = 8
_LOOKED_AT: Final = 8  # holdings; the sizes of a few tell about those of all
WHOLE_BELOW: Final = 256 * 1024  # bytes; smaller tensors are not cut, since cutting them gains nothing
# A world of more ranks than ``WRITERS`` has further writers only if each of them has ``SHARE_MIN`` bytes:
# each rank may read the files of all writers. The other ranks write no file.
WRITERS: Final = 64
SHARE_MIN: Final = 16 << 20


class RankContent(msgspec.Struct, frozen=True, gc=False):
    """The content of a rank's state. Ranks that have a part alike should have one object of the part, since
    what is one object is looked at once."""

    form: StateForm
    holding: Holding

    def size(self, number: int) -> int:
        """Return the bytes that the rank has of the tensor with the number."""
        box = self.holding.boxes[number]
        return self.form.tensors[number].part(box).size if box is not None else 0


_Kind = tuple[RankContent, list[int]]  # what some ranks have, and these ranks


def share_out(held: Sequence[RankContent]) -> list[RankShare]:
    """Return the shares by rank. Raises ValueError, with the entry and the ranks, if an entry differs between
    ranks. ``held``: by rank."""
    kinds = _alike(held)
    _require_alike(kinds)
    rooms: dict[int, list[tuple[str, int]]] = {}
    seen: set[str] = set()
    for its, ranks in kinds:
        for key, (room, _) in its.holding.objects.items():
            if key not in seen:  # objects of one name are the same, and the first rank writes them
                seen.add(key)
                rooms.setdefault(ranks[0], []).append((key, room))
    own, dealt = _dealt(kinds)
    return [
        RankShare(own[rank], tuple(parts), tuple(rooms.get(rank, ()))) for rank, parts in enumerate(dealt)
    ]


def _alike(held: Sequence[RankContent]) -> list[_Kind]:
    """Return each content once, with its ranks, in the order of the first ranks."""
    found: dict[tuple[int, int], _Kind] = {}
    for rank, its in enumerate(held):
        found.setdefault((id(its.form), id(its.holding)), (its, []))[1].append(rank)
    return list(found.values())


_ByForm = list[tuple[StateForm, list[tuple[Holding, list[int]]]]]


def _by_form(kinds: Iterable[_Kind]) -> _ByForm:
    found: dict[int, tuple[StateForm, list[tuple[Holding, list[int]]]]] = {}
    for its, ranks in kinds:
        found.setdefault(id(its.form), (its.form, []))[1].append((its.holding, ranks))
    return list(found.values())


_Form = tuple[str, tuple[int, ...]]  # the type and the shape of a tensor


def _require_alike(kinds: Sequence[_Kind]) -> None:
    said: dict[str, dict[_Form | None, list[list[int]]]] = {}
    for form, its in _by_form(kinds):
        ranks = [*chain.from_iterable(ranks for _, ranks in its)]
        for tensor in form.tensors:
            said.setdefault(tensor.key, {}).setdefault((tensor.dtype, tensor.shape), []).append(ranks)
    for content, ranks in kinds:
        for key in content.holding.objects:
            said.setdefault(key, {}).setdefault(None, []).append(ranks)
    for key, by_form in said.items():
        if len(by_form) > 1:
            where = {_said(form): sorted(chain.from_iterable(ranks)) for form, ranks in by_form.items()}
            each = " and ".join(f"{form} on {_ranks(ranks)}" for form, ranks in where.items())
            raise ValueError(
                f"{key} cannot be saved, as it is {each}: make it alike on all ranks, or put the rank into "
                'its name, such as f"seen{rank}"'
            )


def _said(form: _Form | None) -> str:
    return f"{form[0]} {list(form[1])}" if form is not None else "no tensor"


def _ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:_RANKS_NAMED]))
    return f"rank{'s' * (len(ranks) > 1)} {some}{' and more' if len(ranks) > _RANKS_NAMED else ''}"


def _dealt(kinds: Sequence[_Kind]) -> tuple[list[tuple[int, ...]], list[list[TensorPart]]]:
    """Return, by rank, the tensors of which the rank writes all that it has (``RankShare.own``), and the
    parts of other tensors that it writes.

    Parts that all ranks hold (replicas) are laid end to end and cut between rows into equal pieces. Sharded
    tensors are dealt by ``_own``. Any other part goes to the one of its ranks with the fewest bytes so far.
    Buffers of modules may differ between ranks: the first rank that holds a buffer writes all of it.
    """
    world = sum(len(ranks) for _, ranks in kinds)
    buffers = {key for its, _ in kinds for key in its.form.buffers}
    dealt: list[list[TensorPart]] = [[] for _ in range(world)]
    load = [0] * world

    def give(part: TensorPart, rank: int) -> None:
        load[rank] += part.size
        dealt[rank] += bounded(part)

    sharded: list[_HeldTensor] = []
    everywhere: list[TensorPart] = []
    others: dict[tuple[int, ...], tuple[list[list[int]], list[TensorPart]]] = {}  # by the groups' first ranks
    for tensor in _held_tensors(kinds):
        if tensor.is_sharded and len(tensor.ranks[0]) < world and tensor.form.key not in buffers:
            sharded.append(tensor)
            continue
        for part, groups in tensor.parts():
            if part.key in buffers:
                give(part, groups[0][0])
            elif sum(map(len, groups)) == world:
                everywhere.append(part)
            else:
                others.setdefault(tuple(ranks[0] for ranks in groups), (groups, []))[1].append(part)
    begun = load[0] if world > 1 else 0
    own = _own(kinds, sharded, world)
    if others:
        for content, ranks in kinds:
            for rank in ranks:
                load[rank] += sum(content.size(number) for number in own[rank])
    for groups, parts in others.values():
        ranks = [*chain.from_iterable(groups)]
        chosen = writers(ranks, world, sum(part.size for part in parts))
        heap = [(load[rank], rank) for rank in chosen]
        heapify(heap)
        for part in parts:
            rank = heap[0][1]
            give(part, rank)
            heapreplace(heap, (load[rank], rank))
    for rank, part in _sliced(everywhere, world, begun):
        dealt[rank] += bounded(part)
    return own, dealt


def _own(kinds: Sequence[_Kind], sharded: Sequence[_HeldTensor], world: int) -> list[tuple[int, ...]]:
    """Return, by rank, the sharded tensors of which the rank writes all that it has.

    Ranks with equal holdings share the work: each writes some of the tensors. The holdings of as many ranks
    have about equal sizes, so that one division serves all.
    """
    own: list[tuple[int, ...]] = [()] * world
    for form, its in _by_form(kinds):
        numbers = [tensor.numbers[id(form)] for tensor in sharded if id(form) in tensor.numbers]
        alike: dict[int, list[tuple[Holding, list[int]]]] = {}  # by the number of ranks
        for holding, ranks in its:
            alike.setdefault(len(ranks), []).append((holding, ranks))
        for count, some in alike.items():
            looked = [RankContent(form, holding) for holding, _ in some[:_LOOKED_AT]]
            sizes = {number: max(its.size(number) for its in looked) for number in numbers}
            heap = [(0, place) for place in writers(range(count), world, sum(sizes.values()))]
            dealt: dict[int, list[int]] = {place: [] for _, place in heap}
            for number, size in sizes.items():
                load, place = heap[0]
                heapreplace(heap, (load + size, place))
                dealt[place].append(number)
            for place, theirs in dealt.items():
                share = tuple(theirs)
                for _, ranks in some:
                    own[ranks[place]] = share
    return own


@dataclass(slots=True)
class _HeldTensor:
    """A tensor, and which ranks hold which of its parts.

    ``numbers``: the number of the tensor in each form, by the form's id. ``boxes``: the parts; a part may be
    there several times. ``ranks``: for each of these, ranks with equal holdings that hold the part.
    """

    form: TensorForm
    numbers: dict[int, int] = field(default_factory=dict)
    boxes: list[Box] = field(default_factory=list)
    ranks: list[list[int]] = field(default_factory=list)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks that hold the same part have all else alike, too."""
        return len(set(self.boxes)) == len(self.boxes) > 0

    def parts(self) -> list[tuple[TensorPart, list[list[int]]]]:
        """Return each part once, with the ranks that hold the part, by what they have alike."""
        found: dict[Box, list[list[int]]] = {}
        for box, ranks in zip(self.boxes, self.ranks, strict=True):
            found.setdefault(box, []).append(ranks)
        return [(self.form.part(box), groups) for box, groups in found.items()]


def _held_tensors(kinds: Sequence[_Kind]) -> Iterable[_HeldTensor]:
    found: dict[str, _HeldTensor] = {}
    for form, its in _by_form(kinds):
        for number, tensor in enumerate(form.tensors):
            held = found.setdefault(tensor.key, _HeldTensor(tensor))
            held.numbers[id(form)] = number
            for holding, ranks in its:
                if (box := holding.boxes[number]) is not None:
                    held.boxes.append(box)
                    held.ranks.append(ranks)
    return found.values()


def writers(ranks: Sequence[int], world: int, size: int) -> Sequence[int]:
    """Return those of the ranks that write ``size`` bytes which all of them hold, spread over the ranks."""
    count = min(len(ranks), max(size // SHARE_MIN, WRITERS * len(ranks) // world, 1))
    return [ranks[n * len(ranks) // count] for n in range(count)]


def _sliced(parts: Sequence[TensorPart], world: int, begun: int) -> Iterator[tuple[int, TensorPart]]:
    """Yield the pieces of the replicated parts with their ranks. ``begun``: bytes that rank 0 already
    writes."""
    total = begun + sum(part.size for part in parts)
    chosen = writers(range(world), world, total)
    at = begun  # the number of bytes before this part
    for part in parts:
        for number, piece in _cut(part, at, total, len(chosen)):
            yield chosen[number], piece
        at += part.size


def _cut(part: TensorPart, at: int, total: int, count: int) -> Iterator[tuple[int, TensorPart]]:
    """Yield the pieces of the part with the numbers of their writers. ``at``: how many of the ``total`` bytes
    are before the part. ``count``: of writers."""
    size = part.size
    if size < WHOLE_BELOW or not part.sizes or part.sizes[0] == 1:
        yield min(count - 1, (2 * at + size) * count // (2 * total) if total else 0), part
        return
    rows, row = part.sizes[0], size // part.sizes[0]
    first, number = 0, max(0, at * count // total - 1)  # the writers before have their share
    while first < rows:
        end = total * (number + 1) // count
        until = rows if number == count - 1 else min(rows, max(first, round((end - at) / row)))
        if until > first:
            yield number, part.rows(first, until - first)
            first = until
        number += 1
