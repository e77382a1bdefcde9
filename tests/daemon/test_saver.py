"""Commits through a real etcd. A commit is guarded by the round, and waits while etcd is away."""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from elasticd.channel.codec import ChannelClosed
from elasticd.checkpoint import protocol
from elasticd.checkpoint.client.memory_tier import CommittedUnknown, SaverQueries
from elasticd.checkpoint.format.manifest import (
    MANIFEST,
    METADATA,
    BadCheckpoint,
    File,
    Index,
    digest,
    encode,
    encode_index,
)
from elasticd.checkpoint.newest.pointer import POINTER, FilePointer
from elasticd.checkpoint.newest.retention import Commit, CommitRefused, Keep
from elasticd.checkpoint.protocol import AskKnown, BufferFree, Known, KnownUnreadable, OpenWorld
from elasticd.checkpoint.server.save_report import Fate, SaveReport
from elasticd.checkpoint.server.saver import Saver
from elasticd.checkpoint.storage import CheckpointStore, disk
from elasticd.checkpoint.storage.disk import Disk
from elasticd.checkpoint.storage.reading import open_manifest
from elasticd.core.checkpoint_names import folder_name, parse_folder
from elasticd.core.facts import Cause, Checkpoint, Phase, Round, Saved
from elasticd.core.ports import Answer, Applied, Entry, NoAnswer, Put
from elasticd.daemon.node_saver import saver_service
from elasticd.daemon.node_saver.etcd_pointer import EtcdPointer, settle
from elasticd.daemon.node_saver.saver_service import FINISH_S_MAX, SaverService
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.embedded import Embedded
from elasticd.etcd.errors import StoreError, StoreRefused, StoreUnavailable, TokenExpired
from elasticd.procs.warden_client import Warden, WardenError
from tests import forkserver
from tests.daemon.handing_over import hands_over, hands_over_more
from tests.etcd.cluster import freeze


@pytest.fixture(scope="module")
def server() -> Iterator[Embedded]:
    with Embedded() as etcd:
        yield etcd


@pytest.fixture
def client(server: Embedded) -> Iterator[Client]:
    with Client(server.access) as client:
        client.delete_raw(b"/elasticd/", prefix=True)
        yield client


def round_is(client: Client, number: int, phase: Phase = Phase.LIVE) -> None:
    now = Round(number, phase, (), "x:1", Cause.START, 1.0)
    assert isinstance(client.transact("j", (), (Put("round", now),)), Applied)


def saved(step: int, round: int) -> Saved:
    return Saved(folder_name(step, round, "0000000a", 1), step, round, 2, 1.0, 10, "d")


def whole(folder: Path, step: int, round: int) -> Saved:
    """Write a checkpoint without a tensor, as a saver does before it commits the checkpoint."""
    name = folder_name(step, round, "0000000a", 1)
    index = encode_index(Index([], {}, {}, {}))
    (folder / name).mkdir()
    (folder / name / METADATA).touch()
    none = File(METADATA, 0, [])
    (folder / name / MANIFEST).write_bytes(raw := encode(name, step, round, 1, 1.0, [none], index))
    return Saved(name, step, round, 1, 1.0, len(raw), digest(raw))


def committed(client: Client) -> list[int]:
    entry = client.get("j", "checkpoint")
    return [s.step for s in entry.fact.saved] if entry and isinstance(entry.fact, Checkpoint) else []


@dataclass(frozen=True)
class Serving:
    """A saver that serves in a thread. ``told``: its reports."""

    name: str
    told: queue.SimpleQueue[SaveReport]

    def fate(self) -> SaveReport:
        """Return the next report of how a checkpoint ended."""
        while (report := self.told.get(timeout=60.0)).fate is Fate.COPIED:
            pass
        return report


@contextmanager
def serving(committer_of: Callable[[CheckpointStore], EtcdPointer], **more: Any) -> Iterator[Serving]:
    listener, name = protocol.listen()
    told: queue.SimpleQueue[SaveReport] = queue.SimpleQueue()
    saver = Saver(listener, committer_of=committer_of, linger_s=None, report=told.put, **more)
    thread = threading.Thread(target=saver.serve)
    thread.start()
    try:
        yield Serving(name, told)
    finally:
        saver.leave()
        thread.join()
        listener.close()


