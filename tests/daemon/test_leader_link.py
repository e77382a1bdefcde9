"""The connections of agents to the leader, over real sockets."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast

import pytest

from elasticd.checkpoint.replication.wire import NONCE, PeerGone, Wire
from elasticd.core.facts import Leadership, NodeTelemetry, Progress, SlotProgress, Summary
from elasticd.core.gathered import Gathered, hear
from elasticd.core.ports import Heard
from elasticd.daemon.gathering import Gathering
from elasticd.daemon.leader_link import (
    telemetry_follower,
    telemetry_listener,
    telemetry_messages,
    telemetry_sender,
)
from elasticd.daemon.leader_link.telemetry_follower import JobTelemetry, TelemetryFollower, ask_leader
from elasticd.daemon.leader_link.telemetry_listener import TelemetryListener
from elasticd.daemon.leader_link.telemetry_messages import (
    BATCH_NODES,
    Ask,
    InvalidTold,
    NotLeading,
    Taken,
    Tell,
)
from elasticd.daemon.leader_link.telemetry_sender import TelemetrySender
from elasticd.daemon.node_saver import etcd_peers
from elasticd.telemetry import accepting
from tests.ports import free_port

SECRET = "secret of the job"
ROUTED = "203.0.113.5"  # an address that is reserved for documentation, so no interface has it
PATIENCE_S = 60.0


class Leader:
    """Stands in for the leader's ``Gathering``."""

    def __init__(self) -> None:
        self.known: Gathered | None = Gathered(1)
        self.told: queue.SimpleQueue[NodeTelemetry] = queue.SimpleQueue()
        self.every_s = 0.0
        self.again: tuple[str, ...] = ()

    def hear(self, several: tuple[NodeTelemetry, ...]) -> Heard | None:
        if self.known is None:
            return None
        for one in several:
            self.known = hear(self.known, one)
            self.told.put(one)
        again, self.again = self.again, ()
        return Heard(self.every_s, again=again)

    def summary(self, now: float) -> Summary | None:
        return Summary(1, 100.0) if self.known is not None else None

    def next(self) -> NodeTelemetry:
        return self.told.get(timeout=PATIENCE_S)


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


Said = queue.SimpleQueue[dict[str, Any]]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    """Return the warnings in the log."""
    warnings = Said()

    class Log:
        def warning(self, event: str, **fields: Any) -> None:
            warnings.put({"event": event, **fields})

    monkeypatch.setattr("elasticd.telemetry.log.get", lambda name: Log())
    return warnings


def serve(cleanup: ExitStack, leader: Leader, secret: str = SECRET) -> Leadership:
    listener = accepting.listen("127.0.0.1")
    port = listener.getsockname()[1]
    cleanup.enter_context(TelemetryListener(listener, secret, cast(Gathering, leader)))
    return Leadership("a", "a#1", "127.0.0.1", port, SECRET)


def sender(cleanup: ExitStack) -> TelemetrySender:
    made = TelemetrySender("b")
    cleanup.callback(made.close)
    return made


def telemetry(name: str, step: int) -> NodeTelemetry:
    progress = Progress(name, 3, (SlotProgress(0, 0, 100, step, 50.0),))
    return NodeTelemetry(name, f"{name}#1", progress=progress)


def test_what_is_told_reaches_the_leader_and_its_answer_comes_back(cleanup: ExitStack) -> None:
    leader, answers = Leader(), queue.SimpleQueue[Heard]()
    there, link = serve(cleanup, leader), sender(cleanup)
    link.listen(answers.put)
    link.tell(telemetry("b", 1), there)
    assert leader.next() == telemetry("b", 1) and answers.get(timeout=PATIENCE_S) == Heard(0.0)
    link.tell(telemetry("b", 2), there)
    assert leader.next() == telemetry("b", 2)


def test_what_the_leader_has_is_not_sent_again_and_another_leader_gets_all_of_it(cleanup: ExitStack) -> None:
    first, second, link = Leader(), Leader(), sender(cleanup)
    there, elsewhere = serve(cleanup, first), serve(cleanup, second)
    link.tell(telemetry("b", 1), there)
    first.next()
    more = NodeTelemetry("b", "b#1", progress=telemetry("b", 1).progress, last=True)
    link.tell(more, there)
    assert first.next() == NodeTelemetry("b", "b#1", last=True)
    link.tell(more, elsewhere)
    assert second.next() == more


