"""Restarted workers take the state from the memory that their saver has kept."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
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
from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.checkpoint.protocol import (
    SAVER_TO_WORKER,
    WORKER_TO_SAVER,
    Alive,
    AskAlive,
    AskKnown,
    AskOffers,
    AwaitSaves,
    BufferTorn,
    Known,
    Offers,
    OpenWorld,
    ProveSecret,
    SaverChannel,
)
from elasticd.checkpoint.server.save_report import Footprint
from elasticd.checkpoint.storage import store_at
from elasticd.worker.checkpoints import Checkpoints, NoCheckpoint
from tests.checkpoint.conftest import assert_same, tensors_of, training
from tests.checkpoint.faults import Helper, check, commit, filled, held_by, served


@pytest.fixture
def saver(forker: Helper, monkeypatch: pytest.MonkeyPatch) -> psutil.Process:
    """The saver of this process, which stays when its workers have ended."""
    name, pid = forker.saver(linger_s=60.0)
    monkeypatch.setenv("ELASTICD_SAVER", name)
    return psutil.Process(pid)


def save(path: Path, *steps: int) -> None:
    """Save in a worker that then ends."""
    checkpoints = Checkpoints(path)
    commit(checkpoints, *steps)
    checkpoints.close()


def test_a_whole_training_is_there_though_the_disk_is_not(saver, tmp_path):
    first = Checkpoints(tmp_path / "run")
    assert first.save(training(2), 2) and first.wait()
    first.close()
    shutil.rmtree(tmp_path / "run" / FilePointer(tmp_path / "run").read().saved[-1].name)
    state, second = training(7), Checkpoints(tmp_path / "run")
    assert second.load(state) == 2 and second.tier == "memory"
    assert_same(state, tensors_of(training(2)))
    assert state["progress"]["position"] == 2
    second.close()


def test_a_saver_that_is_behind_offers_the_state_of_a_worker_that_has_left(saver, tmp_path):
    save(tmp_path / "run", 1)
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.save(filled(2), 2) and checkpoints.wait()
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


def test_a_saver_offers_what_a_worker_has_handed_over_that_takes_long_to_end(saver, tmp_path):
    """The worker's connection stays until the kernel has taken the process down. Other workers of its world
    have left."""
    url, lines = store_at(tmp_path / "run").url, []
    for rank in (0, 1):
        line = protocol.connect(os.environ["ELASTICD_SAVER"])
        line.send(OpenWorld(url, "world", rank, 2, 1, 1, (0, 1), "", 1, 0))
        lines.append(line)
    first, second = lines
    first.close()
    asker = protocol.connect(os.environ["ELASTICD_SAVER"])
    asker.send(AskOffers(url))
    asker.send(AskAlive())
    assert isinstance(asker.receive()[0], Alive), "the question before is not answered yet"
    second.close()
    assert isinstance(asker.receive()[0], Offers)
    asker.close()


def torn(checkpoints: Checkpoints) -> None:
    """Kill the worker while it overwrites the buffer that it has handed over."""
    checkpoints._line.send(BufferTorn(0))


def not_understood(checkpoints: Checkpoints) -> None:
    """Send a message that the saver cannot read, so that the saver no longer knows which buffers the
    worker overwrites."""
    checkpoints._line._line.socket.send(b"nonsense")


@pytest.mark.parametrize("spoil", [torn, not_understood])
def test_what_a_worker_may_have_written_over_is_not_taken(saver, tmp_path, spoil):
    checkpoints = Checkpoints(tmp_path / "run")
    commit(checkpoints, 1)
    spoil(checkpoints)
    checkpoints.close()
    state, after = filled(0), Checkpoints(tmp_path / "run")
    assert after.load(state) == 1 and after.tier == "disk"
    check(state, 1)
    after.close()


def test_a_buffer_that_the_saver_was_not_asked_about_is_not_overwritten(saver, tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    commit(checkpoints, 1, 2)
    plan = checkpoints._plan
    before = bytes(plan.buffers[plan.turn].memory.view)
    flat = flatten(filled(3))
    assert plan.fill(filled(3), flat, pickled(flat.objects, {}), lambda *_: False)
    assert bytes(plan.buffers[plan.turn].memory.view) == before
    checkpoints.close()


def test_what_cannot_be_unpickled_from_memory_is_not_from_disk_either_and_one_before_it_is_taken(
    saver, tmp_path, monkeypatch, caplog
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


def test_memory_older_than_what_was_committed_is_not_taken(saver, forker, tmp_path, monkeypatch):
    save(tmp_path / "run", 1)
    ours = os.environ["ELASTICD_SAVER"]
    name, _ = forker.saver()
    monkeypatch.setenv("ELASTICD_SAVER", name)
    save(tmp_path / "run", 5)  # by workers of another node
    monkeypatch.setenv("ELASTICD_SAVER", ours)
    state, after = filled(0), Checkpoints(tmp_path / "run")
    assert after.load(state) == 5 and after.tier == "disk"
    after.close()


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_a_saver_that_is_stopped_or_dead_is_not_waited_for_and_the_disk_is_read(
    saver, tmp_path, monkeypatch, caplog, sent
):
    monkeypatch.setattr(protocol, "SILENCE_S", 0.5)
    save(tmp_path / "run", 1, 2)
    saver.send_signal(sent)
    try:
        state, after = filled(0), Checkpoints(tmp_path / "run")
        assert after.load(state) == 2 and after.tier == "disk"
        check(state, 2)
        monkeypatch.setenv("ELASTICD_RESUME", "never")
        with pytest.raises(NoCheckpoint, match="the checkpoints of this job are not known"):
            after.load(state)
    finally:
        if sent == signal.SIGSTOP:
            saver.resume()
    sentence = "the saver of this node is stopped or stuck (no answer for 0.5 s): "
    sentence += "states in memory are not used"
    said = [r.message for r in caplog.records if "saver" in r.message]
    assert said == (2 * [sentence] if sent == signal.SIGSTOP else [])


def test_training_waits_once_for_a_saver_that_is_stopped_and_goes_back_to_it_later(
    saver, tmp_path, monkeypatch
):
    monkeypatch.setattr(protocol, "SILENCE_S", 0.5)
    monkeypatch.setattr(saver_connection, "_MOMENT_S", 30.0)  # a busy machine
    patience, connect = [], protocol.connect

    def counted(*name: str, patience_s: float | None = None) -> protocol.SaverChannel:
        patience.append(patience_s)
        return connect(*name, patience_s=patience_s)

    monkeypatch.setattr(protocol, "connect", counted)
    checkpoints = Checkpoints(tmp_path / "run")
    saver.suspend()
    try:
        for step in (1, 2, 3):
            assert checkpoints.save(filled(step), step)
    finally:
        saver.resume()
    assert patience == [None] and checkpoints.failed == 3
    assert checkpoints.last_error.endswith("no answer for 0.5 s")
    checkpoints._line._silent_until = 1e-9  # as after a minute
    assert checkpoints.save(filled(4), 4) and checkpoints.wait()
    assert patience == [None, 30.0] and checkpoints.newest.step == 4
    checkpoints.close()


def test_a_saver_that_takes_long_to_answer_is_waited_for_as_long_as_it_lives(monkeypatch):
    monkeypatch.setattr(protocol, "SILENCE_S", 2.0)
    with served() as name, contextlib.closing(protocol.connect(name)) as line:
        answers: list[object] = []
        asking = threading.Thread(
            target=lambda: answers.append(protocol.answer(line))
        )  # before the worker has asked anything
        asking.start()
        asking.join(2.5)  # longer than SILENCE_S
        assert asking.is_alive()
        line.send(AskOffers("/nowhere"))
        asking.join()
        assert answers == [(Offers(()), [])]


def test_another_folder_s_memory_is_not_taken(saver, tmp_path):
    save(tmp_path / "run", 1)
    assert Checkpoints(tmp_path / "other").load(filled(0)) is None


def test_saves_in_world_after_world_take_the_memory_of_two_shards(tmp_path, monkeypatch):
    footprints: list[Footprint] = []
    with served(occupies=footprints.append) as name:
        monkeypatch.setenv("ELASTICD_SAVER", name)
        for _ in range(3):
            world = Checkpoints(tmp_path / "run")
            first = (world.load(filled(0)) or 0) + 1
            commit(world, *range(first, first + 3))
            world.close()
    owns = [footprint.own for footprint in footprints]
    assert max(owns) == 2 * min(filter(None, owns)) > filled(0)["w"].nbytes


def test_memory_is_given_back_once_it_is_of_no_use(saver, tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    commit(checkpoints, 1, 2, 3)
    size = held_by(saver.pid) // 2
    assert size >= filled(0)["w"].nbytes  # two shards of a worker that trains
    checkpoints.close()
    after = Checkpoints(tmp_path / "run")
    assert after.load(filled(0)) == 3
    assert held_by(saver.pid) == size  # one shard of a worker that has ended
    for step in (4, 5):
        assert after.save(filled(step), step) and after.wait()
        assert held_by(saver.pid) <= 2 * size
    after.close()


@pytest.fixture
def alone() -> Iterator[tuple[str, str, subprocess.Popen[bytes]]]:
    """The saver of workers without an agent: its name, its secret and its process."""
    name, secret = saver_connection._start().split()
    process = saver_connection.started.pop()
    yield name, secret, process
    process.kill()
    process.wait()


def test_a_saver_without_an_agent_serves_only_clients_that_know_its_secret(alone, tmp_path):
    name, secret, process = alone
    for shown in ("cmdline", "environ"):
        assert secret.encode() not in Path(f"/proc/{process.pid}/{shown}").read_bytes()
    question = AskKnown(str(tmp_path))
    for first in (question, ProveSecret("guessed"), ProveSecret("")):
        stranger = SaverChannel(connect(name), WORKER_TO_SAVER, SAVER_TO_WORKER)
        stranger.send(first)
        with pytest.raises(ChannelClosed):
            stranger.receive()
        stranger.close()
    with contextlib.closing(protocol.connect(name, secret)) as line:
        line.send(question)
        assert isinstance(line.receive()[0], Known)
    assert process.wait(60.0) == 0, "nobody is connected any more"


def test_a_saver_without_an_agent_leaves_the_processors_to_the_training(alone, tmp_path):
    name, secret, process = alone
    with contextlib.closing(protocol.connect(name, secret)) as line:
        line.send(AskKnown(str(tmp_path)))
        line.receive()  # the saver serves
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
        group = Path(f"/proc/{process.pid}/autogroup")
        if not group.exists():
            pytest.skip("this kernel does not group processes by session")
        assert group.read_text().endswith(" nice 10\n")  # else nice would count only within its own session
        assert Path("/proc/self/autogroup").read_text() != group.read_text()