def test_a_commit_is_in_etcd_and_copied_beside_the_checkpoints(server, client, tmp_path):
    round_is(client, 3)
    pointer = EtcdPointer(server.access, "j", Disk(tmp_path))
    for step in (1, 2, 3):
        pointer.commit(saved(step, 3), Keep(2), 3)
    assert committed(client) == [2, 3] == [s.step for s in FilePointer(tmp_path).read().saved]


def test_once_the_next_round_has_begun_those_of_the_last_cannot_commit(server, client, tmp_path):
    pointer = EtcdPointer(server.access, "j", Disk(tmp_path))
    round_is(client, 3, Phase.CLOSING)
    # the workers may have died: the shards that they handed over count
    pointer.commit(saved(5, 3), Keep(), 3)
    round_is(client, 4)
    with pytest.raises(CommitRefused, match="saved in round 3, and now it is round 4"):
        pointer.commit(saved(6, 3), Keep(), 3)
    assert committed(client) == [5]


def test_committing_again_what_was_not_answered_changes_nothing(server, client, tmp_path):
    round_is(client, 1)
    pointer = EtcdPointer(server.access, "j", Disk(tmp_path))
    pointer.commit(saved(5, 1), Keep(), 1)
    assert pointer.commit(saved(5, 1), Keep(), 1).checkpoint.saved == (saved(5, 1),)
    assert committed(client) == [5]


def test_a_new_etcd_goes_on_from_what_the_folder_has(server, client, tmp_path):
    FilePointer(tmp_path).commit(saved(7, 9), Keep())
    round_is(client, 1)
    EtcdPointer(server.access, "j", Disk(tmp_path)).commit(saved(8, 10), Keep(), 1)
    assert committed(client) == [7, 8]


def test_a_damaged_copy_stops_no_job_and_is_mended_by_its_next_commit(server, client, tmp_path):
    file = tmp_path / "committed.json"
    file.write_bytes(b"{")
    round_is(client, 1)
    pointer = EtcdPointer(server.access, "j", Disk(tmp_path))
    with pytest.raises(
        BadCheckpoint, match=r"committed.json is damaged: .* no checkpoint beside it is whole"
    ):
        pointer.read()
    assert pointer.read(own=True).saved == (), "which is not even read where only this job's count"
    new = whole(tmp_path, 1, 1)
    assert FilePointer(tmp_path).read().saved == (new,)
    pointer.commit(new, Keep(), 1)
    assert committed(client) == [1] and json.loads(file.read_bytes())["saved"][0]["step"] == 1
    file.write_bytes(b"{")
    assert pointer.read() == pointer.read(own=True) and [s.step for s in pointer.read().saved] == [1]
    pointer.close()


def test_where_etcd_s_record_is_damaged_the_folder_s_counts_but_for_who_may_only_go_on_from_its_own(
    server, client, tmp_path
):
    FilePointer(tmp_path).commit(new := whole(tmp_path, 1, 1), Keep())
    client.swap_raw(b"/elasticd/j/checkpoint", b"{", 0)
    pointer = EtcdPointer(server.access, "j", Disk(tmp_path))
    assert pointer.read().saved == (new,)
    with pytest.raises(BadCheckpoint, match="the value of checkpoint in etcd is not usable"):
        pointer.read(own=True)
    pointer.close()


def test_removed_checkpoints_block_no_later_commit(server, client, tmp_path):
    round_is(client, 1)
    pointer = EtcdPointer(server.access, "j", Disk(tmp_path))
    for step in (1, 2, 3):
        made = pointer.commit(whole(tmp_path, step, 1), Keep(2), 1)
    for saved in made.checkpoint.saved:
        FilePointer(tmp_path).forget(saved.name)
        Disk(tmp_path).remove(saved.name)
    assert [s.step for s in pointer.commit(whole(tmp_path, 4, 1), Keep(2), 1).checkpoint.saved] == [3, 4]
    pointer.commit(whole(tmp_path, 5, 1), Keep(2), 1)
    assert [s.step for s in FilePointer(tmp_path).read().saved] == [4, 5]
    pointer.close()


