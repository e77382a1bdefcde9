"""Packets between two ends, with their files; and packets that are not valid."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.channel.codec import BadMessage, ChannelClosed
from elasticd.channel.framing import Channel, QueuedChannel, close_all, connect, is_ours, listen, pair
from elasticd.channel.warden_messages import (
    AGENT_TO_WARDEN,
    WARDEN_TO_AGENT,
    AgentToWarden,
    ImportModules,
    Personal,
    RemoveAtEnd,
    SpareWorker,
    Spawned,
    WardenToAgent,
)
from tests.channel.starved import descriptors

Agent = QueuedChannel[AgentToWarden, WardenToAgent]
WardenEnd = Channel[WardenToAgent, AgentToWarden]


@pytest.fixture
def ends() -> Iterator[tuple[Agent, WardenEnd]]:
    ours, theirs = pair()
    agent: Agent = QueuedChannel(ours, AGENT_TO_WARDEN, WARDEN_TO_AGENT)
    warden: WardenEnd = Channel(theirs, WARDEN_TO_AGENT, AGENT_TO_WARDEN)
    with contextlib.closing(agent), contextlib.closing(warden):
        yield agent, warden


@contextlib.contextmanager
def opened(content: bytes) -> Iterator[int]:
    fd = os.memfd_create("content")
    os.write(fd, content)
    try:
        yield fd
    finally:
        os.close(fd)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_messages_arrive_in_order_each_with_its_files(ends: tuple[Agent, WardenEnd]) -> None:
    agent, warden = ends
    with opened(b"one") as one, opened(b"two") as two:
        agent.send(SpareWorker(1))
        agent.send(SpareWorker(2), [one, two])
        agent.send(SpareWorker(3))
    heard = [warden.receive() for _ in range(3)]
    assert [message for message, _ in heard] == [SpareWorker(1), SpareWorker(2), SpareWorker(3)]
    assert [len(files) for _, files in heard] == [0, 2, 0]
    assert [os.pread(fd, 9, 0) for fd in heard[1][1]] == [b"one", b"two"]
    assert not any(os.get_inheritable(fd) for fd in heard[1][1])
    close_all(heard[1][1])


def test_a_message_longer_than_a_packet_arrives(ends: tuple[Agent, WardenEnd]) -> None:
    agent, warden = ends
    message = ImportModules(tuple(f"package.module{i}" for i in range(20_000)), Personal((), ()), {})
    before = open_files()
    with opened(b"its file") as file:
        agent.send(message, [file])
    heard, (fd,) = warden.receive()
    assert heard == message and os.pread(fd, 9, 0) == b"its file"
    os.close(fd)
    assert open_files() == before


def test_nothing_is_waited_for_where_nothing_is_to_be(ends: tuple[Agent, WardenEnd]) -> None:
    agent, warden = ends
    assert warden.poll() is None
    assert warden.poll(0.01) is None
    agent.send(SpareWorker(1))
    assert warden.poll() == (SpareWorker(1), [])


def test_what_the_other_end_said_before_it_went_is_heard(ends: tuple[Agent, WardenEnd]) -> None:
    agent, warden = ends
    agent.send(SpareWorker(1))
    warden.send(Spawned(1, 2))  # the packet is never read, so the kernel reports a reset first
    agent.close()
    assert warden.receive() == (SpareWorker(1), [])
    with pytest.raises(ChannelClosed, match="has closed"):
        warden.receive()
    with pytest.raises(ChannelClosed, match="does not read"):
        warden.send(Spawned(1, 2))


def test_an_end_that_does_not_read_is_given_up_or_waited_for_with_all_that_is_queued(
    ends: tuple[Agent, WardenEnd],
) -> None:
    agent, warden = ends
    before = open_files()
    taken = 0
    with contextlib.suppress(ChannelClosed):
        while True:
            agent.send(RemoveAtEnd("x" * 1000), wait=False)
            taken += 1
    for _ in range(taken):
        warden.receive()
    posted = 0
    with opened(b"late") as file:
        while posted < 9 or not agent.pending:
            agent.post(SpareWorker(posted), [file])
            posted += 1
    heard = []
    while len(heard) < posted:
        while (one := warden.poll()) is not None:
            heard.append(one[0])
            assert os.pread(one[1][0], 9, 0) == b"late"
            close_all(one[1])
        agent.flush()
    assert heard == [SpareWorker(number) for number in range(posted)] and not agent.pending
    assert open_files() == before


def test_a_long_message_is_queued_until_there_is_a_descriptor_for_it(ends: tuple[Agent, WardenEnd]) -> None:
    agent, warden = ends
    long = RemoveAtEnd("x" * 100_000)
    with descriptors(0):
        agent.post(long)
        agent.post(SpareWorker(1))
        agent.flush()
        assert agent.pending
    agent.flush()
    assert not agent.pending
    assert [warden.receive() for _ in range(2)] == [(long, []), (SpareWorker(1), [])]


def test_an_end_that_is_closed_closes_what_it_had_queued(ends: tuple[Agent, WardenEnd]) -> None:
    agent, warden = ends
    with opened(b"") as file:
        before = open_files()
        while not agent.pending:
            agent.post(RemoveAtEnd("x" * 1000), [file])
        agent.close()
        warden.close()
        assert open_files() == before - 2


# ---------------------------------------------------------------- packets that are not valid


@given(st.binary(min_size=1, max_size=300), st.integers(0, 3))
def test_packets_at_random_are_refused_and_their_files_are_closed(raw: bytes, count: int) -> None:
    ours, theirs = pair()
    channel: WardenEnd = Channel(ours, WARDEN_TO_AGENT, AGENT_TO_WARDEN)
    with contextlib.closing(channel), theirs, opened(b"") as file:
        before = open_files()
        socket.send_fds(theirs, [raw], [file] * count)
        with pytest.raises(BadMessage):
            channel.receive()
        assert open_files() == before


def test_a_packet_that_is_too_long_or_has_too_many_files_is_refused(ends: tuple[Agent, WardenEnd]) -> None:
    agent, warden = ends
    agent.socket.send(b"x" * ((1 << 16) + 1))
    with opened(b"") as file:
        socket.send_fds(agent.socket, [b"x"], [file] * 20)
    before = open_files()
    for _ in range(2):
        with pytest.raises(BadMessage, match="more than 65536 bytes or 16 files"):
            warden.receive()
    assert open_files() == before


def test_a_packet_with_more_files_than_free_descriptors_is_refused(ends: tuple[Agent, WardenEnd]) -> None:
    agent, warden = ends
    with opened(b"") as file:
        agent.post(SpareWorker(1), [file, file])
    with descriptors(1), pytest.raises(BadMessage, match="no descriptor left for a file of a packet"):
        warden.receive()


def test_a_message_in_a_file_is_refused_if_it_is_too_long_or_the_file_might_make_us_wait(
    ends: tuple[Agent, WardenEnd], tmp_path: Path
) -> None:
    agent, warden = ends
    os.mkfifo(tmp_path / "fifo")
    before = open_files()
    with opened(b"") as large:
        os.truncate(large, 1 << 40)
        socket.send_fds(agent.socket, [b"in a file"], [large])
    fifo = os.open(tmp_path / "fifo", os.O_RDWR)
    socket.send_fds(agent.socket, [b"in a file"], [fifo])
    os.close(fifo)
    agent.socket.send(b"in a file")
    for why in ("1099511627776 bytes", "cannot be read", "not a message"):
        with pytest.raises(BadMessage, match=why):
            warden.receive()
    assert open_files() == before


# ---------------------------------------------------------------- names


def test_a_process_is_reached_by_its_name_and_known_by_the_kernel() -> None:
    name = f"elasticd-test-{os.urandom(8).hex()}"
    with listen(name) as listener, connect(name) as caller:
        accepted, _ = listener.accept()
        with accepted:
            assert is_ours(accepted) and is_ours(caller)
    with pytest.raises(ChannelClosed, match=f"no process listens as {name}"):
        connect(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_the_process_of_another_user_is_not_talked_to() -> None:
    name = f"elasticd-test-{os.urandom(8).hex()}"
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        with listen(name):
            os.write(tell, b"r")
            os.close(tell)
            signal.pause()
    os.close(tell)
    try:
        assert os.read(ready, 1) == b"r"
        with pytest.raises(ChannelClosed, match="belongs to another user"):
            connect(name)
    finally:
        os.close(ready)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