def test_a_leader_that_has_forgotten_a_node_is_told_all_again(cleanup: ExitStack) -> None:
    leader, link = Leader(), sender(cleanup)
    there = serve(cleanup, leader)
    link.tell(telemetry("b", 1), there)
    assert leader.next() == telemetry("b", 1)
    leader.again = ("b",)  # the agent leads again
    more = NodeTelemetry("b", "b#1", progress=telemetry("b", 1).progress, last=True)
    link.tell(more, there)
    assert leader.next() == NodeTelemetry("b", "b#1", last=True)
    assert leader.next() == more


def test_agents_that_tell_rarely_keep_no_connection(cleanup: ExitStack) -> None:
    leader, link, answers = Leader(), sender(cleanup), queue.SimpleQueue[Heard]()
    leader.every_s = 1000.0
    link.listen(answers.put)
    link.tell(telemetry("b", 1), serve(cleanup, leader))
    answers.get(timeout=PATIENCE_S)
    assert link._wire is None


def test_telling_never_waits_and_a_slow_leader_gets_the_newest_only(cleanup: ExitStack) -> None:
    leader, link = Leader(), sender(cleanup)
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # accepts connections, and answers nothing
        silent = Leadership("z", "z#1", "127.0.0.1", deaf.getsockname()[1], SECRET)
        for step in range(10_000):
            link.tell(telemetry("b", step), silent)
        deaf.settimeout(PATIENCE_S)
        deaf.accept()[0].close()
    link.tell(telemetry("b", 10_000), serve(cleanup, leader))
    assert leader.next() == telemetry("b", 10_000)


def test_flush_waits_until_the_leader_has_the_last_and_not_for_a_leader_that_is_gone(
    cleanup: ExitStack,
) -> None:
    leader, link = Leader(), sender(cleanup)
    there = serve(cleanup, leader)
    leader.every_s = 1000.0  # the leader wants the next message much later
    link.tell(telemetry("b", 1), there)
    leader.next()
    link.tell(telemetry("b", 2), there)
    assert link.flush(PATIENCE_S) and leader.next().progress == telemetry("b", 2).progress
    link.tell(telemetry("b", 3), there)
    began = time.monotonic()
    assert link.flush(PATIENCE_S, 0.1) and leader.next().progress == telemetry("b", 3).progress
    assert time.monotonic() - began >= 0.1 * link._spread > 0.01, "each node has a moment of its own"
    port = free_port()
    link.tell(telemetry("b", 4), Leadership("z", "z#1", "127.0.0.1", port, SECRET))
    assert not link.flush(0.5)


def test_an_agent_that_cannot_reach_the_leader_logs_it_once(
    cleanup: ExitStack, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry_sender, "FIRST_S", 0.001)
    monkeypatch.setattr(telemetry_sender, "RETRY_S_MAX", 0.001)
    port = free_port()
    tells = sender(cleanup)
    tells.tell(telemetry("b", 1), Leadership("a", "1", "127.0.0.1", port, SECRET))
    warning = said.get(timeout=PATIENCE_S)
    assert (warning["event"], warning["address"]) == ("leader.unreachable", f"127.0.0.1:{port}")
    assert "training goes on" in warning["sentence"] and SECRET not in str(warning)
    for _ in range(telemetry_sender.FAILURES_SAID):
        tells.flush(PATIENCE_S)
    assert said.empty()


def test_a_caller_without_the_secret_tells_and_learns_nothing(cleanup: ExitStack) -> None:
    leader = Leader()
    there = serve(cleanup, leader, secret="another secret")
    with pytest.raises(PeerGone):
        ask_leader(there)
    assert leader.told.empty()


