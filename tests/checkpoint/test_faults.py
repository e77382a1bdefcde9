"""Processes are killed, and disks are full, slow or failing, at any instant. No load is torn, and no
committed checkpoint is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from elasticd.channel.codec import ChannelClosed
from elasticd.channel.framing import close_all
from elasticd.checkpoint import protocol
from elasticd.checkpoint.newest.pointer import POINTER, FilePointer
from elasticd.checkpoint.protocol import (
    SAVER_TO_WORKER,
    WORKER_TO_SAVER,
    Alive,
    AllHeld,
    AskAlive,
    AskKnown,
    AskOffers,
    AskShards,
    BufferFree,
    BufferTorn,
    MissSave,
    Offers,
    OpenWorld,
    PlanShard,
    SaveCommitted,
    SaveFailed,
    SaverChannel,
    SaverToWorker,
    SaveShard,
    SaveWritten,
    ShardHeld,
    ShareBuffer,
    memory_file,
)
from elasticd.checkpoint.server import standalone
from elasticd.checkpoint.server.save_report import Footprint
from elasticd.checkpoint.shared_memory import Memory
from elasticd.checkpoint.storage import disk
from elasticd.core.checkpoint_names import folder_name
from elasticd.worker.checkpoints import Checkpoints
from tests.checkpoint.faults import Helper, check, commit, filled, held_by, served
from tests.daemon.handing_over import NO_SHARES

TRIES = 100
TRIES_OF_WORKERS = 25  # each begins with a load
Saving = Callable[..., Checkpoints]


@pytest.fixture
def saving(forker: Helper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Saving]:
    """Opens checkpoints in a folder of the test, each time with a new saver with these options."""
    made: list[Checkpoints] = []

    def open_(path: Path = tmp_path / "run", last: int = 3, **saver: object) -> Checkpoints:
        monkeypatch.setenv("ELASTICD_SAVER", forker.saver(**saver)[0])
        made.append(Checkpoints(path, last=last))
        return made[-1]

    yield open_
    for checkpoints in made:
        checkpoints.close()


def resumed(path: Path) -> int:
    """Return the step from which a new process would continue. Its whole state must be of that step."""
    state = filled(0)
    reader = Checkpoints(path)
    step = reader.load(state) or 0
    reader.close()
    check(state, step)
    return step


def folders(path: Path) -> set[str]:
    return {p.name for p in path.iterdir() if p.is_dir()}


def die_at_random(forker: Helper, path: Path, tries: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Kill the saver with SIGKILL at random instants of saves. Return how often it had begun to commit."""
    chance = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    step = committed = commits = 0
    for _ in range(tries):
        name, pid = forker.saver()
        monkeypatch.setenv("ELASTICD_SAVER", name)
        checkpoints = Checkpoints(path, last=2)
        for _ in range(chance.choice((1, 1, 2, 3))):
            step += 1
            checkpoints.save(filled(step), step)
        time.sleep(chance.random() * 0.02)  # a random instant
        os.kill(pid, signal.SIGKILL)
        checkpoints.wait(60.0)
        newest = checkpoints.newest.step if checkpoints.newest else 0
        checkpoints.close()
        found = resumed(path)
        assert found >= max(committed, newest), "a committed checkpoint was lost"
        commits += found > committed
        committed = found
    return commits


def test_a_saver_killed_at_any_instant_leaves_what_was_committed(forker, saving, tmp_path, monkeypatch):
    die_at_random(forker, tmp_path / "run", TRIES, monkeypatch)
    last = saving(last=2)
    commit(last, 10_000)
    last.close()
    assert resumed(tmp_path / "run") == 10_000
    assert len(folders(tmp_path / "run")) <= 2, "leftovers stay"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_saver_killed_a_thousand_times(forker, tmp_path, monkeypatch):
    assert die_at_random(forker, tmp_path / "run", 1000, monkeypatch) > 10


