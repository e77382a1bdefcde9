"""The saver that commits waits for the shards of other nodes, and not for long where none will come."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from elasticd.checkpoint.format.layout import Layout
from elasticd.checkpoint.format.manifest import shard_name
from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.checkpoint.newest.retention import Keep
from elasticd.checkpoint.server import committing
from elasticd.checkpoint.server.committing import Committing
from elasticd.checkpoint.server.shards import PendingSave, SavingWorld
from elasticd.checkpoint.storage.disk import Disk
from elasticd.core.checkpoint_names import folder_name
from tests.daemon.handing_over import NO_SHARES

NAME = folder_name(5, 1, "0000000a", 1)


class Listed(Disk):
    """A disk that calls ``before`` with the number of the listing before each listing."""

    def __init__(self, folder: Path, before: Callable[[int], None]) -> None:
        super().__init__(str(folder))
        self._before, self._listings = before, 0

    def files(self, folder: str) -> Collection[str]:
        self._listings += 1
        self._before(self._listings)
        return super().files(folder)


def node(store: Disk, rank: int, *, began_s_ago: float = 0.0) -> tuple[SavingWorld, PendingSave]:
    """Return one of two nodes with a worker each, which has written its shard."""
    world = SavingWorld(store, "0000000a", 1, 0, 2, frozenset({rank}), Keep())
    world.lines[rank] = threading.current_thread()  # type: ignore[assignment]  # a worker is connected
    save = PendingSave(NAME, 5, 1.0, time.monotonic() - began_s_ago, Layout(NO_SHARES))
    save.files[rank] = store.write(f"{NAME}/{shard_name(rank)}", memoryview(b"shard"))
    return world, save


def test_a_node_that_took_long_to_write_its_own_shard_still_waits_for_the_others(tmp_path: Path) -> None:
    def other_hands_in(listing: int) -> None:
        if listing == 3:
            Committing(FilePointer).hand_in(*node(Disk(str(tmp_path)), 1))

    store = Listed(tmp_path, other_hands_in)
    saved = Committing(FilePointer).commit(*node(store, 0, began_s_ago=10 * committing._OTHERS_S))
    assert saved.step == 5


def test_a_listing_that_fails_for_a_moment_costs_no_checkpoint(tmp_path: Path) -> None:
    def stale_for_a_moment(listing: int) -> None:
        if listing < 4:
            raise OSError(errno.ESTALE, "Stale file handle")
        if listing == 4:
            Committing(FilePointer).hand_in(*node(Disk(str(tmp_path)), 1))

    assert Committing(FilePointer).commit(*node(Listed(tmp_path, stale_for_a_moment), 0)).step == 5


def test_a_receipt_that_cannot_be_read_for_a_moment_costs_no_checkpoint(tmp_path: Path) -> None:
    class Stale(Disk):
        failures = 2

        def read(self, name: str) -> bytes:
            if name.startswith(NAME) and self.failures:
                self.failures -= 1
                raise OSError(errno.ESTALE, "Stale file handle")
            return super().read(name)

    store = Stale(str(tmp_path))
    Committing(FilePointer).hand_in(*node(store, 1))
    assert Committing(FilePointer).commit(*node(store, 0)).step == 5
    assert not store.failures


def test_a_store_that_cannot_be_listed_fails_the_checkpoint_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(listing: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(committing, "_UNREADABLE_S", 0.01)
    with pytest.raises(OSError, match="Input/output error"):
        Committing(FilePointer).commit(*node(Listed(tmp_path, broken), 0))


def test_a_shard_that_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committing, "_OTHERS_S", 0.01)
    with pytest.raises(TimeoutError, match="the shard of rank 1, which is on another node, never arrived"):
        Committing(FilePointer).commit(*node(Disk(str(tmp_path)), 0))
    assert not FilePointer(Disk(str(tmp_path))).read().saved