def test_what_others_have_committed_is_not_taken_for_this_job_s_where_etcd_does_not_say(tmp_path):
    other = whole(tmp_path, 7, 1)
    FilePointer(tmp_path).commit(other, Keep())
    with Warden.start() as warden:
        service = SaverService(warden, EtcdAccess(("127.0.0.1:1",), timeout_s=0.1), "j")
        queries = SaverQueries(service.name, str(tmp_path))
        there = queries.committed(own=False)
        assert there is not None and there.saved == (other,)
        with pytest.raises(CommittedUnknown, match="cannot be read: reading etcd failed"):
            queries.committed(own=True)
        service.close()
    assert queries.committed(own=False) is None, "the file is there to be read"
    with pytest.raises(CommittedUnknown, match="the checkpoints of this job are not known"):
        queries.committed(own=True)
    queries.close()


def test_a_commit_waits_for_an_etcd_that_is_away_and_gives_up_in_the_end(tmp_path):
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    nobody = EtcdAccess(("127.0.0.1:9",), timeout_s=0.1)
    pointer = EtcdPointer(nobody, "j", Disk(tmp_path), patience_s=1.2, clock=lambda: now[0], sleep=sleep)
    with pytest.raises(CommitRefused, match="etcd is unavailable"):
        pointer.commit(saved(1, 1), Keep(), 1)
    assert now[0] >= 1.2
    assert not FilePointer(tmp_path).read().saved
    now[0] = 0.0
    assert not pointer.witness(1), "nobody is taken for in time meanwhile"
    assert now[0] >= 1.2
    pointer.close()


def test_a_copy_that_was_not_written_is_written_later(server, client, tmp_path: Path):
    round_is(client, 1)
    EtcdPointer(server.access, "j", Disk(tmp_path)).commit(whole(tmp_path, 5, 1), Keep(), 1)
    (tmp_path / "committed.json").unlink()
    settle(server.access, "j")
    assert b'"step":5' in (tmp_path / "committed.json").read_bytes()


def test_nothing_is_written_to_a_folder_that_etcd_names_and_no_checkpoint_of_the_job_is_in(
    server, client, tmp_path: Path
):
    client.transact("j", (), (Put("checkpoint", Checkpoint(str(tmp_path), (saved(5, 1),))),))
    settle(server.access, "j")
    assert not list(tmp_path.iterdir())


def test_what_was_handed_over_in_time_is_committed_though_the_next_round_has_begun(server, client, tmp_path):
    pointer = EtcdPointer(server.access, "j", Disk(tmp_path))
    round_is(client, 3, Phase.CLOSING)
    assert pointer.witness(3)  # the time when the shard was handed over
    round_is(client, 5)
    pointer.commit(saved(6, 3), Keep(), 3, in_time=True)
    assert committed(client) == [6]
    assert not pointer.witness(3)  # workers of that round that still live come too late
    pointer.commit(saved(2, 5), Keep(), 5)
    with pytest.raises(CommitRefused, match="round 5 has committed since"):
        pointer.commit(saved(7, 3), Keep(), 3, in_time=True)
    assert committed(client) == [6, 2]
    pointer.close()


class Mute:
    """An etcd that applies what ``pointer`` commits and does not answer. Its next calls raise ``then``."""

    def __init__(self, pointer: EtcdPointer, then: StoreError) -> None:
        self._client, self._then = pointer._client, then
        self.took = False
        pointer._client = self  # type: ignore[assignment]

    def get(self, job: str, key: str) -> Entry | None:
        if self.took:
            raise self._then
        return self._client.get(job, key)

    def transact(self, *args: Any) -> NoAnswer:
        assert isinstance(self._client.transact(*args), Applied)
        self.took = True
        return NoAnswer("no answer")

    def close(self) -> None:
        self._client.close()