def test_a_worker_killed_at_any_instant_loses_nothing_it_had_handed_over(forker, worlds, tmp_path):
    path = tmp_path / "run"
    chance = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    name, _ = forker.saver(linger_s=60.0)
    for _ in range(TRIES_OF_WORKERS):
        worlds.ask(rank=0, size=1, saver=name, node="", path=str(path), kind="replicated", saves=0)
        _, _, pid = worlds.until("pid")
        worlds.until("resumed")
        _, _, step, folder = worlds.until("handed")
        time.sleep(chance.random() * 0.02)  # a random instant
        os.kill(int(pid), signal.SIGKILL)
        while not (told := [line for line in forker.said if folder in line]):
            forker.until("")
        # A worker before this one may have had saves under way. This worker has not continued from them.
        assert told[0].startswith(f"committed step {step} ") or "has committed since" in told[0]
        assert resumed(path) >= 1  # and whole
    assert not [line for line in worlds.said if line.startswith("error")]


CALLS = [("write", n) for n in range(4)] + [("fsync", n) for n in range(8)] + [("rename", 0), ("open", 3)]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize(("call", "fine"), CALLS)
def test_an_error_at_any_call_fails_one_checkpoint_and_no_other(forker, saving, tmp_path, call, fine, code):
    path = tmp_path / "run"
    before = saving()
    commit(before, 1)
    before.close()
    checkpoints = saving(fail=[call, fine, 1, code])
    checkpoints.save(filled(2), 2)
    assert checkpoints.wait()
    if checkpoints.failed:
        assert os.strerror(code) in checkpoints.last_error
        assert resumed(path) == 1
    else:
        assert resumed(path) == 2
    assert checkpoints.save(filled(3), 3) and checkpoints.wait()
    assert checkpoints.newest is not None and checkpoints.newest.step == 3
    assert resumed(path) == 3
    checkpoints.close()
    forker.until("committed step 3 ")
    assert f"spoiled {call}" in forker.said
    assert folders(path) == {saved.name for saved in FilePointer(path).read().saved}, "leftovers stay"


def test_each_file_is_durable_before_the_next_depends_on_it(forker, saving, tmp_path):
    path = tmp_path / "run"
    commit(saving(record=True), 1)
    [folder] = folders(path)
    forker.until("committed step 1 ")
    done = [line.replace(f"{path}/", "").replace(folder, "FOLDER") for line in forker.said]
    first, fresh = dict.fromkeys(line.split()[1] for line in done if line.endswith(".new"))
    assert [line for line in done if line.startswith(("opens", "syncs", "renames"))] == [
        f"syncs {tmp_path}",  # for the name of the folder of all checkpoints
        f"syncs {path}",  # for the name of this checkpoint's folder
        "opens FOLDER/__0_0.distcp",
        "syncs FOLDER/__0_0.distcp",
        "opens FOLDER/.metadata",
        "syncs FOLDER/.metadata",
        "syncs FOLDER",
        "opens .committed.json.lock",
        f"opens {first}",
        f"syncs {first}",
        f"renames {first} committed.json",  # a record that names a checkpoint which does not exist
        f"syncs {path}",
        "opens FOLDER/elasticd.json",
        "syncs FOLDER/elasticd.json",
        "syncs FOLDER",
        "opens .committed.json.lock",
        f"opens {fresh}",
        f"syncs {fresh}",
        f"renames {fresh} committed.json",
        f"syncs {path}",
    ]


@pytest.mark.parametrize(("call", "fine"), [("listdir", 3), ("scandir", 0)])
def test_an_error_once_it_is_committed_costs_no_checkpoint(forker, saving, tmp_path, call, fine):
    path = tmp_path / "run"
    checkpoints = saving(last=1, fail=[call, fine, 1, errno.EIO])
    commit(checkpoints, 1, 2)  # at the first commit there is no checkpoint to remove
    forker.until("committed step 2 ")
    assert f"spoiled {call}" in forker.said
    assert resumed(path) == 2
    assert len(folders(path)) == 2, "the older one could not be removed yet"
    commit(checkpoints, 3)
    forker.until("committed step 3 ")
    assert resumed(path) == 3 and len(folders(path)) == 1