@pytest.mark.parametrize(
    ("content", "sender"),
    [
        (b"", "127.0.0.1"),
        (b"\x80\x04K\x01.", "127.0.0.1"),
        (b'{"type":"tell"}', "127.0.0.1"),
        (b'{"type":"reset"}', "127.0.0.1"),
        (b'{"type":"tell","nodes":[{"node":"../a","incarnation":"i"}]}', "127.0.0.1"),
        (b'{"type":"tell","nodes":[{"node":"a","incarnation":"i","port":70000}]}', "a"),
        (b'{"type":"tell","nodes":[{"node":"a","incarnation":"i","progress":{"node":"b","round":1}}]}', "a"),
        (b'{"type":"tell","nodes":[{"node":"a","incarnation":7}]}', "a"),
        (b"[" * 100_000, "127.0.0.1"),
    ],
)
def test_a_message_that_is_not_valid_is_refused_and_its_sender_is_named_once(
    cleanup: ExitStack, said: Said, content: bytes, sender: str
) -> None:
    leader = Leader()
    there = serve(cleanup, leader)
    with Wire.connect(there.host, there.port, SECRET) as wire:
        for _ in range(2):
            wire.send_raw_message(content)
            answer = telemetry_messages.answer(wire.receive_raw_message())
            assert isinstance(answer, InvalidTold) and answer.why
        wire.send_raw_message(telemetry_messages.encoded(Tell((telemetry("b", 1),))))
        assert isinstance(telemetry_messages.answer(wire.receive_raw_message()), Taken)
    assert leader.next() == telemetry("b", 1) and leader.told.empty(), "others are heard"
    warning = said.get(timeout=PATIENCE_S)
    assert (warning["event"], warning["sender"]) == ("telemetry.refused", sender)
    assert said.empty()


def test_an_agent_that_is_refused_logs_it_once(
    cleanup: ExitStack, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry_sender, "FIRST_S", 0.001)
    tells = sender(cleanup)
    tells.tell(NodeTelemetry("b", "b#1", port=70_000), serve(cleanup, Leader()))
    events = {said.get(timeout=PATIENCE_S)["event"] for _ in range(2)}
    assert events == {"leader.refuses", "telemetry.refused"}
    tells.flush(PATIENCE_S)
    assert said.empty()


def test_a_message_that_is_too_long_is_not_read(cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_listener, "REQUEST_MAX", 1000)
    there = serve(cleanup, Leader())
    with Wire.connect(there.host, there.port, SECRET) as wire:
        wire.send_raw_message(b" " * 1001)
        with pytest.raises(PeerGone):
            wire.receive_raw_message()


def test_strangers_that_hold_connections_do_not_keep_agents_out(
    cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry_listener, "STRANGERS_MAX", 4)
    leader = Leader()
    there = serve(cleanup, leader)
    for _ in range(8):
        cleanup.enter_context(socket.create_connection((there.host, there.port)))
    link = sender(cleanup)
    link.tell(telemetry("b", 1), there)
    assert leader.next() == telemetry("b", 1)