@pytest.mark.parametrize(
    "then",
    [
        StoreUnavailable("gone"),
        StoreRefused("the certificate has run out"),
        TokenExpired("it does not know our login"),
    ],
)
def test_a_checkpoint_that_etcd_may_have_committed_is_not_removed_without_an_answer(
    server, client, tmp_path, then
):
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 100 * seconds

    pointer = EtcdPointer(server.access, "j", Disk(tmp_path), clock=lambda: now[0], sleep=sleep)
    round_is(client, 3)
    with serving(lambda _: pointer) as saver:
        hands_over(saver.name, str(tmp_path), 3, 5, last=1).close()
        assert saver.fate().fate is Fate.COMMITTED
        etcd = Mute(pointer, then)
        hands_over(saver.name, str(tmp_path), 3, 6, last=1).close()
        report = saver.fate()
        assert report.fate is Fate.FAILED and report.why.endswith("; the commit may have succeeded")
    assert etcd.took and committed(client) == [6]
    assert {parse_folder(n).step for n in Disk(tmp_path).names() if parse_folder(n)} == {5, 6}
    settle(server.access, "j")  # as the next saver does
    newest = FilePointer(tmp_path).read().newest
    assert newest is not None and open_manifest(Disk(tmp_path), newest).step == 6


def test_a_saver_commits_once_an_etcd_that_stood_still_goes_on(server, client, tmp_path):
    asked_again = threading.Event()

    def sleep(seconds: float) -> None:
        asked_again.set()
        time.sleep(seconds)

    access = replace(server.access, timeout_s=0.3)
    pointer = EtcdPointer(access, "j", Disk(tmp_path), sleep=sleep)
    round_is(client, 3)
    transact = pointer._client.transact

    def stops(*args: Any) -> Answer:
        if not asked_again.is_set():
            freeze(server.pid)
        return transact(*args)

    with serving(lambda _: pointer) as saver:
        line = hands_over(saver.name, str(tmp_path), 3, 5)
        assert saver.fate().step == 5
        pointer._client.transact = stops  # type: ignore[method-assign,assignment]
        try:
            hands_over_more(line, 3, 6)
            assert asked_again.wait(60.0)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        report = saver.fate()
        assert (report.fate, report.step) == (Fate.COMMITTED, 6), report.why
        assert committed(client) == [5, 6] == [s.step for s in FilePointer(tmp_path).read().saved]
        line.close()


def test_what_others_read_is_what_etcd_says_when_it_is_written(server, client, tmp_path):
    round_is(client, 3)
    one, two = (EtcdPointer(server.access, "j", Disk(tmp_path)) for _ in range(2))
    write = one._copied

    def late(made: Commit) -> Commit:
        two.commit(saved(6, 3), Keep(), 3)
        return write(made)

    one._copied = late  # type: ignore[method-assign]
    made = one.commit(saved(5, 3), Keep(), 3)
    assert [s.step for s in made.checkpoint.saved] == [5, 6]
    assert [s.step for s in FilePointer(tmp_path).read().saved] == [5, 6]
    for pointer in (one, two):
        pointer.close()


def test_a_job_may_commit_to_two_folders_at_once(server, client, tmp_path):
    round_is(client, 3)
    one, two = (EtcdPointer(server.access, "j", Disk(tmp_path / name)) for name in ("one", "two"))
    write = one._copied

    def late(made: Commit) -> Commit:
        two.commit(saved(6, 3), Keep(), 3)
        return write(made)

    one._copied = late  # type: ignore[method-assign]
    assert [s.step for s in one.commit(saved(5, 3), Keep(), 3).checkpoint.saved] == [5]
    assert [s.step for s in FilePointer(tmp_path / "one").read().saved] == [5]
    assert [s.step for s in FilePointer(tmp_path / "two").read().saved] == [6]
    for pointer in (one, two):
        pointer.close()


