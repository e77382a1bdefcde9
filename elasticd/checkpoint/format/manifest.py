"""The content of a checkpoint: its files with their checksums, and the place of each tensor in them.

All saves of one plan share one ``Index``. The ``Manifest`` is written last: a file that the manifest does not
list is not part of the checkpoint. Both are JSON.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Final

import msgspec
import xxhash

from elasticd.core.checkpoint_names import WORLD_MAX

VERSION: Final = 1
MANIFEST: Final = "elasticd.json"
METADATA: Final = ".metadata"
# Bytes; each block of a file has its own checksum, so that a part can be read and verified.
BLOCK: Final = 4 << 20
BLOCK_MAX: Final = 1 << 30


class BadCheckpoint(ValueError):
    """A checkpoint is not whole, or differs from what was saved. The message names the file and the fault."""


class Unreadable(BadCheckpoint):
    """The store returned an error that may be temporary."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a tensor: its file (as an index into ``files``), where its bytes begin, and its place in the
    tensor.

    ``item`` and ``length``: the offset and length of the ``torch.save`` file around the bytes, which plain
    DCP reads.
    """

    file: int
    at: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: int
    length: int


class Tensor(msgspec.Struct, frozen=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


class Blob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An object that is not a tensor, as ``torch.save`` writes it."""

    file: int
    at: int
    length: int


class Index(msgspec.Struct, frozen=True, gc=False):
    """Where each tensor and object is in the shards. ``files``: the shards, by rank. ``paths``: the place of
    each key in the nested state."""

    files: list[str]
    tensors: dict[str, Tensor]
    blobs: dict[str, Blob]
    paths: dict[str, tuple[str | int, ...]]


class File(msgspec.Struct, frozen=True):
    """A file of a checkpoint, with its checksums. ``digests``: the 64-bit xxh3 of each block of ``BLOCK``
    bytes."""

    name: str
    size: int
    digests: list[str]


class _Head(msgspec.Struct, frozen=True):
    """The fields of a manifest other than the index. ``at``: seconds since the epoch. ``files``: the shards
    in the order of the index, then ``METADATA``."""

    v: int
    name: str
    step: int
    round: int
    world: int
    at: float
    block: int
    files: list[File]


class Manifest(_Head, frozen=True):
    """The list of a checkpoint's files, with the index. ``seal``: the checksum of the rest of the manifest,
    for readers that do not know the checksum of the whole file."""

    index: Index
    seal: str = ""

    @property
    def size(self) -> int:
        return sum(f.size for f in self.files)


class _Unread(_Head, frozen=True):
    """A manifest as the saver writes it, without a second encoding of the index."""

    index: msgspec.Raw
    seal: str = ""


# The decoders are made before any thread starts: msgspec crashes if two threads make the first decoder of a
# class at the same time.
_MANIFESTS: Final = msgspec.json.Decoder(Manifest)
_UNREAD: Final = msgspec.json.Decoder(_Unread)
_INDEXES: Final = msgspec.json.Decoder(Index)


def fresh_name(name: str) -> str:
    """Return a unique name for a file that is written whole and then renamed to ``name``. Names differ even
    between processes with the same pid on two hosts."""
    return f".{name}.{os.urandom(4).hex()}.new"


def is_fresh(other: str, name: str) -> bool:
    """Return whether ``fresh_name(name)`` can have made the name ``other``."""
    return re.fullmatch(rf"\.{re.escape(name)}\.[0-9a-f]+\.new", other) is not None


def encode(name: str, step: int, round: int, world: int, at: float, files: list[File], index: bytes) -> bytes:
    """Return the encoded manifest. ``index``: an encoded Index."""
    manifest = _Unread(VERSION, name, step, round, world, at, BLOCK, files, msgspec.Raw(index))
    return _sealed(manifest)


def _sealed(manifest: _Unread) -> bytes:
    bare = msgspec.json.encode(msgspec.structs.replace(manifest, seal=""))
    return msgspec.json.encode(msgspec.structs.replace(manifest, seal=digest(bare)))


def is_intact(raw: bytes) -> bool:
    """Return whether the manifest matches its own seal."""
    try:
        manifest = _UNREAD.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return raw == _sealed(manifest)


