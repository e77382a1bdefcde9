"""The record of committed checkpoints: damaged in any bit, lost, or older than the checkpoints beside it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticd.checkpoint.format.layout import Layout
from elasticd.checkpoint.format.manifest import (
    MANIFEST,
    BadCheckpoint,
    Unreadable,
    shard_name,
)
from elasticd.checkpoint.newest.pointer import POINTER, FilePointer, _saved_by
from elasticd.checkpoint.newest.retention import CommitRefused, Keep
from elasticd.checkpoint.server.committing import Committing
from elasticd.checkpoint.server.shards import PendingSave, SavingWorld
from elasticd.checkpoint.storage import CheckpointStore
from elasticd.checkpoint.storage.disk import Disk
from elasticd.core.checkpoint_names import folder_name
from tests.checkpoint.conftest import store_of
from tests.daemon.handing_over import NO_SHARES


@pytest.fixture(params=["disk", "foldered", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    return store_of(request.param, tmp_path)


class Job:
    """Commits checkpoints of one round, as a saver does."""

    def __init__(self, store: CheckpointStore, round_: int = 1, last: int = 3) -> None:
        self.store, self.said = store, list[str]()
        self.committing = Committing(lambda its: FilePointer(its, self.said.append), say=self.said.append)
        self.world = SavingWorld(store, "0000000a", round_, round_, 1, frozenset({0}), Keep(last))

    def commit(self, *steps: int) -> None:
        for step in steps:
            name = folder_name(step, self.world.round, "0000000a", step)
            save = PendingSave(name, step, 1.0, 0.0, Layout(NO_SHARES))
            save.files = {0: self.store.write(f"{name}/{shard_name(0)}", memoryview(b"shard"))}
            self.committing.commit(self.world, save)


def committed(store: CheckpointStore, say: Callable[[str], None] = lambda _: None) -> list[int]:
    return [saved.step for saved in FilePointer(store, say).read().saved]


def there(store: CheckpointStore) -> list[int]:
    """Return the steps of all folders."""
    return sorted(int(name[5:15]) for name in store.names() if name.startswith("step-"))


def lost(store: CheckpointStore) -> None:
    store.unlink([POINTER])


def missing(store: CheckpointStore) -> str:
    return f"{store.url}/{POINTER} is missing; the checkpoints beside it that are whole count as committed"


def test_no_flipped_bit_of_the_record_goes_unnoticed_or_drops_a_checkpoint(tmp_path):
    Job(store := Disk(tmp_path)).commit(1, 2)
    whole = (tmp_path / POINTER).read_bytes()
    said = []
    assert committed(store, said.append) == [1, 2] and not said
    for at in range(8 * len(whole)):
        raw = bytearray(whole)
        raw[at // 8] ^= 1 << at % 8
        with pytest.raises(ValueError, match=r"."):
            _saved_by(bytes(raw), POINTER)
        if at % 9 == 0:  # most bytes, and all bits of one byte
            (tmp_path / POINTER).write_bytes(raw)
            said = []
            assert committed(store, said.append) == [1, 2], bytes(raw)
            [sentence] = said
            assert sentence.startswith(f"{tmp_path / POINTER} is damaged: "), bytes(raw)
            assert sentence.endswith("; the checkpoints beside it that are whole count as committed")


def test_a_lost_record_beside_whole_checkpoints_is_reported_and_loses_none(store):
    Job(store).commit(1, 2)
    lost(store)
    said = []
    assert committed(store, said.append) == [1, 2]
    assert said == [missing(store)]
    again = Job(store, round_=2)
    again.commit(3)
    assert again.said.count(missing(store)) == 1
    said = []
    assert committed(store, said.append) == [1, 2, 3] and not said
    assert there(store) == [1, 2, 3]


def test_a_lost_record_beside_nothing_whole_is_no_fresh_start(store):
    Job(store).commit(1)
    lost(store)
    [name] = (name for name in store.names() if name.startswith("step-"))
    store.unlink([f"{name}/{shard_name(0)}"])
    with pytest.raises(BadCheckpoint, match=f"{POINTER} is missing, and no checkpoint beside it is whole"):
        FilePointer(store).read()
    Job(store, round_=2).commit(2)
    assert committed(store) == [2], "later checkpoints are committed"


def test_what_was_begun_before_anything_was_committed_is_a_fresh_start(store):
    store.write(f"{folder_name(1, 1, '0000000a', 1)}/{shard_name(0)}", memoryview(b"shard"))
    said = []
    assert committed(store, said.append) == [] and not said


def test_a_first_checkpoint_that_never_came_to_be_committed_does_not_count(store, monkeypatch):
    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(FilePointer, "commit", die)
        with pytest.raises(KeyboardInterrupt):
            Job(store).commit(1)
    assert there(store) == [1]
    said = []
    assert committed(store, said.append) == [] and not said
    again = Job(store, round_=2)
    again.commit(2)
    assert committed(store) == there(store) == [2]
    assert not any("count as committed" in sentence for sentence in again.said)


@pytest.mark.parametrize("finished", [True, False])
def test_what_came_further_than_a_record_knows_is_removed_once_it_is_made_anew(store, finished):
    Job(store, last=4).commit(1, 2)
    before = store.read(POINTER)
    Job(store, last=4).commit(8, 9)
    if not finished:
        for name in (n for n in store.names() if n.startswith(("step-0000000008", "step-0000000009"))):
            store.unlink([f"{name}/{MANIFEST}"])
    store.replace(POINTER, before)  # as after a restore from a backup
    assert committed(store) == [1, 2]
    again = Job(store, round_=2)
    again.commit(3)
    assert committed(store) == [1, 2, 3]
    assert there(store) == [1, 2, 3, *([8, 9] if finished else [])]
    again.commit(8)
    assert there(store) == [2, 3, 8, *([9] if finished else [])], "the newest is of this round"
    again.commit(10)
    assert there(store) == committed(store) == [3, 8, 10]


def test_a_disk_that_hides_what_is_whole_beside_a_lost_record_costs_commits_and_no_checkpoint(
    tmp_path, monkeypatch
):
    Job(store := Disk(tmp_path)).commit(1, 2)
    lost(store)
    real = Disk.read

    def fails(disk: Disk, name: str) -> bytes:
        if name.startswith("step-0000000002") and name.endswith(MANIFEST):
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return real(disk, name)

    monkeypatch.setattr("elasticd.checkpoint.storage.reading._PATIENCE_S", 0.0)
    with monkeypatch.context() as tired:
        tired.setattr(Disk, "read", fails)
        with pytest.raises(Unreadable, match="Input/output error"):
            committed(store)
        assert FilePointer(store).last_round() == 1
        with pytest.raises((CommitRefused, BadCheckpoint)):
            Job(store, round_=2).commit(3)
    Job(store, round_=2, last=9).commit(4)
    assert {1, 2, 4} <= set(committed(store))