@pytest.mark.parametrize("in_time", [True, False])
def test_nothing_is_removed_while_others_go_by_a_file_that_cannot_be_written(
    server, client, tmp_path, monkeypatch, in_time
):
    replaced = Disk.replace

    def full(disk: Disk, name: str, content: bytes, *, over: str | None = None) -> None:
        if name == POINTER and committed(client) == [6] and not there_is_room.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        replaced(disk, name, content, over=over)

    there_is_room = threading.Event()
    monkeypatch.setattr(Disk, "replace", full)
    said: list[str] = []
    round_is(client, 3)
    with serving(lambda store: EtcdPointer(server.access, "j", store), say=said.append) as saver:
        for step in (5, 6):
            hands_over(saver.name, str(tmp_path), 3, step, last=1).close()
            assert saver.fate().fate is Fate.COMMITTED
        why = f"No space left on device ({POINTER})"
        assert said == [f"step 6 is committed, but {POINTER} does not name it yet: {why}"]
        newest = FilePointer(tmp_path).read().newest
        assert newest is not None and open_manifest(Disk(tmp_path), newest).step == 5
        if in_time:
            there_is_room.set()
    there = FilePointer(tmp_path).read().saved
    assert [open_manifest(Disk(tmp_path), s).step for s in there] == [6 if in_time else 5]
    assert len([n for n in Disk(tmp_path).names() if parse_folder(n)]) == (1 if in_time else 2)
    if not in_time:  # a job without this etcd will not find the checkpoint
        last = saver.fate()
        assert (last.fate, last.step) == (Fate.FAILED, 6)
        assert last.why == f"it is committed, but {POINTER} could not be updated: {why}"
    assert saver.told.empty()


def test_a_folder_that_another_job_commits_to_is_left_to_that(server, client, tmp_path):
    for job in ("j", "k"):
        now = Round(3, Phase.LIVE, (), "x:1", Cause.START, 1.0)
        client.transact(job, (), (Put("round", now),))
    mine, other = (EtcdPointer(server.access, job, Disk(tmp_path)) for job in ("j", "k"))
    mine.commit(whole(tmp_path, 5, 3), Keep(), 3)
    other.commit(saved(2, 4), Keep(), 3)
    mentioned = FilePointer(tmp_path).read()
    with pytest.raises(CommitRefused, match="another job has committed step 2 to .*; give each job a folder"):
        mine.commit(saved(9, 5), Keep(), 3)
    settle(server.access, "j")
    assert FilePointer(tmp_path).read() == mentioned and [s.step for s in mentioned.saved] == [5, 2]
    other.commit(saved(3, 4), Keep(), 3)
    for pointer in (mine, other):
        pointer.close()


def test_a_folder_that_another_run_went_on_in_is_told_before_the_training(server, client, tmp_path):
    round_is(client, 3)
    with closing(EtcdPointer(server.access, "j", Disk(tmp_path))) as pointer:
        pointer.commit(whole(tmp_path, 1000, 3), Keep(), 3)
        FilePointer(tmp_path).commit(whole(tmp_path, 2000, 4), Keep())
        said: list[str] = []
        settle(server.access, "j", said.append)
        [words] = said
        assert (
            "resumes from its own step 1000 and can save no more there: another job has committed step 2000"
            in words
        )
        assert "call `elasticd forget j`" in words
        assert [saved.step for saved in pointer.read().saved] == [1000]
        assert [saved.step for saved in FilePointer(tmp_path).read().saved] == [1000, 2000]


def test_while_etcd_is_away_what_is_committed_is_told_by_the_file_and_a_saver_without_work_ends(tmp_path):
    nowhere = EtcdAccess(("127.0.0.1:9",), timeout_s=0.5)
    known = FilePointer(tmp_path).commit(whole(tmp_path, 1, 1), Keep()).checkpoint
    with (
        serving(lambda store: EtcdPointer(nowhere, "j", store), agent=os.getpid()) as saver,
        ExitStack() as lines,
    ):
        for number in range(3):  # the saver asks etcd for the round of each
            line = lines.enter_context(closing(protocol.connect(saver.name)))
            line.send(OpenWorld(str(tmp_path), f"{number:08x}", 0, 1, 2, 2, (0,), "", 3, 0))
        asker = lines.enter_context(closing(protocol.connect(saver.name)))
        asker.send(AskKnown(str(tmp_path)))
        assert protocol.answer(asker)[0] == Known(known)