def test_what_counted_before_a_pointer_that_may_not_be_durable_stays(forker, saving, tmp_path):
    path = tmp_path / "run"
    checkpoints = saving(last=1, fail=["fsync", 18, 1, errno.EIO])
    commit(checkpoints, 1)
    before = (path / POINTER).read_bytes()
    commit(checkpoints, 2)
    after = (path / POINTER).read_bytes()
    forker.until("committed step 2 ")
    assert "spoiled fsync" in forker.said
    assert resumed(path) == 2
    (path / POINTER).write_bytes(before)  # as after a power cut
    assert resumed(path) == 1
    (path / POINTER).write_bytes(after)
    commit(checkpoints, 3)
    assert resumed(path) == 3 and len(folders(path)) == 1


def test_what_one_killed_while_it_wrote_the_pointer_left_goes_with_the_next_commit(forker, saving, tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / f".{POINTER}.0123abcd.new").write_bytes(b"{")
    (path / f".{POINTER}.mine").touch()
    commit(saving(), 1)
    forker.until("committed step 1 ")
    files = {p.name for p in path.iterdir() if p.is_file()}
    assert files == {POINTER, f".{POINTER}.lock", f".{POINTER}.mine"}


def test_two_that_replace_a_file_at_the_same_moment_leave_one_of_the_two(tmp_path, monkeypatch):
    sync, done = os.fsync, []

    def sync_slowly(fd):
        if not done:
            done.append(fd)
            disk.replace_file(tmp_path / "x", b"the other's, which is longer")
        sync(fd)

    monkeypatch.setattr(os, "fsync", sync_slowly)
    disk.replace_file(tmp_path / "x", b"one's")
    assert done and (tmp_path / "x").read_bytes() == b"one's"
    assert os.listdir(tmp_path) == ["x"]


def test_a_full_disk_fails_checkpoints_until_there_is_room(saving, tmp_path):
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=7m", "none", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no right to mount a small disk: {mounted.stderr.strip()}")
    try:
        checkpoints = saving(disk / "run", last=1)
        commit(checkpoints, 1, 2)
        (disk / "ballast").write_bytes(bytes(4_000_000))
        assert checkpoints.save(filled(3), 3) and checkpoints.wait() and checkpoints.failed == 1
        assert "No space left" in checkpoints.last_error
        assert resumed(disk / "run") == 2
        (disk / "ballast").unlink()
        assert checkpoints.save(filled(4), 4) and checkpoints.wait() and checkpoints.failed == 1
        assert resumed(disk / "run") == 4
        checkpoints.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_store_that_does_not_say_what_was_saved_before_costs_no_save_but_that(
    forker, tmp_path, monkeypatch
):
    path = tmp_path / "run"
    monkeypatch.setenv("ELASTICD_SAVER", forker.saver()[0])
    monkeypatch.setenv("ELASTICD_ROUND", "7")
    before = Checkpoints(path)
    commit(before, 1)
    monkeypatch.setenv("ELASTICD_ROUND", "1")  # as with a new etcd
    last_round, asked = FilePointer.last_round, []

    def fails_once(pointer):
        asked.append(pointer)
        if len(asked) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), POINTER)
        return last_round(pointer)

    monkeypatch.setattr(FilePointer, "last_round", fails_once)
    checkpoints = Checkpoints(path)
    checkpoints.save(filled(2), 2)
    assert checkpoints.wait() and checkpoints.failed == 1
    assert checkpoints.last_error == (
        "the checkpoint of step 2 was not saved: the earlier saves cannot be listed: "
        f"Input/output error ({POINTER})"
    )
    assert checkpoints.save(filled(3), 3) and checkpoints.wait() and checkpoints.failed == 1
    before.close()
    checkpoints.close()
    newest = FilePointer(path).read().newest
    assert newest is not None and (newest.step, newest.round) == (3, 8)


