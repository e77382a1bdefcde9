"""The ``.metadata`` that elasticd writes is the one that DCP's own records make."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
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

from elasticd.checkpoint.format import metadata
from elasticd.checkpoint.format.manifest import Blob, Chunk, Index, Tensor, shard_name

NUMBERS = st.one_of(st.integers(0, 300), st.integers(60_000, 70_000), st.integers(0, 1 << 50))
SHAPES = st.lists(NUMBERS, max_size=4).map(tuple)
FILES = st.integers(0, 2)
PATHS = st.lists(st.one_of(st.text(), st.integers(0, 1 << 40)), min_size=1, max_size=4).map(tuple)


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    chunks = st.builds(Chunk, FILES, NUMBERS, SHAPES, SHAPES, NUMBERS, NUMBERS)
    dtypes = st.sampled_from(("float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64"))
    tensor = st.builds(Tensor, dtypes, SHAPES, st.lists(chunks))
    tensors = draw(st.dictionaries(st.text(), tensor, max_size=4))
    blobs = draw(st.dictionaries(st.text(min_size=1), st.builds(Blob, FILES, NUMBERS, NUMBERS), max_size=3))
    blobs = {key: blob for key, blob in blobs.items() if key not in tensors}
    paths = {key: draw(PATHS) for key in (*tensors, *blobs)}
    return Index([shard_name(rank) for rank in range(3)], tensors, blobs, paths)


def of_records(index: Index) -> Metadata:
    states: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for key, tensor in index.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
        properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
        states[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for n, chunk in enumerate(tensor.chunks):
            place = _StorageInfo(index.files[chunk.file], chunk.item, chunk.length)
            stored[MetadataIndex(key, chunk.offsets, n)] = place
    for key, blob in index.blobs.items():
        states[key] = BytesStorageMetadata()
        stored[MetadataIndex(key)] = _StorageInfo(index.files[blob.file], blob.at, blob.length)
    made = Metadata(states, planner_data=dict(index.paths), storage_data=stored, storage_meta=StorageMeta())
    made.version = getattr(filesystem, "CURRENT_DCP_VERSION", metadata._DCP_VERSION)  # none before 2.9
    return made


def taken_apart(value: Any) -> Any:
    """Return the value with the types and fields of all records in it, since not all of them are compared."""
    if isinstance(value, dict):
        return [(taken_apart(key), taken_apart(its)) for key, its in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [taken_apart(its) for its in value]
    fields = vars(value) if hasattr(value, "__dict__") else {}
    return type(value), taken_apart(fields) if fields else value


@given(indexes())
def test_what_is_written_is_what_dcps_records_make(index: Index) -> None:
    raw, expected = metadata.made_of(index), pickle.loads(pickle.dumps(of_records(index)))
    assert taken_apart(pickle.loads(raw)) == taken_apart(expected)
    assert metadata.read(raw, ".metadata") == expected
