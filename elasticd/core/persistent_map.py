"""A persistent map: a mapping that never changes. A changed copy shares most of its memory with the original.
The leader keeps one record per node, and gets news of one node at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, ValuesView
from itertools import chain
from typing import TypeVar, overload
from zlib import crc32

PARTS = 128  # with 10,000 keys, a part has about 80

V = TypeVar("V")
W = TypeVar("W")


class PersistentMap(Mapping[str, V]):
    """An immutable mapping. ``updated`` returns a changed copy, for which it copies the parts with the
    changed keys. The order of the keys depends only on the keys and on the order in which they were added."""

    __slots__ = ("_parts", "_size")
    _parts: tuple[Mapping[str, V], ...]
    _size: int

    def __init__(self, items: Mapping[str, V] | None = None) -> None:
        self._parts, self._size = ({},) * PARTS, 0
        if items:
            made = self.updated(items)
            self._parts, self._size = made._parts, made._size

    def __getitem__(self, key: str) -> V:
        return self._parts[_part(key)][key]

    @overload
    def get(self, key: str, /) -> V | None: ...
    @overload
    def get(self, key: str, /, default: V | W) -> V | W: ...
    def get(self, key: str, /, default: V | W | None = None) -> V | W | None:
        return self._parts[_part(key)].get(key, default)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._parts)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self._parts[_part(key)]

    def values(self) -> ValuesView[V]:
        return _Values(self)

    def parts(self) -> tuple[Mapping[str, V], ...]:
        """Return the plain mappings that together have all items."""
        return self._parts

    def updated(self, changes: Mapping[str, V | None]) -> PersistentMap[V]:
        """Return the map with the changes; None removes a key."""
        copies: dict[int, dict[str, V]] = {}
        for n, (key, value) in zip(map(_part, changes), changes.items(), strict=True):
            if n not in copies:
                copies[n] = dict(self._parts[n])
            if value is None:
                copies[n].pop(key, None)
            else:
                copies[n][key] = value
        if not copies:
            return self
        new: PersistentMap[V] = PersistentMap()
        parts = list(self._parts)
        for n, part in copies.items():
            parts[n] = part
        new._parts = tuple(parts)
        new._size = self._size + sum(len(part) - len(self._parts[n]) for n, part in copies.items())
        return new

    def with_values(self, values: Mapping[str, W], keys: Collection[str]) -> PersistentMap[W]:
        """Return a map of these keys of this map, with other values."""
        new: PersistentMap[W] = PersistentMap()
        new._parts = tuple([{key: values[key] for key in part if key in keys} for part in self._parts])
        new._size = len(keys)
        return new

    def differing(self, other: PersistentMap[V]) -> Iterator[str]:
        """Yield the keys that have another value in the other map."""
        return (key for key, _, _ in self.differences(other))

    def differences(self, other: PersistentMap[V]) -> Iterator[tuple[str, V | None, V | None]]:
        """Yield the keys that have another value in the other map, each with the value in this map and in the
        other. The parts that the maps share are not looked at."""
        for mine, theirs in zip(self._parts, other._parts, strict=True):
            if mine is not theirs:
                both = {**theirs, **mine}
                pairs = zip(both, map(mine.get, both), map(theirs.get, both), strict=True)
                yield from (pair for pair in pairs if pair[1] is not pair[2])

    def to_dict(self) -> dict[str, V]:
        """Return a plain dict of all items, which is faster where all are looked at."""
        plain: dict[str, V] = {}
        for part in filter(None, self._parts):  # of a few nodes, most parts are empty
            plain.update(part)
        return plain


class _Values(ValuesView[V]):
    """The values, which are not looked up by their keys."""

    _mapping: PersistentMap[V]

    def __iter__(self) -> Iterator[V]:
        return chain.from_iterable(part.values() for part in self._mapping.parts())


def _part(key: str) -> int:
    return crc32(key.encode(errors="surrogatepass")) % PARTS