def test_the_rate_holds_up_neither_training_that_waits_for_the_disk_nor_what_those_who_left_handed_over(
    forker, saving
):
    checkpoints = saving(bytes_s=1)  # a save takes days
    commit(checkpoints, 1)
    assert checkpoints.save(filled(2), 2)
    checkpoints._line.listen_while(lambda: True, 0.1)
    assert checkpoints._pending
    checkpoints.close()
    forker.until("committed step 2 ")


def test_saves_are_skipped_and_counted_while_those_before_them_cannot_be_committed(saving, tmp_path):
    path = tmp_path / "run"
    checkpoints = saving(last=9)
    path.mkdir()
    with disk.locked(path / f".{POINTER}.lock"):
        handed_over: list[int] = []
        step = 0
        while checkpoints.skipped < 20:
            step += 1
            if checkpoints.save(filled(step), step):
                handed_over.append(step)
                checkpoints.wait(0.2)  # until the shard is written and its memory is free
        assert len(folders(path)) <= len(handed_over) == 4
    assert checkpoints.wait() and not checkpoints.failed
    assert [saved.step for saved in FilePointer(path).read().saved] == handed_over
    assert checkpoints.save(filled(99), 99)


def test_a_saver_that_is_stopped_costs_checkpoints_and_not_the_training(forker, tmp_path, monkeypatch):
    name, pid = forker.saver()
    monkeypatch.setenv("ELASTICD_SAVER", name)
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.save(filled(1), 1) and checkpoints.wait()
    os.kill(pid, signal.SIGSTOP)
    try:
        saved = [step for step in range(2, 1000) if checkpoints.save(filled(2), step)]
        assert len(saved) == 2 and checkpoints.skipped == 996
        assert not checkpoints.failed
    finally:
        os.kill(pid, signal.SIGCONT)
    assert checkpoints.wait() and not checkpoints.failed
    assert checkpoints.newest is not None and checkpoints.newest.step == saved[-1]
    checkpoints.close()


def test_a_shard_for_which_there_is_no_memory_fails_one_checkpoint_and_no_other(
    saving, tmp_path, monkeypatch
):
    checkpoints = saving()
    with monkeypatch.context() as full:
        full.setattr("elasticd.checkpoint.shared_memory.available", lambda: 1000)
        checkpoints.save(filled(1), 1)
        assert checkpoints.wait() and checkpoints.failed == 1
    assert "rank 0 could not copy its shard: there is no memory for" in checkpoints.last_error
    assert "only 1000 bytes are available" in checkpoints.last_error
    assert checkpoints.save(filled(2), 2) and checkpoints.wait() and checkpoints.failed == 1
    assert resumed(tmp_path / "run") == 2


def test_two_jobs_that_save_into_one_folder_at_once_never_mix(saving, tmp_path):
    path = tmp_path / "run"
    jobs = [saving(last=2) for _ in range(2)]
    for step in range(1, 11):
        for number, job in enumerate(jobs):
            job.save(filled(step + 100 * number), step + 100 * number)
        resumed(path)  # all of one step
    for job in jobs:
        assert job.wait()
    newest = FilePointer(path).read().newest
    assert newest is not None and resumed(path) == newest.step > 100


# ------------------------------------------------------------ the protocol, without a training

M = TypeVar("M")


Joins = Callable[..., SaverChannel]


@pytest.fixture
def joins(tmp_path: Path) -> Iterator[Joins]:
    """Opens connections of ranks to savers, and closes them at the end. ``locals_``: the ranks that the saver
    serves, if it does not serve all."""
    with contextlib.ExitStack() as lines:

        def join(
            name: str,
            rank: int,
            world: int,
            token: str = "0000000a",
            round: int = 1,
            locals_: Iterable[int] = (),
            path: Path = tmp_path / "run",
        ) -> SaverChannel:
            line = lines.enter_context(contextlib.closing(protocol.connect(name)))
            ranks = tuple(locals_ or range(world))
            line.send(
                OpenWorld(str(path), token, rank, world, round, round, ranks, holder="", last=3, every=0)
            )
            layout = memory_file(NO_SHARES)
            line.send(PlanShard(1, 64), (layout,))
            os.close(layout)
            memory = Memory.make(64)
            line.send(ShareBuffer(1, 0), (memory.fd,))
            return line

        yield join


