"""Read checkpoints of plain ``torch.distributed.checkpoint``.

They have no checksums to verify. Unpickling is restricted, unlike in ``dcp.load``.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from elasticd.checkpoint.client.collectives import RankGroup
from elasticd.checkpoint.client.state_dict import Flat, flatten, prepare_optimizers, restore
from elasticd.checkpoint.format import metadata
from elasticd.checkpoint.format.manifest import METADATA, BadCheckpoint


class _Reader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        found = _metadata(Path(self.path))
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, torch.load(value, weights_only=True))


def load_plain(folder: Path, state: dict[str, Any], ranks: RankGroup) -> None:
    """Fill ``state`` as ``Checkpoints.load`` does. Raises BadCheckpoint, ValueError."""
    leaves: dict[str, Any] = {}
    before, wrong, misfit = Flat(), "", ""
    try:
        there = _metadata(folder)
        shapes = {
            key: (saved.properties.dtype, tuple(saved.size))
            for key, saved in there.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata)
        }
        prepare_optimizers(state, shapes, there.planner_data or {})
        before = flatten(state)
        leaves = {**before.tensors, **before.objects}
        # torch warns that the process group is not used.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            # Each rank reads for itself: together the ranks would send each other pickles.
            dcp.load(leaves, storage_reader=_Reader(folder), planner=_Planner(), no_dist=True)
    except BadCheckpoint as error:
        wrong = str(error)
    except CheckpointException as error:
        [first, *_] = error.failures.values()
        misfit = str(first[0])
    said = [msgspec.json.decode(raw) for raw in ranks.gather(msgspec.json.encode((wrong, misfit)))]
    for wrong, misfit in said:
        if wrong:
            raise BadCheckpoint(wrong)
        if misfit:
            raise ValueError(
                f"{folder} cannot be loaded: {misfit}; give a state that is built like the saved state"
            )
    for key in before.objects:
        before.objects[key] = leaves[key]
    restore(state, before)


def _metadata(folder: Path) -> Metadata:
    try:
        raw = (folder / METADATA).read_bytes()
    except OSError as error:
        raise BadCheckpoint(f"{folder / METADATA} cannot be read: {error.strerror}") from error
    return metadata.read(raw, str(folder / METADATA))
