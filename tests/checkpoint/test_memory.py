"""Restarted workers take the state from the memory that their saver has kept."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path, PurePath

import psutil
import pytest

from elasticd.channel.codec import ChannelClosed
from elasticd.channel.framing import connect
from elasticd.checkpoint import protocol
from elasticd.checkpoint.client import saver_connection
from elasticd.checkpoint.client.objects import pickled
from elasticd.checkpoint.client.state_dict import flatten
from elasticd.checkpoint.commit.pointer import FilePointer
from elasticd.checkpoint.protocol import (
    SAVER_TO_WORKER,
    WORKER_TO_SAVER,
    AskKnown,
    AskOffers,
    AwaitSaves,
    BufferTorn,
    Known,
    Offers,
    ProveSecret,
    SaverChannel,
)
from elasticd.checkpoint.server.save_report import Footprint
from elasticd.checkpoint.server.saver import Saver
from elasticd.checkpoint.store import store_at
from elasticd.worker.checkpoints import Checkpoints, NoCheckpoint
from tests.checkpoint.conftest import assert_same, tensors_of, training
from tests.checkpoint.faults import Helper, check, filled


@pytest.fixture
def forker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Helper]:
    with Helper("forker.py") as helper:
        name, pid = helper.saver(linger_s=60.0)
        monkeypatch.setenv("ELASTICD_SAVER", name)
        monkeypatch.setenv("SAVER_PID", str(pid))
        yield helper


def save(path: Path, *steps: int) -> None:
    """By workers that end then."""
    checkpoints = Checkpoints(path)
    for step in steps:
        assert checkpoints.save(filled(step), step) and checkpoints.wait() and not checkpoints.failed
    checkpoints.close()


def held_by(pid: int) -> int:
    """Bytes of shards that the process keeps."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = f"/proc/{pid}/fd/{fd}"
            if "elasticd-shard" in (name := os.readlink(target)) or name.startswith("/#"):  # of huge pages
                found.add((os.stat(target).st_ino, os.stat(target).st_size))
        except FileNotFoundError:
            continue
    return sum(size for _, size in found)


def test_the_state_is_there_though_the_disk_is_not(forker, tmp_path):
    save(tmp_path / "run", 1, 2)
    shutil.rmtree(tmp_path / "run" / FilePointer(tmp_path / "run").read().saved[-1].name)
    state = filled(0)
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.load(state) == 2 and checkpoints.tier == "memory"
    check(state, 2)
    checkpoints.close()


def test_a_saver_that_is_behind_offers_the_state_of_a_worker_that_has_left(forker, tmp_path):
    save(tmp_path / "run", 1)
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.save(filled(2), 2) and checkpoints.wait()
    saver = psutil.Process(int(os.environ["SAVER_PID"]))
    line = protocol.connect(os.environ["ELASTICD_SAVER"])
    saver.suspend()
    try:
        for _ in range(5):
            checkpoints._line.try_send(AwaitSaves(on=False))
        checkpoints.close()
        line.send(AskOffers(store_at(tmp_path / "run").url))
    finally:
        saver.resume()
    said, _ = line.receive()
    assert isinstance(said, Offers) and [offer.step for offer in said.offers] == [2]
    line.close()


def test_a_whole_training_comes_back_from_memory(forker, tmp_path):
    first = Checkpoints(tmp_path / "run")
    assert first.save(training(2), 2) and first.wait()
    first.close()
    state, second = training(7), Checkpoints(tmp_path / "run")
    assert second.load(state) == 2 and second.tier == "memory"
    assert_same(state, tensors_of(training(2)))
    assert state["progress"]["position"] == 2
    second.close()


