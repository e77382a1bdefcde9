"""A persistent map: a mapping that never changes. A changed copy shares most of its memory with the original.
The leader keeps one record per node, and gets news of one node at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar
from zlib import crc32

PARTS = 128  # with 10,000 keys, a part has about 80

V = TypeVar("V")


class PersistentMap(Mapping[str, V]):
    """An immutable mapping. ``put`` and ``without`` return a changed copy, for which they copy one part of
    the keys. The order of the keys depends only on the keys and on the order in which they were added."""

    __slots__ = ("_parts",)

    def __init__(self, parts: tuple[Mapping[str, V], ...] = ({},) * PARTS) -> None:
        self._parts = parts

    def __getitem__(self, key: str) -> V:
        return self._parts[_part(key)][key]

    def __iter__(self) -> Iterator[str]:
        for part in self._parts:
            yield from part

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def put(self, key: str, value: V) -> PersistentMap[V]:
        n = _part(key)
        return self._with(n, {**self._parts[n], key: value})

    def without(self, key: str) -> PersistentMap[V]:
        n = _part(key)
        return self._with(n, {k: v for k, v in self._parts[n].items() if k != key})

    def _with(self, n: int, part: Mapping[str, V]) -> PersistentMap[V]:
        return PersistentMap((*self._parts[:n], part, *self._parts[n + 1 :]))


def _part(key: str) -> int:
    return crc32(key.encode(errors="surrogatepass")) % PARTS