def decode(raw: bytes, name: str) -> Manifest:
    """Decode and check the manifest of the checkpoint ``name``. Raises BadCheckpoint."""
    try:
        manifest = _MANIFESTS.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{name}/{MANIFEST} cannot be read: {error}") from error
    if manifest.v > VERSION:
        raise BadCheckpoint(
            f"{name}/{MANIFEST} was written by a newer elasticd (version {manifest.v}): upgrade this one"
        )
    if wrong := _wrong_with(manifest):
        raise BadCheckpoint(f"{name}/{MANIFEST} is not valid: {wrong}")
    return manifest


def _wrong_with(manifest: Manifest) -> str:
    """Return why the manifest cannot be used, or an empty string."""
    shards = [shard_name(rank) for rank in range(len(manifest.index.files))]
    if [file.name for file in manifest.files] != [*shards, METADATA]:
        return "it names other files than the shards of its ranks"
    if not 0 < manifest.world <= WORLD_MAX or not 0 < manifest.block <= BLOCK_MAX:
        return f"{manifest.world} workers or blocks of {manifest.block} bytes are not possible"
    for file in manifest.files:
        if file.size < 0 or len(file.digests) != -(-file.size // manifest.block):
            return f"it has {len(file.digests)} checksums of the {file.size} bytes of {file.name}"
    return wrong_with_index(manifest.index, [file.size for file in manifest.files])


def wrong_with_index(index: Index, sizes: Sequence[int]) -> str:
    """Return why the index cannot be used, or an empty string. ``sizes``: of the shards; may be empty if
    unknown."""
    if index.files != [shard_name(rank) for rank in range(len(index.files))]:
        return "it names other files than the shards of its ranks"
    most = dict(enumerate(sizes))
    for key, tensor in index.tensors.items():
        if not index.paths.get(key):
            return f"it does not say where in the state {key} belongs"
        if any(n < 0 for n in tensor.shape):
            return f"{key} has the shape {list(tensor.shape)}"
        there, itemsize = 0, _itemsize(tensor.dtype)
        for chunk in tensor.chunks:
            box = [*zip(chunk.offsets, chunk.sizes, tensor.shape, strict=False)]
            inside = all(at >= 0 and n >= 0 and at + n <= whole for at, n, whole in box)
            alike = len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape)
            if not (inside and alike):
                return f"a part of {key} is not within its shape {list(tensor.shape)}"
            end = chunk.item + chunk.length
            if not 0 <= chunk.file < len(index.files) or not 0 <= chunk.item <= chunk.at <= end:
                return f"a part of {key} is in none of its shards"
            if end > most.get(chunk.file, end):
                return f"a part of {key} is past the end of its file"
            elements = prod(chunk.sizes)
            if chunk.at + elements * itemsize > end:
                return f"a part of {key} has fewer bytes than elements"
            there += elements
        if len({chunk.offsets for chunk in tensor.chunks}) < len(tensor.chunks):
            return f"two parts of {key} begin at one place"
        if there != prod(tensor.shape):
            return (
                f"the parts of {key} hold {there} elements in all, and its shape {list(tensor.shape)} has "
                f"{prod(tensor.shape)}"
            )
    for key, blob in index.blobs.items():
        if not index.paths.get(key):
            return f"it does not say where in the state {key} belongs"
        end = blob.at + blob.length
        if not 0 <= blob.file < len(index.files) or min(blob.at, blob.length) < 0:
            return f"{key} is in none of its shards"
        if end > most.get(blob.file, end):
            return f"{key} is past the end of its file"
    return ""


@lru_cache
def _itemsize(dtype: str) -> int:
    """Return the bytes of an element of torch's dtype, such as ``float32``; 0 if unknown. The saver does not
    import torch."""
    bits = re.match(r"[a-z]+([0-9]+)", dtype)
    return max(1, int(bits[1]) // 8) if bits else int(dtype == "bool")


def encode_index(index: Index) -> bytes:
    return msgspec.json.encode(index)


def decode_index(raw: bytes) -> Index:
    """Decode and check an index. Raises ValueError."""
    index = _INDEXES.decode(raw)
    if wrong := wrong_with_index(index, ()):
        raise ValueError(wrong)
    return index


def block_digest(block: bytes | bytearray | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(block)


def digest(whole: bytes) -> str:
    """Return the checksum of a manifest, for the record of the commit."""
    return xxhash.xxh3_128_hexdigest(whole)


def shard_name(rank: int) -> str:
    return f"__{rank}_0.distcp"