def test_what_was_being_written_over_is_not_taken(forker, tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.save(filled(1), 1) and checkpoints.wait()
    checkpoints._line.send(BufferTorn(0))  # and there it was killed
    checkpoints.close()
    state, after = filled(0), Checkpoints(tmp_path / "run")
    assert after.load(state) == 1 and after.tier == "disk"
    check(state, 1)
    after.close()


def test_what_the_saver_was_not_told_of_is_not_written_over(forker, tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    for step in (1, 2):
        assert checkpoints.save(filled(step), step) and checkpoints.wait()
    plan = checkpoints._plan
    before = bytes(plan.buffers[plan.turn].memory.view)
    flat = flatten(filled(3))
    assert plan.fill(filled(3), flat, pickled(flat.objects, {}), lambda *_: False)
    assert bytes(plan.buffers[plan.turn].memory.view) == before
    checkpoints.close()


def test_what_a_worker_holds_that_was_not_understood_is_not_taken(forker, tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.save(filled(1), 1) and checkpoints.wait()
    checkpoints._line._line.socket.send(b"nonsense")  # by which it cannot tell what it writes over
    checkpoints.close()
    state, after = filled(0), Checkpoints(tmp_path / "run")
    assert after.load(state) == 1 and after.tier == "disk"
    check(state, 1)
    after.close()


def test_what_cannot_be_unpickled_from_memory_is_not_from_disk_either_and_one_before_it_is_taken(
    forker, tmp_path, monkeypatch, caplog
):
    checkpoints = Checkpoints(tmp_path / "run")
    monkeypatch.setattr("elasticd.checkpoint.client.objects._LOADABLE", (int, PurePath().__class__))
    for step, odd in ((1, 0), (2, PurePath("/x"))):
        assert checkpoints.save({**filled(step), "odd": odd}, step) and checkpoints.wait()
    checkpoints.close()
    state, after = {**filled(0), "odd": 0}, Checkpoints(tmp_path / "run")
    assert after.load(state) == 1
    check(state, 1)
    assert "resuming from step 1, because odd of step-0000000002" in caplog.text
    after.close()


def test_memory_older_than_what_was_committed_is_not_taken(forker, tmp_path, monkeypatch):
    save(tmp_path / "run", 1)
    ours = os.environ["ELASTICD_SAVER"]
    name, _ = forker.saver()
    monkeypatch.setenv("ELASTICD_SAVER", name)
    save(tmp_path / "run", 5)  # elsewhere
    monkeypatch.setenv("ELASTICD_SAVER", ours)
    state, after = filled(0), Checkpoints(tmp_path / "run")
    assert after.load(state) == 5 and after.tier == "disk"
    after.close()


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_a_saver_that_is_stopped_or_dead_is_not_waited_for_and_the_disk_is_read(
    forker, tmp_path, monkeypatch, caplog, sent
):
    monkeypatch.setattr(protocol, "SILENCE_S", 0.5)
    save(tmp_path / "run", 1, 2)
    os.kill(pid := int(os.environ["SAVER_PID"]), sent)
    try:
        state, after = filled(0), Checkpoints(tmp_path / "run")
        assert after.load(state) == 2 and after.tier == "disk"
        check(state, 2)
        monkeypatch.setenv("ELASTICD_RESUME", "never")
        with pytest.raises(NoCheckpoint, match="the checkpoints of this job are not known"):
            after.load(state)
    finally:
        if sent == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    sentence = "the saver of this node is stopped or stuck (no answer for 0.5 s): "
    sentence += "states in memory are not used"
    said = [r.message for r in caplog.records if "saver" in r.message]
    assert said == (2 * [sentence] if sent == signal.SIGSTOP else [])


def test_training_waits_once_for_a_saver_that_is_stopped_and_goes_back_to_it_later(
    forker, tmp_path, monkeypatch
):
    monkeypatch.setattr(protocol, "SILENCE_S", 0.5)
    monkeypatch.setattr(saver_connection, "_MOMENT_S", 30.0)  # a busy machine
    patience, connect = [], protocol.connect

    def counted(*name: str, patience_s: float | None = None) -> protocol.SaverChannel:
        patience.append(patience_s)
        return connect(*name, patience_s=patience_s)

    monkeypatch.setattr(protocol, "connect", counted)
    saver = psutil.Process(int(os.environ["SAVER_PID"]))
    checkpoints = Checkpoints(tmp_path / "run")
    saver.suspend()
    try:
        for step in (1, 2, 3):
            assert checkpoints.save(filled(step), step)
    finally:
        saver.resume()
    assert patience == [None] and checkpoints.failed == 3
    assert checkpoints.last_error.endswith("no answer for 0.5 s")
    checkpoints._line._silent_until = 1e-9  # a minute later
    assert checkpoints.save(filled(4), 4) and checkpoints.wait()
    assert patience == [None, 30.0] and checkpoints.newest.step == 4
    checkpoints.close()


def test_a_saver_that_takes_long_to_answer_is_waited_for_as_long_as_it_lives(monkeypatch):
    monkeypatch.setattr(protocol, "SILENCE_S", 2.0)
    listener, name = protocol.listen()
    saver = Saver(listener, linger_s=None)
    serving = threading.Thread(target=saver.serve)
    serving.start()
    line = protocol.connect(name)
    try:
        answers: list[object] = []
        asking = threading.Thread(target=lambda: answers.append(protocol.answer(line)))  # to nothing, as yet
        asking.start()
        asking.join(2.5)  # past the silence
        assert asking.is_alive()
        line.send(AskOffers("/nowhere"))
        asking.join()
        assert answers == [(Offers(()), [])]
    finally:
        line.close()
        saver.leave()
        serving.join()
        listener.close()


def test_another_folder_s_memory_is_not_taken(forker, tmp_path):
    save(tmp_path / "run", 1)
    assert Checkpoints(tmp_path / "other").load(filled(0)) is None


def test_it_is_never_more_than_two_shards_whatever_the_world_before(tmp_path, monkeypatch):
    listener, name = protocol.listen()
    monkeypatch.setenv("ELASTICD_SAVER", name)
    footprints: list[Footprint] = []
    saver = Saver(listener, linger_s=None, occupies=footprints.append)
    serving = threading.Thread(target=saver.serve)
    serving.start()
    try:
        for _ in range(3):
            world = Checkpoints(tmp_path / "run")
            first = (world.load(filled(0)) or 0) + 1
            for step in range(first, first + 3):
                assert world.save(filled(step), step) and world.wait() and not world.failed
            world.close()
    finally:
        saver.leave()
        serving.join()
        listener.close()
    owns = [footprint.own for footprint in footprints]
    assert max(owns) == 2 * min(filter(None, owns)) > filled(0)["w"].nbytes


def test_memory_is_given_back_once_it_is_of_no_use(forker, tmp_path):
    pid = int(os.environ["SAVER_PID"])
    checkpoints = Checkpoints(tmp_path / "run")
    for step in (1, 2, 3):
        assert checkpoints.save(filled(step), step) and checkpoints.wait()
    size = held_by(pid) // 2
    assert size >= filled(0)["w"].nbytes  # two shards while it trains
    checkpoints.close()
    after = Checkpoints(tmp_path / "run")
    assert after.load(filled(0)) == 3
    assert held_by(pid) == size  # one of those who are gone
    for step in (4, 5):
        assert after.save(filled(step), step) and after.wait()
        assert held_by(pid) <= 2 * size
    after.close()


def test_a_saver_without_an_agent_serves_those_who_know_its_secret_and_nobody_else(tmp_path: Path) -> None:
    name, secret = saver_connection._start().split()
    process = saver_connection.started.pop()
    for shown in ("cmdline", "environ"):
        assert secret.encode() not in Path(f"/proc/{process.pid}/{shown}").read_bytes()
    question = AskKnown(str(tmp_path))
    try:
        for first in (question, ProveSecret("guessed"), ProveSecret("")):
            stranger = SaverChannel(connect(name), WORKER_TO_SAVER, SAVER_TO_WORKER)
            stranger.send(first)
            with pytest.raises(ChannelClosed):
                stranger.receive()
            stranger.close()
        line = protocol.connect(name, secret)
        line.send(question)
        assert isinstance(line.receive()[0], Known)
        line.close()
        assert process.wait(60.0) == 0, "nobody is connected any more"
    finally:
        process.kill()
        process.wait()