def hands_over(line: SaverChannel, step: int, name: str, buffer: int = 0) -> None:
    line.send(SaveShard(1, buffer, step, name, at=1.0))


def hears(line: SaverChannel, kind: type[M]) -> M:
    while not isinstance(heard := line.receive()[0], kind):
        pass
    return heard


def test_a_rank_that_goes_before_it_hands_over_fails_the_checkpoint_by_name(forker, joins, tmp_path):
    name, _ = forker.saver()
    one, two = (joins(name, rank, 2) for rank in range(2))
    folder = folder_name(5, 1, "0000000a", 1)
    hands_over(one, 5, folder)
    hears(one, BufferFree)
    two.close()
    failed = hears(one, SaveFailed)
    assert failed.name == folder and "rank 1 left before it had handed over its shard" in failed.why
    assert FilePointer(tmp_path / "run").read().newest is None


def test_a_rank_that_cannot_copy_fails_this_checkpoint_and_no_later_one(forker, joins, tmp_path):
    name, _ = forker.saver()
    lines = [joins(name, rank, 2) for rank in range(2)]
    first, second = (folder_name(step, 1, "0000000a", step) for step in (5, 6))
    lines[1].send(MissSave(first, 5, "there is no memory"))
    assert "rank 1 could not copy its shard: there is no memory" in hears(lines[0], SaveFailed).why
    hands_over(lines[0], 5, first)  # after the other rank's message
    hears(lines[0], BufferFree)
    for line in lines:
        hands_over(line, 6, second)
    assert hears(lines[0], SaveCommitted).step == 6
    assert folders(tmp_path / "run") == {second}


def test_a_rank_that_cannot_copy_on_another_node_is_not_waited_for(forker, joins):
    here, there = (joins(forker.saver()[0], r, 2, locals_=[r]) for r in range(2))
    name = folder_name(5, 1, "0000000a", 1)
    hands_over(here, 5, name)
    there.send(MissSave(name, 5, "there is no memory"))
    assert "rank 1 could not copy its shard: there is no memory" in hears(here, SaveFailed).why


def test_a_shard_lost_on_another_node_is_waited_for_only_until_that_node_has_written_a_later_one(
    forker, joins, tmp_path
):
    mute = forker.saver(fail=["rename", 0, 2, errno.EIO])  # the saver can write no receipt, good or bad
    here, there = (joins(name, r, 2, locals_=[r]) for r, (name, _) in enumerate((forker.saver(), mute)))
    names = {step: folder_name(step, 1, "0000000a", step) for step in (5, 6)}
    for step, name in names.items():
        for line in (here, there):
            hands_over(line, step, name)
            hears(line, BufferFree)
        if step == 5:
            assert "could not be notified" in hears(there, SaveFailed).why
    failed = hears(here, SaveFailed)
    assert failed.step == 5
    assert failed.why == "the shard of rank 1, which is on another node, never arrived, but step 6 did"
    assert hears(here, SaveCommitted).step == 6
    assert folders(tmp_path / "run") == {names[6]}


def test_the_world_after_one_whose_other_node_is_lost_is_not_held_up(forker, joins):
    name, _ = forker.saver()
    old = joins(name, 0, 2, "0000000a", 1, locals_=[0])
    hands_over(old, 5, folder_name(5, 1, "0000000a", 1))
    hears(old, BufferFree)
    new = joins(name, 0, 1, "0000000b", 2)
    hands_over(new, 6, folder_name(6, 2, "0000000b", 1))
    assert hears(new, SaveCommitted).step == 6