def test_a_record_in_etcd_that_names_no_folder_ends_no_saver(server, client, tmp_path):
    nul = Checkpoint(f"{tmp_path}/\0", (saved(1, 1),))
    client.transact("j", (), (Put("checkpoint", nul),))
    settle(server.access, "j")


class Watched(EtcdPointer):
    """A pointer that reports when it has read the round, and commits only when the test permits it."""

    def __init__(self, access: EtcdAccess, store: CheckpointStore) -> None:
        super().__init__(access, "j", store)
        self.witnessed: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.may_commit = threading.Event()

    def witness(self, fence: int) -> bool:
        in_time = super().witness(fence)
        self.witnessed.put(in_time)
        return in_time

    def commit(self, new: Saved, keep: Keep, fence: int, *, in_time: bool = False) -> Commit:
        self.may_commit.wait(60.0)
        return super().commit(new, keep, fence, in_time=in_time)


def test_a_saver_finishes_for_workers_of_a_round_that_is_over_and_for_no_other(server, client, tmp_path):
    pointer = Watched(server.access, Disk(tmp_path))
    with closing(pointer), serving(lambda _: pointer) as saver:
        round_is(client, 3)
        hands_over(saver.name, str(tmp_path), 3, 6).close()  # as if the worker was killed
        assert [pointer.witnessed.get(timeout=60.0) for _ in range(2)] == [
            True,
            True,
        ]  # one for the connection
        round_is(client, 4)
        pointer.may_commit.set()
        assert saver.fate().fate is Fate.COMMITTED
        late = hands_over(saver.name, str(tmp_path), 3, 9)  # the worker lives on beside its successor
        report = saver.fate()
        assert report.fate is Fate.FAILED and "saved in round 3, and now it is round 4" in report.why
        assert committed(client) == [6]
        late.close()


def test_the_saver_leaves_processors_and_disk_to_the_training_until_its_agent_ends(server, client, tmp_path):
    round_is(client, 3)
    with Warden.start() as warden:
        service = SaverService(warden, server.access, "j", bytes_s=1)  # a minute and more for a shard
        line = hands_over(service.name, str(tmp_path), 3, 6)
        for _ in range(5):
            line.send(AskKnown(str(tmp_path)))
            assert isinstance(line.receive()[0], Known)  # not the news that the memory is free
        assert service._starter is not None
        service._starter.join(60.0)  # the saver may answer before the thread knows its pid
        assert os.getpriority(os.PRIO_PROCESS, service._pid) == 19
        service.close()
    line.close()
    assert [report.fate for report in service.reports] == [Fate.COPIED, Fate.COMMITTED]
    assert committed(client) == [6]


class Log:
    """A log that lets tests wait for what is ``said``."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def info(self, event: str, **facts: object) -> None:
        self.said.put(event)

    warning = info


@pytest.mark.parametrize(
    ("finish_s", "hurried_s"),
    # in the last case the agent was asked to leave before
    [(FINISH_S_MAX, None), (FINISH_S_MAX, 0.1), (1000.0, 1000.0)],
)
def test_an_agent_waits_for_what_was_handed_over_unless_it_is_hurried(
    server, client, tmp_path, monkeypatch, finish_s, hurried_s
):
    log, hurried = Log(), hurried_s is not None
    monkeypatch.setattr(saver_service, "_log", log)
    if hurried:
        monkeypatch.setattr(saver_service, "FINISH_S", hurried_s)
    round_is(client, 3)
    with Warden.start() as warden:
        service = SaverService(warden, server.access, "j")
        with disk.locked(tmp_path / f".{POINTER}.lock"):  # a store that is not ready yet
            line = hands_over(service.name, str(tmp_path), 3, 5)
            while not isinstance(line.receive()[0], BufferFree):
                pass
            closing = threading.Thread(target=service.close, args=(finish_s,))
            closing.start()
            assert log.said.get(timeout=60.0) == "saver.finishing"
            assert closing.is_alive() and not service.unsaved
            if hurried:
                service.hurry()
                closing.join(60.0)
        closing.join(60.0)
        assert not closing.is_alive()
        line.close()
    fates = [report.fate for report in service.reports]
    if hurried:
        assert fates == [Fate.COPIED]
        assert service.unsaved == "the checkpoints that the saver had not written when it was killed"
    else:
        assert fates == [Fate.COPIED, Fate.COMMITTED] and not service.unsaved
        assert [s.step for s in FilePointer(tmp_path).read().saved] == [5]


WORKER = """
import os, select, sys
from tests.daemon.handing_over import hands_over

