"""How the parameters of a model are cut into parts, one for each rank. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import NamedTuple

import torch

from elasticd.worker.values.plaindata import number_of


class Span(NamedTuple):
    """A range of elements of a flattened parameter: from ``first`` up to, but not including, ``end``."""

    first: int
    end: int

    @property
    def size(self) -> int:
        return max(0, self.end - self.first)


Spans = tuple[Span, ...]  # one span of each parameter, in the parameters' order
_EMPTY = Span(0, 0)


class Cut(NamedTuple):
    """FSDP2 cuts the rows of each parameter into parts of equally many rows. The last parts may have fewer
    rows or none. ``parts``: how many parts. ``uncut``: the numbers, ascending, of the parameters that each
    rank has whole."""

    parts: int
    uncut: tuple[int, ...] = ()


class Part(NamedTuple):
    """One part of all parameters. ``copy``: kept by another rank, without the parameters that are not cut."""

    cut: Cut
    place: int
    copy: bool = False


WHOLE = Part(Cut(1), 0)
NOTHING = Part(Cut(0), 0)


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model's parameters: how many rows each has, and how many elements a row."""

    rows: tuple[int, ...]
    row: tuple[int, ...]

    @classmethod
    def of(cls, parameters: Iterable[torch.Tensor]) -> Shapes:
        sizes = [((p.shape[0] if p.dim() else 1), p.numel()) for p in parameters]
        return cls(
            tuple(rows for rows, _ in sizes), tuple(size // rows if rows else 0 for rows, size in sizes)
        )

    @cached_property
    def sizes(self) -> list[int]:
        """The number of elements of each parameter."""
        return [rows * row for rows, row in zip(self.rows, self.row, strict=True)]

    @cached_property
    def digest(self) -> int:
        """A number that models with other shapes do not have."""
        return number_of(blake2b(repr((self.rows, self.row)).encode(), digest_size=8))

    def rows_of_a_part(self, parameter: int, cut: Cut) -> int:
        return -(-self.rows[parameter] // cut.parts)

    def spans(self, part: Part) -> Spans:
        """Return the part's span of each parameter."""
        return _spans(self, part)

    def span(self, parameter: int, cut: Cut, place: int) -> Span:
        """Return the span of a parameter that is cut."""
        rows, row, each = self.rows[parameter], self.row[parameter], self.rows_of_a_part(parameter, cut)
        return Span(min(place * each, rows) * row, min((place + 1) * each, rows) * row)

    def parts_at(self, parameter: int, cut: Cut, span: Span) -> range:
        """Return the places of the parts that have elements of the span."""
        if not span.size:
            return range(0)
        each = self.rows_of_a_part(parameter, cut) * self.row[parameter]
        return range(span.first // each, (span.end - 1) // each + 1)

    def uncut(self, cut: Cut) -> Spans:
        """Return the whole of each parameter that is not cut, and nothing of the others."""
        uncut = {*cut.uncut}
        return tuple(Span(0, size) if n in uncut else _EMPTY for n, size in enumerate(self.sizes))

    def parts_with_elements(self, cut: Cut) -> int:
        """Return how many parts have elements of parameters that are cut. These parts are the first ones."""
        uncut = {*cut.uncut}
        return max(
            (
                len(self.parts_at(n, cut, Span(0, size)))
                for n, size in enumerate(self.sizes)
                if n not in uncut and cut.parts
            ),
            default=0,
        )


@lru_cache(64)
def _spans(shapes: Shapes, part: Part) -> Spans:
    if not part.cut.parts:
        return (_EMPTY,) * len(shapes.sizes)
    uncut = {*part.cut.uncut}
    of_uncut = [_EMPTY if part.copy else Span(0, size) for size in shapes.sizes]
    return tuple(
        of_uncut[n] if n in uncut else shapes.span(n, part.cut, part.place) for n in range(len(of_uncut))
    )


def parts_of_ranks(cut: Cut, ranks: int) -> list[Part]:
    """Return the part of each rank. With hybrid sharding there are fewer parts than ranks."""
    parts = [Part(cut, place) for place in range(cut.parts)]
    return [parts[rank % cut.parts] for rank in range(ranks)]


def complete_cut(shapes: Shapes, parts: Iterable[Part]) -> Cut | None:
    """Return the cut of which all parts are there that have elements; None if there is none."""
    there: dict[Cut, set[int]] = {}
    with_uncut: set[Cut] = set()
    for part in parts:
        there.setdefault(part.cut, set()).add(part.place)
        if not part.copy:
            with_uncut.add(part.cut)
    for cut, places in there.items():
        if cut not in with_uncut and any(span.size for span in shapes.uncut(cut)):
            continue
        if cut.parts and places.issuperset(range(shapes.parts_with_elements(cut))):
            return cut
    return None


def missing(shapes: Shapes, parts: Sequence[Part]) -> int:
    """Return the number of elements of all parameters that are in none of the parts, which are of one cut, or
    ``NOTHING``."""
    parts = [part for part in parts if part.cut.parts]
    if not parts:
        return sum(shapes.sizes)
    cut, there = parts[0].cut, {part.place for part in parts}
    absent = [place for place in range(shapes.parts_with_elements(cut)) if place not in there]
    lost = sum(span.size for place in absent for span in shapes.spans(Part(cut, place, copy=True)))
    if all(part.copy for part in parts):
        lost += sum(span.size for span in shapes.uncut(cut))
    return lost
