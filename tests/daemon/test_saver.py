"""Commits through a real etcd: guarded by the round, waiting while etcd is away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.checkpoint.disk import Disk
from elasticd.checkpoint.pointer import FilePointer
from elasticd.core.facts import Cause, Checkpoint, Phase, Round, Saved
from elasticd.core.ports import Applied, Put
from elasticd.core.retention import Keep, Refused
from elasticd.daemon.saver import EtcdPointer, settle
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.client import Client
from elasticd.etcd.embedded import Embedded


@pytest.fixture(scope="module")
def server() -> Iterator[Embedded]:
    etcd = Embedded()
    try:
        etcd.start()
        yield etcd
    finally:
        etcd.stop()


@pytest.fixture
def client(server: Embedded) -> Iterator[Client]:
    with Client(server.access) as client:
        client.delete_raw(b"/elasticd/", prefix=True)
        yield client


def round_is(client: Client, number: int, phase: Phase = Phase.LIVE) -> None:
    now = Round(number, phase, (), "x:1", Cause.START, 1.0)
    assert isinstance(client.transact("j", (), (Put("round", now),)), Applied)


def saved(step: int, round: int) -> Saved:
    return Saved(f"s{step}-{round}", step, round, 2, 1.0, 10, "d")


def committed(client: Client) -> list[int]:
    entry = client.get("j", "checkpoint")
    return [s.step for s in entry.fact.saved] if entry and isinstance(entry.fact, Checkpoint) else []


def test_a_commit_is_in_etcd_and_copied_beside_the_checkpoints(server, client, tmp_path):
    round_is(client, 3)
    pointer = EtcdPointer(server.access, "j", Disk(tmp_path))
    for step in (1, 2, 3):
        made = pointer.commit(saved(step, 3), Keep(2), 3)
    assert committed(client) == [2, 3] == [s.step for s in FilePointer(tmp_path).read().saved]
    assert [s.step for s in made.dropped] == [1]


def test_once_the_next_round_has_begun_those_of_the_last_cannot_commit(server, client, tmp_path):
    pointer = EtcdPointer(server.access, "j", Disk(tmp_path))
    round_is(client, 3, Phase.CLOSING)
    pointer.commit(saved(5, 3), Keep(), 3)  # its workers may be dead: what they handed over counts
    round_is(client, 4)
    with pytest.raises(Refused, match="saved in round 3, and now it is round 4"):
        pointer.commit(saved(6, 3), Keep(), 3)
    assert committed(client) == [5]


def test_committing_again_what_was_not_answered_changes_nothing(server, client, tmp_path):
    round_is(client, 1)
    pointer = EtcdPointer(server.access, "j", Disk(tmp_path))
    pointer.commit(saved(5, 1), Keep(), 1)
    assert pointer.commit(saved(5, 1), Keep(), 1).dropped == ()
    assert committed(client) == [5]


def test_a_new_etcd_goes_on_from_what_the_folder_has(server, client, tmp_path):
    FilePointer(tmp_path).commit(saved(7, 9), Keep())
    round_is(client, 1)
    EtcdPointer(server.access, "j", Disk(tmp_path)).commit(saved(8, 10), Keep(), 1)
    assert committed(client) == [7, 8]


def test_a_commit_waits_for_an_etcd_that_is_away_and_gives_up_in_the_end(tmp_path):
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    nobody = EtcdAccess(("127.0.0.1:9",), timeout_s=0.1)
    pointer = EtcdPointer(nobody, "j", Disk(tmp_path), patience_s=1.2, clock=lambda: now[0], sleep=sleep)
    with pytest.raises(TimeoutError, match="etcd cannot be reached"):
        pointer.commit(saved(1, 1), Keep(), 1)
    assert now[0] >= 1.2
    assert not FilePointer(tmp_path).read().saved


def test_a_copy_that_was_not_written_is_written_later(server, client, tmp_path: Path):
    round_is(client, 1)
    EtcdPointer(server.access, "j", Disk(tmp_path)).commit(saved(5, 1), Keep(), 1)
    (tmp_path / "committed.json").unlink()
    settle(server.access, "j")
    assert [s.step for s in FilePointer(tmp_path).read().saved] == [5]