class Poll:
    def __init__(self):
        self._poll = poll()
        self.register = self._poll.register
    def poll(self, *timeout):
        print("waits", flush=True)
        return self._poll.poll(*timeout)

poll, select.poll = select.poll, Poll
hands_over(sys.argv[1], sys.argv[2], 3, 5)
os._exit(0)
"""


def test_a_worker_hands_over_nothing_before_its_saver_has_seen_whose_it_is(server, client, tmp_path):
    """The worker ends right after the handover, when the saver could no longer check the process."""
    round_is(client, 3)
    with Warden.start() as warden:
        service = SaverService(warden, server.access, "j")
        protocol.connect(service.name).close()
        saver = psutil.Process(service._pid)
        saver.suspend()
        argv = [sys.executable, "-c", WORKER, service.name, str(tmp_path)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as worker:
            assert worker.stdout is not None
            worker.stdout.readline()  # the worker waits, or has ended
            saver.resume()
            assert worker.wait() == 0
        service.close()
    assert [report.fate for report in service.reports] == [Fate.COPIED, Fate.COMMITTED]
    assert committed(client) == [5]


def test_a_saver_that_could_not_be_started_is_started_later(tmp_path, monkeypatch):
    spawn = Warden.spawn_service
    tries: list[object] = []

    def fails_once(warden, *args, **kwargs):
        tries.append(args)
        if len(tries) == 1:
            raise WardenError("cannot fork: Resource temporarily unavailable")
        return spawn(warden, *args, **kwargs)

    monkeypatch.setattr(Warden, "spawn_service", fails_once)
    with Warden.start() as warden:
        service = SaverService(warden, EtcdAccess(("127.0.0.1:1",), timeout_s=0.1), "j")
        line = protocol.connect(service.name)
        line.send(AskKnown(str(tmp_path)))
        assert isinstance(line.receive()[0], Known | KnownUnreadable)
        line.close()
        service.close()
    assert len(tries) == 2


def test_a_process_of_the_same_user_that_is_no_worker_plants_nothing(tmp_path):
    """The test's process sends the messages of a worker. In a real run the worker's agent is its ancestor."""
    named, go_on = tmp_path / "named", tmp_path / "go_on"
    os.mkfifo(named)
    os.mkfifo(go_on)
    script = f'echo "$ELASTICD_SAVER" > {named}; cat {go_on}'
    options = ("--standalone", "--http=off", "--nproc-per-node=1", "--no-python")
    with (tmp_path / "said").open("w") as said:
        job = forkserver.Forked(
            ["elasticd", "run", *options, "sh", "-c", script],
            env=os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")},
            cwd=tmp_path,
            stdout=said.fileno(),
            stderr=said.fileno(),
        )
    try:
        name = named.read_text().strip()
        (tmp_path / "run").mkdir()
        with pytest.raises(ChannelClosed):
            plant(name, str(tmp_path / "run"))
        go_on.write_text("")
        assert job.wait(240) == 0
    finally:
        job.kill()
    assert "no worker of this job was rejected" in (tmp_path / "said").read_text()
    assert list((tmp_path / "run").iterdir()) == []


def plant(saver: str, path: str) -> None:
    """Plant a step that workers would prefer to all others when they resume. Raises ChannelClosed."""
    line = hands_over(saver, path, 1, 999_999)
    try:
        while line.receive():
            pass
    finally:
        line.close()
