"""DCP's ``.metadata``, a pickle: written for plain ``dcp.load``, and read only where there is no manifest.

No other module imports pickle. A pickle that is read here may name only DCP's own record types, so that a
checkpoint from elsewhere runs no code.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from elasticd.checkpoint.format.manifest import BadCheckpoint, Index

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_DCP = "torch.distributed.checkpoint.metadata"
_ALLOWED: Final = {
    (_DCP, "Metadata"),
    (_DCP, "MetadataIndex"),
    (_DCP, "TensorStorageMetadata"),
    (_DCP, "BytesStorageMetadata"),
    (_DCP, "ChunkStorageMetadata"),
    (_DCP, "TensorProperties"),
    (_DCP, "StorageMeta"),
    (_DCP, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which DCP's metadata never does")


def read(raw: bytes, where: str) -> Metadata:
    """Read the metadata. ``where``: the file's name, for the error message. Raises BadCheckpoint."""
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        found = _Restricted(io.BytesIO(raw)).load()
    except Exception as error:
        raise BadCheckpoint(f"{where} cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise BadCheckpoint(f"{where} is not the metadata of a DCP checkpoint")
    return found


# ---------------------------------------------------------------- written

# ``made_of`` writes the pickle itself, since that takes a twentieth of the time of making DCP's records: a
# model in 1,024 shards has a million parts. Nor does the saver need torch for it.

_CLASSES: Final = {
    "Metadata": _DCP,
    "TensorStorageMetadata": _DCP,
    "BytesStorageMetadata": _DCP,
    "ChunkStorageMetadata": _DCP,
    "TensorProperties": _DCP,
    "_MEM_FORMAT_ENCODING": _DCP,
    "MetadataIndex": _DCP,
    "StorageMeta": _DCP,
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "Size": "torch",
    "_get_layout": "torch.serialization",
}
_FIELDS: Final = ("offsets", "sizes", "fqn", "index", "offset", "relative_path", "length")
_DCP_VERSION: Final = "1.0.0"
_END: Final = pickle.SETITEMS + pickle.BUILD  # of the fields of a record


def _number(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return pickle.BININT1 + value.to_bytes(1, "little")
    if 0 <= value < 1 << 31:
        return pickle.BININT + value.to_bytes(4, "little")
    raw = pickle.encode_long(value)
    return pickle.LONG1 + len(raw).to_bytes(1, "little") + raw


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + len(raw).to_bytes(4, "little") + raw


def _tuple(items: Iterable[bytes]) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def _global(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + pickle.STACK_GLOBAL


class _Memo:
    """What a pickle names several times: it is written once, and then meant by its number."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self._numbers: dict[object, bytes] = {}

    def add(self, key: object, raw: bytes) -> None:
        number = len(self._numbers)
        self._numbers[key] = pickle.LONG_BINGET + number.to_bytes(4, "little")
        self.written.append(raw + pickle.MEMOIZE + pickle.POP)

    def __getitem__(self, key: object) -> bytes:
        return self._numbers[key]

    def record(self, name: str) -> bytes:
        """Return the beginning of a record, which its fields and ``_END`` follow."""
        return self[name] + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK


def made_of(index: Index) -> bytes:
    """Return the ``.metadata`` that describes the same shards as the index."""
    memo = _Memo()
    for name, module in _CLASSES.items():
        memo.add(name, _global(module, name))
    for text in dict.fromkeys((*_FIELDS, *index.files, *index.tensors, *index.blobs)):
        memo.add((text,), _text(text))
    states = b"".join(_states(index, memo))
    stored = b"".join(_stored(index, memo))
    paths = b"".join(
        memo[(key,)] + _tuple(_number(p) if isinstance(p, int) else _text(p) for p in path)
        for key, path in index.paths.items()
        if key in index.tensors or key in index.blobs
    )
    about = b"".join(_text(name) + pickle.NONE for name in ("checkpoint_id", "save_id", "load_id"))
    fields = {
        "state_dict_metadata": _dict(states),
        "planner_data": _dict(paths),
        "storage_data": _dict(stored),
        "storage_meta": memo.record("StorageMeta") + about + _text("modules") + pickle.EMPTY_LIST + _END,
        "version": _text(_DCP_VERSION),
    }
    return b"".join(
        (
            pickle.PROTO + b"\x04",
            *memo.written,
            memo.record("Metadata"),
            *(_text(name) + raw for name, raw in fields.items()),
            _END + pickle.STOP,
        )
    )


def _dict(items: bytes) -> bytes:
    return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS


def _states(index: Index, memo: _Memo) -> Iterator[bytes]:
    """Yield the key and the record of each tensor and object."""
    size = _sizes(memo)
    before = memo.record("ChunkStorageMetadata") + memo[("offsets",)]
    layout = memo["_get_layout"] + _tuple([_text("torch.strided")]) + pickle.REDUCE
    contiguous = memo["_MEM_FORMAT_ENCODING"] + _tuple([_number(0)]) + pickle.REDUCE
    for key, tensor in index.tensors.items():
        dtype = _global("torch", tensor.dtype)
        properties = _tuple((dtype, layout, pickle.NEWFALSE, contiguous, pickle.NEWFALSE))
        yield from (memo[(key,)], memo.record("TensorStorageMetadata"), _text("properties"))
        yield memo["TensorProperties"] + pickle.EMPTY_TUPLE + pickle.NEWOBJ + properties + pickle.BUILD
        yield _text("size") + size(tensor.shape) + _text("chunks") + pickle.EMPTY_LIST + pickle.MARK
        for chunk in tensor.chunks:
            yield before + size(chunk.offsets) + memo[("sizes",)] + size(chunk.sizes) + _END
        yield pickle.APPENDS + _END
    for key in index.blobs:
        yield memo[(key,)] + memo["BytesStorageMetadata"] + pickle.EMPTY_TUPLE + pickle.NEWOBJ


def _stored(index: Index, memo: _Memo) -> Iterator[bytes]:
    """Yield a ``MetadataIndex`` for each chunk and object, and where it is stored."""
    size = _sizes(memo)
    begin = memo.record("MetadataIndex") + memo[("fqn",)]
    stored = _END + memo.record("_StorageInfo") + memo[("relative_path",)]
    files = [stored + memo[(name,)] + memo[("offset",)] for name in index.files]
    length = memo[("length",)]
    for key, tensor in index.tensors.items():
        of_tensor = begin + memo[(key,)] + memo[("index",)]
        for n, chunk in enumerate(tensor.chunks):
            yield of_tensor + _number(n) + memo[("offset",)] + size(chunk.offsets)
            yield files[chunk.file] + _number(chunk.item) + length + _number(chunk.length) + _END
    for key, blob in index.blobs.items():
        yield begin + memo[(key,)] + memo[("index",)] + pickle.NONE
        yield files[blob.file] + _number(blob.at) + length + _number(blob.length) + _END


def _sizes(memo: _Memo) -> Callable[[tuple[int, ...]], bytes]:
    """Return a function that writes a ``torch.Size``."""

    @lru_cache(1 << 16)
    def size(shape: tuple[int, ...]) -> bytes:
        return memo["Size"] + _tuple([_tuple(map(_number, shape))]) + pickle.REDUCE

    return size
