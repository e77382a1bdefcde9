"""A process between two nodes can end their connection, and change nothing that they send."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from elasticd.checkpoint.replication.wire import PIECE, PeerGone, Wire

SECRET = "secret of the job"
GREETING = 64  # bytes that each end sends first: its random bytes and its proof
HEAD = struct.Struct("<Q16s")
MESSAGE = {"do": "hold", "size": 3 * PIECE}
Frames = list[bytes]


class Relay:
    """Passes on what both ends send. The client's first ``count`` frames are passed on together, as
    ``change`` returns them."""

    def __init__(self, count: int, change: Callable[[Frames], Frames]) -> None:
        self._count, self._change = count, change
        self.seen: Frames = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.server, self._to_server = socket.socketpair()
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        with contextlib.suppress(OSError), client, self._to_server as server:
            back = threading.Thread(target=pass_on, args=(server, client), daemon=True)
            back.start()
            server.sendall(taken(client, GREETING))
            for _ in range(self._count):
                head = taken(client, HEAD.size)
                self.seen.append(head + taken(client, HEAD.unpack(head)[0]))
            for frame in self._change(list(self.seen)):
                server.sendall(frame)
            pass_on(client, server)

    def close(self) -> None:
        self._listener.close()
        self.server.close()
        self._thread.join(60.0)


def pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


def taken(sock: socket.socket, length: int) -> bytes:
    content = b""
    while len(content) < length:
        piece = sock.recv(length - len(content))
        if not piece:
            raise OSError("it has ended")
        content += piece
    return content


@contextlib.contextmanager
def relayed(change: Callable[[Frames], Frames]) -> Iterator[tuple[Wire, Wire, Relay]]:
    """Both ends of a connection on which the relay changes the client's first four frames."""
    relay = Relay(4, change)
    accepted: list[Wire] = []
    greeter = threading.Thread(target=lambda: accepted.append(Wire.accept(relay.server, SECRET)))
    greeter.start()
    client = Wire.connect("127.0.0.1", relay.port, SECRET)
    greeter.join()
    try:
        yield client, accepted[0], relay
    finally:
        client.close()
        accepted[0].close()
        relay.close()


def heard_of(change: Callable[[Frames], Frames]) -> bytes:
    """Return the bytes that the server accepts when the client sends a shard of zeros. Raises PeerGone."""
    with relayed(change) as (client, server, _):
        sender = threading.Thread(target=sent, args=(client,))
        sender.start()
        try:
            assert server.receive_message() == MESSAGE
            into = bytearray(3 * PIECE)
            server.receive_data(memoryview(into))
            return bytes(into)
        finally:
            server.close()
            client.close()
            sender.join()


def sent(client: Wire) -> None:
    with contextlib.suppress(PeerGone):
        client.send_message(MESSAGE)
        client.send_data(memoryview(bytes(3 * PIECE)))


def with_a_billion(frame: bytes) -> bytes:
    """Return the state with 1e9 in place of its first number, 0.0."""
    return frame[: HEAD.size] + struct.pack("<f", 1e9) + frame[HEAD.size + 4 :]


def with_another_seal(frame: bytes) -> bytes:
    """Return the frame with one bit of its seal changed."""
    last = HEAD.size - 1
    return frame[:last] + bytes([frame[last] ^ 1]) + frame[HEAD.size :]


def test_an_unchanged_frame_is_accepted() -> None:
    assert heard_of(lambda frames: frames) == bytes(3 * PIECE)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda f: [f[0], with_a_billion(f[1]), *f[2:]], id="a number changed"),
        pytest.param(lambda f: [*f[:3], with_a_billion(f[3])], id="the last number changed"),
        pytest.param(lambda f: [f[0].replace(b"hold", b"held"), *f[1:]], id="a word changed"),
        pytest.param(lambda f: [with_another_seal(f[0]), *f[1:]], id="seal changed"),
        pytest.param(lambda f: [f[0], f[2], f[1], f[3]], id="two turned around"),
        pytest.param(lambda f: [f[0], f[1], f[1], f[3]], id="one said twice for another"),
        pytest.param(lambda f: [f[0], f[0], *f[1:]], id="one said again"),
        pytest.param(lambda f: [f[0], *f[2:], f[1]], id="one late"),
        pytest.param(lambda f: f[1:], id="one left out"),
    ],
)
def test_a_changed_frame_is_refused(change: Callable[[Frames], Frames]) -> None:
    with pytest.raises(PeerGone):
        heard_of(change)


def test_what_one_conversation_said_is_worth_nothing_in_another_nor_the_other_way() -> None:
    with relayed(lambda frames: frames) as (client, server, relay):
        sender = threading.Thread(target=sent, args=(client,))
        sender.start()
        server.receive_message()
        server.receive_data(memoryview(bytearray(3 * PIECE)))
        sender.join()
        earlier = relay.seen
        server._send([earlier[0]])  # the client's own frame, sent back
        with pytest.raises(PeerGone, match="its seal is wrong"):
            client.receive_message()
    with pytest.raises(PeerGone, match="its seal is wrong"):
        heard_of(lambda _: earlier)
