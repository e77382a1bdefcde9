"""DCP's ``.metadata``, a pickle: written for plain ``dcp.load``, and read only where there is no manifest.

No other module imports pickle. A pickle that is read here may name only DCP's own record types, so that a
checkpoint from elsewhere runs no code.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, Final, cast

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


def made_of(index: Index) -> bytes:
    """Return the ``.metadata`` that describes the same shards as the index."""
    import torch
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    states: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for key, tensor in index.tensors.items():
        chunks = []
        for n, chunk in enumerate(tensor.chunks):
            chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
            place = _StorageInfo(index.files[chunk.file], chunk.item, chunk.length)
            stored[MetadataIndex(key, chunk.offsets, n)] = place
        dtype = cast("torch.dtype", getattr(torch, tensor.dtype))
        states[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(tensor.shape), chunks)
    for key, blob in index.blobs.items():
        states[key] = BytesStorageMetadata()
        stored[MetadataIndex(key)] = _StorageInfo(index.files[blob.file], blob.at, blob.length)
    metadata = Metadata(
        states, planner_data=dict(index.paths), storage_data=stored, storage_meta=StorageMeta()
    )
    if version := getattr(filesystem, "CURRENT_DCP_VERSION", None):  # torch before 2.9 has no version
        metadata.version = version
    return pickle.dumps(metadata)
