"""The connection between savers, and between workers and other nodes' savers: authenticated TCP with sealed
frames. Messages are JSON, shards are raw bytes; nothing is ever unpickled.

Each end proves that it knows the secret without sending it, by an HMAC over random bytes of both ends. Both
ends derive from the secret one key for each direction of this connection. The seal of a frame is an HMAC of
the frame's number, its length and the SHA-256 of its content. So nobody on the network can change, drop,
repeat, reorder or reflect a frame unnoticed. The content is not encrypted; nor are the messages of the
training.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Self

import msgspec

Message = dict[str, Any]
PIECE: Final = 4 << 20  # the most bytes of raw data in a frame
_MESSAGE_MAX: Final = 256 << 20  # the most bytes of a message; the largest is the index of a large model
_HEAD = struct.Struct("<Q16s")  # the head of a frame: length and seal
_SEALED = struct.Struct("<QQ32s")  # the input of the seal: number, length and SHA-256
_NONCE: Final = 32
_CONNECT_S: Final = 5.0
SILENCE_S: Final = 20.0  # the longest silence of the other end within an exchange


class PeerGone(ConnectionError):
    """Another node's saver cannot be reached, or has closed the connection. The message says why."""


class Wire:
    """One end of an authenticated connection. All methods block. All errors are PeerGone, after which the
    connection cannot be used."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._keys = b"", b""  # for sent frames, for received frames
        self._sent = self._received = 0  # the numbers of frames
        sock.settimeout(SILENCE_S)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, host: str, port: int, secret: str) -> Self:
        """Connect and authenticate. Raises PeerGone if nobody answers, or if the other end does not know the
        secret."""
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
        """Authenticate the other end of an accepted connection. Raises PeerGone if it does not know the
        secret."""
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
            raise PeerGone("an echo in place of an answer")
        if not server:  # the client proves itself first: a server reveals nothing to strangers
            self._send([proofs[1]])
            expected = proofs[0]
        else:
            expected = proofs[1]
        if not hmac.compare_digest(self._take(len(expected)), expected):
            raise PeerGone("the secret of this job is not known there")
        if server:
            self._send([proofs[0]])
        keys = [
            hmac.digest(secret.encode(), b"frames of the " + side + both, hashlib.sha256)
            for side in (b"server", b"client")
        ]
        self._keys = (keys[0], keys[1]) if server else (keys[1], keys[0])

    # ------------------------------------------------------------ messages

    def send_message(self, message: Message) -> None:
        self.send_raw_message(msgspec.json.encode(message))

    def receive_message(self) -> Message:
        try:
            message = msgspec.json.decode(self.receive_raw_message(), type=dict)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise PeerGone(f"an invalid message: {error}") from error
        return message

    def send_raw_message(self, content: bytes) -> None:
        self._send([self._head(len(content), _digest(content)), content])

    def receive_raw_message(self) -> bytes:
        length, seal = _HEAD.unpack(self._take(_HEAD.size))
        if length > _MESSAGE_MAX:
            raise PeerGone(f"a message of {length} bytes, more than {_MESSAGE_MAX}")
        content = self._take(length)
        self._check(length, seal, _digest(content))
        return content

    # ------------------------------------------------------------ raw data

    def send_data(self, content: memoryview) -> None:
        """Send raw bytes in frames. The other end must know how many bytes come."""
        pieces = _pieces(content)
        for piece, digest in zip(pieces, _digests(pieces, len(pieces)), strict=True):
            self._send([self._head(len(piece), digest), piece])

    def receive_data(self, into: memoryview) -> None:
        """Fill ``into`` with the bytes that the other end sends. Raises PeerGone if a seal is wrong; the
        content of ``into`` is then undefined."""
        pieces = _pieces(into)
        heads: list[tuple[int, bytes]] = []

        def filled() -> Iterator[memoryview]:
            for piece in pieces:
                length, seal = _HEAD.unpack(self._take(_HEAD.size))
                if length != len(piece):
                    raise PeerGone(f"a frame of {length} bytes in place of {len(piece)}")
                self._fill(piece)
                heads.append((length, seal))
                yield piece

        for number, digest in enumerate(_digests(filled(), len(pieces))):
            self._check(*heads[number], digest)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ seals

    def _head(self, length: int, digest: bytes) -> bytes:
        """Return the head of the next frame to send."""
        seal = _seal(self._keys[0], self._sent, length, digest)
        self._sent += 1
        return _HEAD.pack(length, seal)

    def _check(self, length: int, seal: bytes, digest: bytes) -> None:
        """Check the seal of the next received frame. Raises PeerGone."""
        if not hmac.compare_digest(seal, _seal(self._keys[1], self._received, length, digest)):
            raise PeerGone("a frame was changed on its way: its seal is wrong")
        self._received += 1

    # ------------------------------------------------------------ bytes

    def _send(self, parts: Iterable[bytes | memoryview]) -> None:
        try:
            for part in parts:
                self._socket.sendall(part)
        except OSError as error:
            raise PeerGone(f"sending to it failed: {error.strerror or error}") from error

    def _take(self, length: int) -> bytes:
        content = bytearray(length)
        self._fill(memoryview(content))
        return bytes(content)

    def _fill(self, into: memoryview) -> None:
        try:
            while into:
                read = self._socket.recv_into(into)
                if not read:
                    raise PeerGone("the connection was closed")
                into = into[read:]
        except PeerGone:
            raise
        except OSError as error:
            raise PeerGone(f"no answer: {error.strerror or error}") from error


def _seal(key: bytes, number: int, length: int, digest: bytes) -> bytes:
    return hmac.digest(key, _SEALED.pack(number, length, digest), hashlib.sha256)[:16]


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).digest()


def _pieces(content: memoryview) -> list[memoryview]:
    return [content[at : at + PIECE] for at in range(0, len(content), PIECE)]


def _digests(pieces: Iterable[memoryview], count: int) -> Iterator[bytes]:
    """Yield the digest of each piece. With several pieces, a thread computes while the caller sends or
    receives the next one."""
    if count < 2:
        yield from map(_digest, pieces)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="elasticd-wire") as beside:
        under_way = None
        for piece in pieces:
            before, under_way = under_way, beside.submit(_digest, piece)
            if before is not None:
                yield before.result()
        if under_way is not None:
            yield under_way.result()
