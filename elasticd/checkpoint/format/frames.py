"""The bytes that ``torch.save`` writes around a tensor's data, made without torch.

``torch.distributed.checkpoint`` stores each part of a tensor as a ``torch.save`` file within the shard. This
module makes the bytes around the data once, so that a save copies the data only.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Sequence
from typing import Final

ALIGNMENT: Final = 64  # bytes; of the data within the file, so that it can be used without a copy
_LIMIT: Final = (1 << 32) - (1 << 16)
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")


def tensor_frame(dtype: str, sizes: Sequence[int], nbytes: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after the data of a contiguous tensor. ``dtype``: for example "float32".

    If the start of the file is aligned to ``ALIGNMENT``, so is the data. The CRC-32 of the data stays 0:
    torch never checks the CRC-32, and the manifest has stronger checksums. Raises ValueError if the data is
    larger than the frame can hold.
    """
    if not 0 <= nbytes <= _LIMIT:
        raise ValueError(f"a row of {nbytes} bytes cannot be stored: torch.save's frame holds 4 GiB")
    records = [
        ("archive/data.pkl", _tensor_pickle(dtype, sizes, nbytes)),
        ("archive/byteorder", b"little"),
        ("archive/version", b"3\n"),
    ]
    head, directory = b"", b""
    for name, content in records:
        local, central = _entry(name, zlib.crc32(content), len(content), len(head), 0)
        head += local + content
        directory += central
    name = "archive/data/0"
    bare = len(head) + _LOCAL.size + len(name)
    padding = -bare % ALIGNMENT
    if 0 < padding < 4:  # an extra field has a header of four bytes
        padding += ALIGNMENT
    local, central = _entry(name, 0, nbytes, len(head), padding)
    head += local
    directory += central
    start = len(head) + nbytes
    return head, directory + _END.pack(0x06054B50, 0, 0, 4, 4, len(directory), start, 0)


def padded_blob(saved: bytes, room: int) -> bytes:
    """Return ``saved``, a file made by ``torch.save``, padded to ``room`` bytes: an object's size may change
    between saves, and the layout of the shard must not. Raises ValueError if the file does not fit."""
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]

    def packed(padding: int) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, content in records:
                # Unpickling stops at the end of the pickle, so the padding after it is never read.
                extra = bytes(padding) if name.endswith("/data.pkl") else b""
                archive.writestr(zipfile.ZipInfo(name), content + extra)
        return out.getvalue()

    spare = room - len(packed(0))
    if spare < 0:
        raise ValueError(f"{room - spare} bytes do not fit into {room}")
    return packed(spare)


def room_for(saved: bytes) -> int:
    """Return the bytes to reserve for a blob, with room for the blob to grow."""
    return -(-(len(saved) * 5 // 4 + 1024) // 1024) * 1024


def _entry(name: str, crc: int, size: int, at: int, padding: int) -> tuple[bytes, bytes]:
    extra = struct.pack("<2sH", b"FB", padding - 4) + b"Z" * (padding - 4) if padding else b""
    text = name.encode()
    local = _LOCAL.pack(0x04034B50, 0, 0, 0, 0, 0, crc, size, size, len(text), len(extra)) + text + extra
    central = _CENTRAL.pack(
        0x02014B50, 0, 0, 0, 0, 0, 0, crc, size, size, len(text), 0, 0, 0, 0, 0, at
    )  # fmt: skip
    return local, central + text


def _tensor_pickle(dtype: str, sizes: Sequence[int], nbytes: int) -> bytes:
    """Return the pickle of ``_rebuild_tensor_v3(storage, 0, sizes, strides, False, OrderedDict(),
    dtype)``."""
    strides: list[int] = []
    step = 1
    for n in reversed(sizes):
        strides.insert(0, step)
        step *= max(n, 1)
    storage = (
        b"("
        + _text("storage")
        + b"ctorch.storage\nUntypedStorage\n"
        + _text("0")
        + _text("cpu")
        + _int(nbytes)
    )
    return b"".join(
        (
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\n(",
            storage + b"tQ",
            _int(0),
            _ints(sizes),
            _ints(strides),
            b"\x89ccollections\nOrderedDict\n)R",
            b"ctorch\n" + dtype.encode() + b"\n",
            b"tR.",
        )
    )


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _int(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(raw)]) + raw


def _ints(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_int, values)) + b"t"
