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
HEAD = struct.Struct("<Q16s")  # the head of a frame: length and seal
_SEALED = struct.Struct("<QQ32s")  # the input of the seal: number, length and SHA-256
NONCE: Final = 32
_CONNECT_S: Final = 5.0
SILENCE_S: Final = 20.0  # the longest silence of the other end within an exchange


class PeerGone(ConnectionError):
    """Another node's saver cannot be reached, or has closed the connection. The message says why."""


class Seals:
    """The proofs, the keys and the frame numbers of one end of a connection; without any input or output.

    ``mine``, ``theirs``: the random bytes of both ends. ``proof``: what this end sends to prove that it knows
    the secret.
    """

    def __init__(self, secret: str, mine: bytes, theirs: bytes, *, server: bool) -> None:
        if mine == theirs:
            raise PeerGone("an echo in place of an answer")
        both = mine + theirs if server else theirs + mine
        sides = (b"server", b"client") if server else (b"client", b"server")
        self.proof, self._expected = (_derived(secret, side + both) for side in sides)
        self._sends, self._receives = (_derived(secret, b"frames of the " + side + both) for side in sides)
        self._sent = self._received = 0  # the numbers of frames

    def check_proof(self, proof: bytes) -> None:
        """Raise PeerGone unless the other end knows the secret."""
        if not hmac.compare_digest(proof, self._expected):
            raise PeerGone("the secret of this job is not known there")

    def head(self, length: int, digest: bytes) -> bytes:
        """Return the head of the next frame to send."""
        seal = _seal(self._sends, self._sent, length, digest)
        self._sent += 1
        return HEAD.pack(length, seal)

    def check(self, length: int, seal: bytes, digest: bytes) -> None:
        """Check the seal of the next received frame. Raises PeerGone."""
        if not hmac.compare_digest(seal, _seal(self._receives, self._received, length, digest)):
            raise PeerGone("a frame was changed on its way: its seal is wrong")
        self._received += 1


class Wire:
    """One end of an authenticated connection. All methods block. All errors are PeerGone, after which the
    connection cannot be used. ``seals``: of ends that have greeted each other."""

    def __init__(self, sock: socket.socket, seals: Seals | None = None) -> None:
        self._socket = sock
        if seals is not None:
            self._seals = seals
        sock.settimeout(SILENCE_S)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(
        cls, host: str, port: int, secret: str, within_s: float = _CONNECT_S, silence_s: float = SILENCE_S
    ) -> Self:
        """Connect and authenticate. Raises PeerGone if nobody answers, or if the other end does not know the
        secret. ``silence_s``: the longest silence of the other end from then on."""
        try:
            sock = socket.create_connection((host, port), within_s)
        except OSError as error:
            raise PeerGone(f"nobody answers at {host}:{port}: {error.strerror or error}") from error
        except UnicodeError as error:
            raise PeerGone(f"{host} is not the name of a host") from error
        wire = cls(sock)
        sock.settimeout(silence_s)
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
        mine = os.urandom(NONCE)
        self._send([mine])
        self._seals = Seals(secret, mine, self._take(NONCE), server=server)
        if not server:  # the client proves itself first: a server reveals nothing to strangers
            self._send([self._seals.proof])
        self._seals.check_proof(self._take(len(self._seals.proof)))
        if server:
            self._send([self._seals.proof])

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
        self._send([self._seals.head(len(content), digest_of(content)), content])

    def receive_raw_message(self, most: int = _MESSAGE_MAX) -> bytes:
        length, seal = HEAD.unpack(self._take(HEAD.size))
        if length > most:
            raise PeerGone(f"a message of {length} bytes, more than {most}")
        content = self._take(length)
        self._seals.check(length, seal, digest_of(content))
        return content

    # ------------------------------------------------------------ raw data

    def send_data(self, content: memoryview) -> None:
        """Send raw bytes in frames. The other end must know how many bytes come."""
        pieces = _pieces(content)
        for piece, digest in zip(pieces, _digests(pieces, len(pieces)), strict=True):
            self._send([self._seals.head(len(piece), digest), piece])

    def receive_data(self, into: memoryview) -> None:
        """Fill ``into`` with the bytes that the other end sends. Raises PeerGone if a seal is wrong; the
        content of ``into`` is then undefined."""
        pieces = _pieces(into)
        heads: list[tuple[int, bytes]] = []

        def filled() -> Iterator[memoryview]:
            for piece in pieces:
                length, seal = HEAD.unpack(self._take(HEAD.size))
                if length != len(piece):
                    raise PeerGone(f"a frame of {length} bytes in place of {len(piece)}")
                self._fill(piece)
                heads.append((length, seal))
                yield piece

        for number, digest in enumerate(_digests(filled(), len(pieces))):
            self._seals.check(*heads[number], digest)

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


def _derived(secret: str, what: bytes) -> bytes:
    return hmac.digest(secret.encode(), what, hashlib.sha256)


def _seal(key: bytes, number: int, length: int, digest: bytes) -> bytes:
    return hmac.digest(key, _SEALED.pack(number, length, digest), hashlib.sha256)[:16]


def digest_of(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).digest()


def _pieces(content: memoryview) -> list[memoryview]:
    return [content[at : at + PIECE] for at in range(0, len(content), PIECE)]


def _digests(pieces: Iterable[memoryview], count: int) -> Iterator[bytes]:
    """Yield the digest of each piece. With several pieces, a thread computes while the caller sends or
    receives the next one."""
    if count < 2:
        yield from map(digest_of, pieces)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="elasticd-wire") as beside:
        under_way = None
        for piece in pieces:
            before, under_way = under_way, beside.submit(digest_of, piece)
            if before is not None:
                yield before.result()
        if under_way is not None:
            yield under_way.result()