def test_a_rank_that_never_came_fails_what_the_others_handed_over_once_they_are_gone(forker, joins):
    name, pid = forker.saver(linger_s=60.0)
    one = joins(name, 0, 2)
    hands_over(one, 5, folder_name(5, 1, "0000000a", 1))
    hears(one, BufferFree)
    one.close()
    assert "rank 1 left before it had handed over its shard" in " ".join(
        forker.until("step 5 was not saved as")
    )
    new = joins(name, 0, 1, "0000000b", 2)
    hands_over(new, 6, folder_name(6, 2, "0000000b", 1))
    hears(new, SaveCommitted)
    assert held_by(pid) == 64  # the saver has nothing of the world before


def test_worlds_of_several_nodes_that_save_once_each_do_not_fill_the_memory(forker, joins):
    name, pid = forker.saver(linger_s=60.0)
    for round in range(1, 13):
        token = f"{round:08x}"
        line = joins(name, 1, 2, token, round, locals_=[1])
        hands_over(line, round, folder_name(round, round, token, 1))
        hears(line, SaveWritten)
        line.close()
    assert held_by(pid) <= 4 * 64  # the newest, two before it, and one that has just come


def test_of_worlds_of_several_nodes_five_shards_of_a_worker_are_held_at_most_and_two_in_the_end(joins):
    footprints: list[Footprint] = []
    with served(occupies=footprints.append) as name:
        for round, saves in enumerate((3, 1, 3), start=1):
            token = f"{round:08x}"
            line = joins(name, 1, 2, token, round, locals_=[1])
            for number in range(saves):
                buffer = number % 2
                if number == 1:
                    memory = Memory.make(64)
                    line.send(ShareBuffer(1, 1), (memory.fd,))
                line.send(BufferTorn(buffer))
                hands_over(line, number, folder_name(number, round, token, number), buffer)
                hears(line, SaveWritten)
            before = footprints[-1]
            line.close()
        assert before.own == 2 * 64
    assert max(footprint.own for footprint in footprints) == 5 * 64


def test_one_writer_that_fails_beside_others_that_do_not_publishes_nothing(forker, joins, tmp_path):
    name, _ = forker.saver()
    lines = [joins(name, rank, 4) for rank in range(4)]
    folder = folder_name(7, 1, "0000000a", 1)
    (tmp_path / "run" / folder).mkdir(parents=True)
    (tmp_path / "run" / folder / "__2_0.distcp").touch()  # rank 2's shard cannot be written
    for line in lines:
        hands_over(line, 7, folder)
    for line in lines:
        assert "the shard of rank 2 could not be written: File exists" in hears(line, SaveFailed).why
        line.close()
    assert FilePointer(tmp_path / "run").read().newest is None


def test_all_gone_after_they_handed_over_is_committed_all_the_same(forker, joins, tmp_path):
    name, _ = forker.saver()
    lines = [joins(name, rank, 3) for rank in range(3)]
    for line in lines:
        hands_over(line, 7, folder_name(7, 1, "0000000a", 1))
        line.close()
    forker.until("committed step 7 ")
    newest = FilePointer(tmp_path / "run").read().newest
    assert newest is not None and (newest.step, newest.world) == (7, 3)


def test_a_world_of_an_older_round_cannot_commit(forker, joins, tmp_path):
    name, _ = forker.saver()
    old = joins(name, 0, 1, "0000000a", 1)
    new = joins(name, 0, 1, "0000000b", 2)
    hands_over(new, 5, folder_name(5, 2, "0000000b", 1))
    hears(new, SaveCommitted)
    hands_over(old, 9, folder_name(9, 1, "0000000a", 1))
    assert "round 2 has committed since" in hears(old, SaveFailed).why
    newest = FilePointer(tmp_path / "run").read().newest
    assert newest is not None and newest.step == 5


