"""How savers and workers of different nodes talk about memory: over TCP, to those who know the secret,
in frames that carry a checksum. JSON and raw bytes; nothing is ever unpickled.

Each end proves that it knows the secret without showing it (an HMAC of what both have drawn). That keeps
strangers out; it does not hide what goes over the network, as the training's own messages are not hidden.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Iterable
from typing import Any, Final, Self

import msgspec
import xxhash

Message = dict[str, Any]
PIECE: Final = 4 << 20  # bytes of raw data in a frame at most
_SAID_MAX: Final = 256 << 20  # bytes of a message; the index of a large model is one
_HEAD = struct.Struct("<QQ")  # length and xxh3 of 64 bits
_NONCE: Final = 32
_CONNECT_S: Final = 5.0
SILENCE_S: Final = 20.0  # of the other end, in the middle of something


class PeerGone(ConnectionError):
    """Another node's saver cannot be talked to, or no longer. The message says why."""


class Wire:
    """One end of an authenticated connection. All of it blocks; whatever goes wrong is PeerGone, and
    then it is of no use any more."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.settimeout(SILENCE_S)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, host: str, port: int, secret: str) -> Self:
        """Raises PeerGone where nobody answers, or somebody who does not know the secret."""
        try:
            sock = socket.create_connection((host, port), _CONNECT_S)
        except OSError as error:
            raise PeerGone(f"nobody answers at {host}:{port}: {error.strerror or error}") from error
        wire = cls(sock)
        try:
            wire._greet(secret, server=False)
        except BaseException:
            wire.close()
            raise
        return wire

    @classmethod
    def accept(cls, sock: socket.socket, secret: str) -> Self:
        """The other end of a connection that somebody made. Raises PeerGone for a stranger."""
        wire = cls(sock)
        wire._greet(secret, server=True)
        return wire

    def _greet(self, secret: str, *, server: bool) -> None:
        mine = os.urandom(_NONCE)
        self._send([mine])
        theirs = self._take(_NONCE)
        both = mine + theirs if server else theirs + mine
        proofs = [
            hmac.digest(secret.encode(), side + both, hashlib.sha256) for side in (b"server", b"client")
        ]
        if mine == theirs:
            raise PeerGone("it only repeats what it is told")
        if not server:  # whoever asks proves itself first: a server gives nothing away to strangers
            self._send([proofs[1]])
            expected = proofs[0]
        else:
            expected = proofs[1]
        if not hmac.compare_digest(self._take(len(expected)), expected):
            raise PeerGone("it does not know the secret of this job")
        if server:
            self._send([proofs[0]])

    # ------------------------------------------------------------ what is said

    def say(self, message: Message) -> None:
        self.say_raw(msgspec.json.encode(message))

    def hear(self) -> Message:
        try:
            heard = msgspec.json.decode(self.hear_raw(), type=dict)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise PeerGone(f"it talks nonsense: {error}") from error
        return heard

    def say_raw(self, content: bytes) -> None:
        self._send([_HEAD.pack(len(content), xxhash.xxh3_64_intdigest(content)), content])

    def hear_raw(self) -> bytes:
        length, digest = _HEAD.unpack(self._take(_HEAD.size))
        if length > _SAID_MAX:
            raise PeerGone(f"it wants to say {length} bytes at once")
        content = self._take(length)
        _check(content, digest)
        return content

    # ------------------------------------------------------------ what is carried

    def send(self, content: memoryview) -> None:
        """In frames; the other end knows how much it is."""
        for at in range(0, len(content), PIECE):
            piece = content[at : at + PIECE]
            self._send([_HEAD.pack(len(piece), xxhash.xxh3_64_intdigest(piece)), piece])

    def receive(self, into: memoryview) -> None:
        """What the other end sends, which is just as long. Raises PeerGone where what has come is not
        what was sent; then ``into`` is in no defined state."""
        for at in range(0, len(into), PIECE):
            piece = into[at : at + PIECE]
            length, digest = _HEAD.unpack(self._take(_HEAD.size))
            if length != len(piece):
                raise PeerGone(f"it sends {length} bytes where {len(piece)} were to come")
            self._fill(piece)
            _check(piece, digest)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ bytes

    def _send(self, parts: Iterable[bytes | memoryview]) -> None:
        try:
            for part in parts:
                self._socket.sendall(part)
        except OSError as error:
            raise PeerGone(f"it does not take what is sent: {error.strerror or error}") from error

    def _take(self, length: int) -> bytes:
        content = bytearray(length)
        self._fill(memoryview(content))
        return bytes(content)

    def _fill(self, into: memoryview) -> None:
        try:
            while into:
                read = self._socket.recv_into(into)
                if not read:
                    raise PeerGone("it has closed the connection")
                into = into[read:]
        except PeerGone:
            raise
        except OSError as error:
            raise PeerGone(f"it does not answer: {error.strerror or error}") from error


def _check(content: bytes | memoryview, digest: int) -> None:
    if xxhash.xxh3_64_intdigest(content) != digest:
        raise PeerGone("what has come is not what was sent: its checksum is wrong")
