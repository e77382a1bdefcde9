"""The protocol between workers and the saver: short JSON messages and open files, over a Unix socket.

Worker to saver:

* ``key``: ``key``. The first message to a saver without an agent: the secret that the ranks share.
* ``open``: ``path token rank world round fence locals holder last every``. The worker's rank and world, the
  ranks of that world on this node, the job's round, the node that holds replicas, and what to keep.
* ``plan``: ``plan size``, and a file with what all saves of the plan have in common (``Paper``).
* ``buffer``: ``plan buffer``, and the memory that will hold shards.
* ``torn``: ``buffer``. The worker is about to write into the buffer.
* ``skip``: ``step``. The step was not copied, because both buffers are still being written to disk.
* ``save``: ``plan buffer step name at blocked_s``. The buffer holds this rank's whole shard.
* ``miss``: ``name step why``. This rank will not hand over its shard of that checkpoint.
* ``wait``: ``on``. Training waits until the saves are durable, or no longer waits.
* ``known``: ``path``. Asks for the committed checkpoints. The answer is ``known``, with a file of them
  (``own`` asks only for those of this job; ``why`` says why they cannot be read).
* ``survey``: ``path``. Asks for the shards of ended worlds in memory, on this node and on nodes that hold
  replicas. The answer is ``offers``, with a file.
* ``there``: asks for a sign of life while an answer takes long. The answer is ``here``.
* ``lend``: ``path name nodes``. Asks for the shards of that state. The saver answers with one ``held`` per
  shard on this node, and then with ``places``, a file of the addresses of the named nodes.

Saver to worker:

* ``admitted``. First, by a saver that has an agent: the saver has seen that the process is a worker of that
  agent, and could not see that once the process has ended. Workers hand over nothing before.
* ``free``: ``plan buffer``. The buffer is written and copied to its holder, or never will be.
* ``copied``: ``plan buffer``. The holder has its replica, or never will.
* ``committed``: ``name step took_s size``.
* ``written``: ``name``. This node's shards are written; the saver of another node commits.
* ``failed``: ``name step why``.
* ``held``: ``rank``, and two files: the memory of a shard, and its paper.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
from dataclasses import dataclass
from typing import Any, Final

Message = dict[str, Any]
_MESSAGE_MAX: Final = 1 << 16  # bytes
_FILES_MAX: Final = 4
SILENCE_S: Final = 60.0  # the longest silence of a live saver: it may be starting on a busy machine
_LENGTHS = struct.Struct("<QQ")


class Gone(ConnectionError):
    """The process at the other end is gone."""


class SaverSilent(Gone):
    """The process at the other end exists and gives no sign of life: it is stopped or stuck."""


class SaverSocket:
    """One end of a connection between a worker and the saver. Sent files are duplicated; the caller owns
    received files."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def send(self, message: Message, files: tuple[int, ...] = (), *, wait: bool = True) -> None:
        """Send a message. Raises Gone; with ``wait=False`` also when the other end has stopped reading."""
        raw = json.dumps(message).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        try:
            self.socket.sendmsg([raw], rights, socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT))
        except OSError as error:
            raise Gone(f"the other end does not listen: {error.strerror or error}") from error

    def reply(self, message: Message, files: tuple[int, ...] = ()) -> None:
        """Send without waiting. A closed connection is ignored here, and noticed by the next ``receive``."""
        with contextlib.suppress(Gone):
            self.send(message, files, wait=False)

    def receive(self, *, wait: bool = True) -> tuple[Message, list[int]] | None:
        """Return the next message and its files. With ``wait=False``, return None if no message is there.
        Raises Gone."""
        room = socket.CMSG_SPACE(_FILES_MAX * array.array("i").itemsize)
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            try:
                raw, rights, _, _ = self.socket.recvmsg(_MESSAGE_MAX, room, flags)
            except ConnectionResetError:  # the peer left messages unread; its own can still be read
                raw, rights, _, _ = self.socket.recvmsg(_MESSAGE_MAX, room, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            raise Gone(f"the other end is gone: {error.strerror or error}") from error
        files = array.array("i")
        for level, kind, data in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files.frombytes(data[: len(data) - len(data) % files.itemsize])
        if not raw:
            raise Gone("the other end has closed")
        try:
            message = json.loads(raw)
        except (ValueError, RecursionError) as error:
            message = error
        if not isinstance(message, dict):
            for fd in files:
                os.close(fd)
            raise Gone(f"the other end talks nonsense: {message!r}")
        return message, list(files)

    def answer(self) -> tuple[Message, list[int]]:
        """Return the saver's next answer, however long that takes, as long as the saver gives signs of life.
        Raises Gone; SaverSilent after ``SILENCE_S`` of silence."""
        readable = select.poll()
        readable.register(self.socket, select.POLLIN)
        asked = False
        while True:
            if not readable.poll(SILENCE_S / 2 * 1000):
                if asked:
                    raise SaverSilent(f"it has said nothing for {SILENCE_S:g} s")
                self.send({"is": "there"}, wait=False)
                asked = True
            elif (heard := self.receive()) is not None:
                if heard[0]["is"] != "here":
                    return heard
                asked = False

    def close(self) -> None:
        self.socket.close()


def listen(name: str = "") -> tuple[socket.socket, str]:
    """Return a listening socket and its name. The name is abstract: there is no file, and the name ends with
    the process."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = name or f"elasticd-saver-{os.getpid()}-{os.urandom(8).hex()}"
    sock.bind(f"\0{name}")
    sock.listen(512)
    return sock, name


def connect(name: str, secret: str = "", *, patience_s: float | None = None) -> SaverSocket:
    """Connect to the saver ``name``. ``secret``: what a saver without an agent asks for. A saver with an
    agent admits its workers by itself, and this waits for that. Raises Gone if no saver listens there, if the
    process belongs to another user, or if the saver turns this process away; SaverSilent if the saver says
    nothing for ``patience_s``, or ``SILENCE_S`` by default."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(f"\0{name}")
    except OSError as error:
        sock.close()
        raise Gone(f"no saver listens as {name}: {error.strerror}") from error
    if not is_ours(sock):
        sock.close()
        raise Gone(f"the saver {name} is of another user")
    line = SaverSocket(sock)
    if secret:
        line.send({"is": "key", "key": secret})
        return line
    try:
        _await_admission(line, SILENCE_S if patience_s is None else patience_s)
    except BaseException:
        sock.close()
        raise
    return line


def _await_admission(line: SaverSocket, patience_s: float) -> None:
    readable = select.poll()
    readable.register(line.socket, select.POLLIN)
    if not readable.poll(patience_s * 1000):
        raise SaverSilent(f"it has said nothing for {patience_s:g} s")
    try:
        line.receive()
    except Gone as error:
        raise Gone("the saver has turned this process away, or has ended") from error


def is_ours(sock: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this user."""
    return bool(_peer(sock)[1] == os.geteuid())


def is_of(sock: socket.socket, agent: int) -> bool:
    """Return whether the process at the other end is the agent with this pid or one of its descendants: a
    worker, or a process that a worker started. The kernel reports the pid, so no secret is needed."""
    pid = _peer(sock)[0]
    while pid > 0 and pid != agent:
        try:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # the process has ended
            return False
    return pid == agent > 0


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Return pid and user of the process that made the connection."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


@dataclass(frozen=True, slots=True)
class Paper:
    """What all saves of a plan have in common. ``metadata`` is empty except on the rank that writes it."""

    index: bytes
    metadata: bytes

    def file(self) -> int:
        """Return a file in memory for ``SaverSocket.send``. The caller closes the file."""
        fd = os.memfd_create("elasticd-plan", os.MFD_CLOEXEC)
        with open(fd, "wb", closefd=False) as file:
            file.write(_LENGTHS.pack(len(self.index), len(self.metadata)) + self.index + self.metadata)
        return fd

    @classmethod
    def of(cls, fd: int) -> Paper:
        with open(os.dup(fd), "rb") as file:
            file.seek(0)
            try:
                index, metadata = _LENGTHS.unpack(file.read(_LENGTHS.size))
            except struct.error as error:
                raise ValueError("the paper is cut off") from error
            return cls(file.read(index), file.read(metadata))