@pytest.mark.parametrize(("limit", "files", "kept"), [(4, 4096, 4), (256, 32, 4)])
def test_no_more_strangers_hold_connections_than_is_allowed(
    cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch, limit: int, files: int, kept: int
) -> None:
    monkeypatch.setattr(telemetry_listener, "STRANGERS_MAX", limit)
    monkeypatch.setattr(telemetry_listener.resource, "getrlimit", lambda which: (files, files))
    serving = threading.Event()
    leader = Leader()
    serve_all = TelemetryListener._serve_all

    async def late(listener: TelemetryListener) -> None:
        serving.wait(PATIENCE_S)
        await serve_all(listener)

    monkeypatch.setattr(TelemetryListener, "_serve_all", late)
    there = serve(cleanup, leader)
    strangers = [cleanup.enter_context(socket.create_connection((there.host, there.port))) for _ in range(7)]
    serving.set()  # all connections are accepted at once
    for stranger in strangers:
        stranger.settimeout(PATIENCE_S)
    ended = [_is_closed(stranger) for stranger in strangers[: len(strangers) - kept]]
    assert all(ended)
    strangers[-1].setblocking(False)
    assert len(strangers[-1].recv(NONCE)) == NONCE
    with pytest.raises(BlockingIOError):
        strangers[-1].recv(1)


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end closes the connection. It may send some bytes first."""
    try:
        while connection.recv(NONCE):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_question_to_a_stopped_leader_times_out_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_follower, "SILENCE_S", 0.05)
    with accepting.listen("127.0.0.1") as stopped:  # the kernel accepts the connection
        there = Leadership("a", "a#1", "127.0.0.1", stopped.getsockname()[1], SECRET)
        with pytest.raises(PeerGone, match="no answer: timed out"):
            ask_leader(there)


def test_a_leader_that_ends_drops_its_connections_in_silence(
    cleanup: ExitStack, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    leader = Leader()
    with ExitStack() as serving:
        there = serve(serving, leader)
        stranger = cleanup.enter_context(socket.create_connection((there.host, there.port)))
        stranger.settimeout(PATIENCE_S)
        assert len(stranger.recv(NONCE)) == NONCE
        agent = cleanup.enter_context(Wire.connect(there.host, there.port, SECRET))
        agent.send_raw_message(telemetry_messages.encoded(Tell((telemetry("b", 1),))))
        agent.receive_raw_message()
    assert _is_closed(stranger)
    assert [record.getMessage() for record in caplog.records] == []
    assert capfd.readouterr() == ("", "")


def test_an_agent_whose_address_a_router_translates_listens_on_all_interfaces() -> None:
    with (
        accepting.listen(ROUTED) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), PATIENCE_S),
    ):
        assert listener.getsockname()[0] == "0.0.0.0"
    replicas, told = etcd_peers.listen("a", ROUTED)
    with replicas, socket.create_connection(("127.0.0.1", told.port), PATIENCE_S):
        assert told.host == ROUTED


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 64}.example.org"])
def test_a_leader_with_an_invalid_host_name_is_gone(host: str) -> None:
    with pytest.raises(PeerGone, match="is not the name of a host"):
        ask_leader(Leadership("a", "a#1", host, 1, SECRET))


def test_an_answer_that_names_an_impossible_time_is_invalid() -> None:
    with pytest.raises(PeerGone, match="every_s"):
        telemetry_messages.answer(b'{"type":"taken","heard":{"every_s":1e300}}')


def test_all_nodes_of_a_large_job_come_in_batches_and_then_only_what_changes(cleanup: ExitStack) -> None:
    leader = Leader()
    there, names = serve(cleanup, leader), [f"n{n:04}" for n in range(3 * BATCH_NODES + 1)]
    leader.hear(tuple(telemetry(name, 1) for name in names))
    assert sorted(ask_leader(there).nodes) == names
    with Wire.connect(there.host, there.port, SECRET) as wire:
        sizes = []
        for n in range(6):
            if n == 5:
                leader.hear((telemetry("n0007", 2),))
            wire.send_raw_message(telemetry_messages.encoded(Ask()))
            answer = cast(Any, telemetry_messages.answer(wire.receive_raw_message()))
            sizes.append((len(answer.nodes), answer.more))
    assert sizes == [(BATCH_NODES, True)] * 3 + [(1, False), (0, False), (1, False)]


def test_an_agent_that_does_not_lead_answers_that_it_does_not(cleanup: ExitStack) -> None:
    leader = Leader()
    leader.known = None
    there = serve(cleanup, leader)
    with pytest.raises(PeerGone, match="does not lead"):
        ask_leader(there)
    with Wire.connect(there.host, there.port, SECRET) as wire:
        wire.send_raw_message(telemetry_messages.encoded(Tell((telemetry("b", 1),))))
        assert telemetry_messages.answer(wire.receive_raw_message()) == NotLeading()


def test_a_follower_sees_each_change_and_goes_on_with_the_next_leader(
    cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticd.daemon.leader_link.telemetry_follower.EVERY_S", 0.01)
    seen, change = list[JobTelemetry | None](), threading.Condition()

    def note(known: JobTelemetry | None) -> None:
        with change:
            seen.append(known)
            change.notify_all()

    def until_step(step: int) -> bool:
        want = telemetry("b", step)
        with change:
            return change.wait_for(lambda: seen and seen[-1] and seen[-1].nodes.get("b") == want, PATIENCE_S)

    first, second = Leader(), Leader()
    follower = TelemetryFollower(note)
    cleanup.callback(follower.close)
    first.hear((telemetry("b", 1),))
    follower.follow(serve(cleanup, first))
    assert until_step(1)
    first.hear((telemetry("b", 2),))
    assert until_step(2)
    second.hear((telemetry("b", 3),))
    follower.follow(serve(cleanup, second))
    assert until_step(3)