def test_nonsense_ends_that_conversation_and_no_other(forker, joins):
    name, _ = forker.saver(linger_s=60.0)
    good = joins(name, 0, 1)
    empty, layout, long, sparse = os.memfd_create("empty"), *(memory_file(b"") for _ in range(3))
    for liar in (long, sparse):
        os.pwrite(liar, struct.pack("<Q", 1 << 62), 0)
    os.truncate(sparse, (1 << 62) + 8)
    whole = WORKER_TO_SAVER.encode(PlanShard(1, 3))
    for raw, files in (
        (b"[]", []),
        (b"[" * 50_000, []),
        (WORKER_TO_SAVER.encode(SaveShard(1, 0, 5, "x", 1.0)), []),  # a save without a plan
        (SAVER_TO_WORKER.encode(SaveWritten("x")), []),  # a message of savers
        (whole, []),  # without its file
        (whole, [empty]),  # with one that is cut off
        (whole, [long]),  # with one that announces a longer index
        (whole, [sparse]),  # with one that is longer than any memory
        (whole.replace(b"3", b"-3"), [layout]),
        (whole, [empty, empty]),
        (whole[:-1], [empty]),
        (whole.replace(b"3", b'"3"'), [empty]),
        (whole.replace(b"3", b"%d" % (1 << 63)), [layout]),  # of a size beyond 64 bits
    ):
        bad = protocol.connect(name)
        socket.send_fds(bad.socket, [raw], files)
        with pytest.raises(ChannelClosed):
            bad.receive()
        bad.close()
    close_all((empty, layout, long, sparse))
    outside = joins(name, 0, 1, "0000000c")
    hands_over(outside, 1, "../../elsewhere")
    with pytest.raises(ChannelClosed):
        outside.receive()
    hands_over(good, 5, folder_name(5, 1, "0000000a", 1))
    hears(good, SaveCommitted)


def test_a_peer_that_does_not_read_its_answers_stops_no_other_and_gets_all_when_it_reads(
    forker, joins, tmp_path
):
    name, _ = forker.saver(linger_s=60.0)
    folder = folder_name(5, 1, "0000000a", 1)
    past = joins(name, 0, 1)
    hands_over(past, 5, folder)
    hears(past, SaveCommitted)
    past.close()
    deaf = protocol.connect(name)
    deaf.socket.settimeout(5.0)  # until the socket has no room for further questions
    asked = 0
    with contextlib.suppress(ChannelClosed):
        while True:
            deaf.send(AskShards(str(tmp_path / "run"), folder))
            asked += 1
    good = joins(name, 0, 1, path=tmp_path / "other")
    hands_over(good, 5, folder)
    good.socket.settimeout(30.0)
    hears(good, SaveCommitted)
    got: list[type[SaverToWorker]] = []
    while got.count(AllHeld) < asked:
        message, files = deaf.receive()
        close_all(files)
        got.append(type(message))
    assert got.count(ShardHeld) == asked > 100
    deaf.close()


def test_a_saver_without_a_free_descriptor_serves_on_and_admits_workers_later(forker, joins):
    name, saver = forker.saver(linger_s=60.0)
    good = joins(name, 0, 1)
    hands_over(good, 5, folder_name(5, 1, "0000000a", 1))
    hears(good, SaveCommitted)
    used = set(map(int, os.listdir(f"/proc/{saver}/fd")))
    soft, hard = resource.prlimit(saver, resource.RLIMIT_NOFILE)
    free = min(set(range(len(used) + 1)) - used)
    resource.prlimit(saver, resource.RLIMIT_NOFILE, (free, hard))
    late = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    late.connect(f"\0{name}")
    good.send(AskAlive())
    hears(good, Alive)
    resource.prlimit(saver, resource.RLIMIT_NOFILE, (soft, hard))
    assert late.recv(1000)
    late.close()


