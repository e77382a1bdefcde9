"""Data from etcd, a disk or another node can name neither other paths nor bytes that do not exist."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import msgspec
import pytest

from elasticd.checkpoint.format.manifest import (
    METADATA,
    BadCheckpoint,
    Blob,
    Chunk,
    File,
    Index,
    Tensor,
    decode,
    decode_index,
    encode,
    encode_index,
    shard_name,
)
from elasticd.checkpoint.replication.replicas import Label
from elasticd.core.checkpoint_names import folder_name, parse_folder
from elasticd.core.facts import Checkpoint, Saved
from elasticd.etcd import records
from elasticd.etcd.errors import BadRecord

NAME = folder_name(5, 2, "0000000a", 1)
SAVED = Saved(NAME, 5, 2, 2, 1.0, 10, "d")
BAD_NAMES = (
    "../../x",
    "/tmp/x",
    "",
    ".",
    f"../{NAME}",
    f"{NAME}/..",
    f"{NAME}\n",
    NAME.replace("5", "\u0665"),
)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_other_folder_names_are_not_parsed_as_checkpoints(name):
    assert parse_folder(name) is None


@pytest.mark.parametrize(
    "wrong",
    [*({"name": name} for name in BAD_NAMES), {"step": 6}, {"round": 3}, {"world": 0}, {"world": 1 << 40}],
)
def test_a_record_in_etcd_with_an_invalid_checkpoint_name_is_refused(wrong: dict[str, Any]):
    raw = json.dumps({"v": 1, "path": "/c", "saved": [asdict(SAVED) | wrong]}).encode()
    with pytest.raises(BadRecord):
        records.decode("checkpoint", raw)
    good = records.encode("checkpoint", Checkpoint("/c", (SAVED,)))
    assert records.decode("checkpoint", good) == Checkpoint("/c", (SAVED,))


@pytest.mark.parametrize("wrong", [*({"name": name} for name in BAD_NAMES), {"rank": 2}, {"rank": -1}])
def test_a_peer_s_label_with_an_invalid_checkpoint_name_is_refused(wrong: dict[str, Any]):
    label = {"path": "/c", "name": NAME, "round": 2, "step": 5, "world": 2, "rank": 1}
    assert msgspec.convert(label, Label).rank == 1
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(label | wrong, Label)


GOOD: dict[str, Any] = {
    "files": [shard_name(0), shard_name(1)],
    "tensors": {
        "w": Tensor(
            "float32", (4, 2), [Chunk(0, 64, (0, 0), (2, 2), 0, 128), Chunk(1, 64, (2, 0), (2, 2), 0, 128)]
        )
    },
    "blobs": {"b": Blob(0, 128, 72)},
    "paths": {"w": ("w",), "b": ("b",)},
}
FILES = [File(shard_name(0), 200, ["0"]), File(shard_name(1), 200, ["0"]), File(METADATA, 1, ["0"])]


def chunks(*parts: Chunk, shape: tuple[int, ...] = (4, 2)) -> dict[str, Any]:
    return {"tensors": {"w": Tensor("float32", shape, list(parts))}}


FIRST = GOOD["tensors"]["w"].chunks[0]
WRONG_INDEXES = [
    {"files": ["../../x", shard_name(1)]},
    {"files": [shard_name(0), shard_name(0)]},
    {"paths": {"w": ("w",)}},
    {"paths": {"w": (), "b": ("b",)}},
    chunks(FIRST),  # half of the tensor is missing
    chunks(FIRST, Chunk(1, 64, (2, 0), (3, 2), 0, 128)),
    chunks(FIRST, Chunk(1, 64, (-2, 0), (2, 2), 0, 128)),
    chunks(FIRST, Chunk(2, 64, (2, 0), (2, 2), 0, 128)),
    chunks(FIRST, Chunk(-1, 64, (2, 0), (2, 2), 0, 128)),
    chunks(FIRST, Chunk(1, -64, (2, 0), (2, 2), 0, 128)),
    chunks(FIRST, Chunk(1, 64, (2,), (4,), 0, 128)),
    chunks(shape=(-1, 2)),
    chunks(FIRST, Chunk(1, 120, (2, 0), (2, 2), 0, 128)),  # past the end of its torch.save file
    chunks(FIRST, FIRST),
    {"blobs": {"b": Blob(2, 0, 8)}},
    {"blobs": {"b": Blob(0, -8, 8)}},
    {"blobs": {"b": Blob(0, 0, -8)}},
]
TOO_FAR = [chunks(FIRST, Chunk(1, 64, (2, 0), (2, 2), 0, 1 << 40)), {"blobs": {"b": Blob(0, 190, 72)}}]


def of(index: dict[str, Any], files: list[File] = FILES) -> bytes:
    return encode(NAME, 5, 2, 2, 1.0, files, encode_index(Index(**index)))


@pytest.mark.parametrize("wrong", [*WRONG_INDEXES, *TOO_FAR])
def test_a_manifest_by_which_nothing_can_be_loaded_is_refused(wrong: dict[str, Any]):
    assert decode(of(GOOD), NAME).index == Index(**GOOD)
    with pytest.raises(BadCheckpoint, match=f"^{NAME}/elasticd.json is not valid: "):
        decode(of(GOOD | wrong), NAME)


@pytest.mark.parametrize("wrong", WRONG_INDEXES)
def test_an_index_of_a_peers_by_which_nothing_can_be_loaded_is_refused(wrong: dict[str, Any]):
    assert decode_index(encode_index(Index(**GOOD))) == Index(**GOOD)
    with pytest.raises(ValueError, match="."):
        decode_index(encode_index(Index(**GOOD | wrong)))


@pytest.mark.parametrize(
    "files",
    [
        [File("../../x", 200, ["0"]), *FILES[1:]],
        [FILES[1], FILES[0], FILES[2]],
        FILES[:2],
        [*FILES, File("more", 1, ["0"])],
        [File(shard_name(0), -1, []), *FILES[1:]],
        [File(shard_name(0), 200, []), *FILES[1:]],
    ],
)
def test_a_manifest_names_the_shards_of_its_ranks_and_no_other_file(files: list[File]):
    with pytest.raises(BadCheckpoint, match="is not valid: "):
        decode(of(GOOD, files), NAME)
