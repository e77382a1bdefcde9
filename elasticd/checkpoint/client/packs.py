"""Several byte strings as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

# Made before any thread starts: see ``format.manifest``.
_PACKS: Final = msgspec.msgpack.Decoder(tuple[list[bytes], list[int]])


def packed(items: Sequence[bytes]) -> bytes:
    """Return the items as one. Equal items are in it once."""
    numbers = {item: number for number, item in enumerate(dict.fromkeys(items))}
    return msgspec.msgpack.encode((list(numbers), [numbers[item] for item in items]))


def unpacked(pack: bytes) -> list[bytes]:
    """Return the items of a pack. Equal items are one object."""
    kinds, numbers = _PACKS.decode(pack)
    return [kinds[number] for number in numbers]