@pytest.mark.parametrize(
    ("rank", "world", "locals_"),
    [(5, 2, (0, 1, 5)), (-1, 2, (0,)), (0, 0, (0,)), (1, 2, (0,)), (0, 2, (0, 7)), (0, 1 << 40, (0,))],
)
def test_a_rank_that_no_world_has_ends_that_conversation_and_no_other(rank, world, locals_, tmp_path):
    with served() as name, contextlib.ExitStack() as lines:
        liar, good = (lines.enter_context(contextlib.closing(protocol.connect(name))) for _ in range(2))
        liar.send(
            OpenWorld(str(tmp_path), "0000000a", rank, world, 1, 1, locals_, holder="", last=3, every=0)
        )
        with pytest.raises(ChannelClosed):
            liar.receive()
        good.send(AskOffers(str(tmp_path)))
        assert protocol.answer(good)[0] == Offers(())


def test_an_address_that_no_library_takes_ends_that_conversation_and_no_other(monkeypatch, tmp_path):
    def breaks(*_: object, **__: object) -> None:
        raise RuntimeError("a library's own error")

    monkeypatch.setattr("elasticd.checkpoint.server.saver.store_at", breaks)
    with served() as name, contextlib.ExitStack() as lines:
        first, second = (lines.enter_context(contextlib.closing(protocol.connect(name))) for _ in range(2))
        first.send(AskKnown("sftp://host/run"))
        with pytest.raises(ChannelClosed):
            first.receive()
        second.send(AskAlive())
        while not isinstance(second.receive()[0], Alive):
            pass


def test_processes_that_are_no_workers_of_the_job_do_not_fill_the_log():
    said: list[str] = []
    with served(agent=1 << 22, say=said.append) as name:  # no process has this pid
        for _ in range(20):
            with pytest.raises(ChannelClosed):
                protocol.connect(name)
    assert said == ["a process that is no worker of this job was rejected"]


def test_what_a_file_says_controls_no_terminal(capfd):
    standalone.say("step 5 was not saved: \x1b]0;title\x07\rgone")
    assert capfd.readouterr().err == "elasticd saver: step 5 was not saved: \ufffd]0;title\ufffd gone\n"


@pytest.mark.parametrize("asked", ["while the world ends", "afterwards"])
def test_shares_of_which_no_index_can_be_made_cost_their_state_and_no_other_worker(asked, tmp_path):
    with served() as name, contextlib.ExitStack() as lines:
        folder = folder_name(7, 1, "0000000a", 1)
        workers = [lines.enter_context(contextlib.closing(protocol.connect(name))) for _ in range(2)]
        for rank, line in enumerate(workers):
            where = str(tmp_path), "0000000a", rank, 2, 1, 1, (0, 1)
            line.send(OpenWorld(*where, holder="", last=3, every=0))
            shares, memory = memory_file(b"" if rank else b"{}"), Memory.make(64)
            line.send(PlanShard(1, 64), (shares,))
            line.send(ShareBuffer(1, 0), (memory.fd,))
            os.close(shares)
            line.send(SaveShard(1, 0, 7, folder, at=1.0))
        for line in workers:
            assert "the index of its shards cannot be made" in hears(line, SaveFailed).why
        asker = lines.enter_context(contextlib.closing(protocol.connect(name)))
        workers[0].close()
        if asked == "afterwards":
            workers[1].close()
        asker.send(AskOffers(str(tmp_path)))
        workers[1].close()
        [offer] = hears(asker, Offers).offers
        assert offer.ranks == {0, 1}
        asker.send(AskShards(str(tmp_path), folder))
        assert isinstance(protocol.answer(asker)[0], AllHeld)


def test_a_world_that_is_open_already_has_the_ranks_that_it_had(tmp_path):
    with served() as name, contextlib.ExitStack() as lines:
        first, liar = (lines.enter_context(contextlib.closing(protocol.connect(name))) for _ in range(2))
        first.send(OpenWorld(str(tmp_path), "0000000a", 0, 2, 1, 1, (0, 1), holder="", last=3, every=0))
        first.send(AskOffers(str(tmp_path)))
        hears(first, Offers)
        liar.send(OpenWorld(str(tmp_path), "0000000a", 50, 100, 1, 1, (50,), holder="", last=3, every=0))
        with pytest.raises(ChannelClosed):
            liar.receive()
