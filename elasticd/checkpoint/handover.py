"""How workers and the saver talk: short JSON messages and open files, over a Unix socket.

Worker to saver:

* ``key``: ``key``. First, to a saver that has no agent: the secret that the ranks share.
* ``open``: ``path token rank world round fence locals holder last every``. Who it is, in which world, and
  which ranks of that world are served here; the job's round; which node holds copies; what to keep.
* ``plan``: ``plan size``, and a file with what is the same for all its saves (``Paper``).
* ``buffer``: ``plan buffer``, and the memory in which shards will lie.
* ``torn``: ``buffer``. It is about to be written into.
* ``skip``: ``step``. It was not copied, since both buffers are still being written.
* ``save``: ``plan buffer step name at blocked_s``. It holds this rank's whole shard.
* ``miss``: ``name step why``. This rank will not hand over what others do.
* ``wait``: ``on``. Training waits for what was handed over, or does so no more.
* ``known``: ``path``. What is committed there; the answer is ``known`` (``own``: this job has committed
  there; ``why``: it cannot be told), with a file of it.
* ``survey``: ``path``. What is held in memory of worlds that are over, here and, where copies are held, by
  other nodes; the answer is ``offers``, with a file of them.
* ``there``: asked for a sign of life, while an answer takes long; the answer is ``here``.
* ``lend``: ``path name nodes``. The shards of that state that are here, each a ``held``, and then where
  those nodes are to be asked: ``places``, with a file of them.

Saver to worker: ``free`` (``plan buffer``: it is on disk and with who holds a copy, or never will be),
``copied`` (``plan buffer``: the latter), ``committed`` (``name step took_s size``), ``written`` (``name``: as
far as it is of this node; another one commits), ``failed`` (``name step why``), ``held`` (``rank``, and the
memory and its paper).
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import mmap
import os
import select
import socket
import struct
from dataclasses import dataclass
from typing import Any, Final

from elasticd.checkpoint import hugefiles
from elasticd.checkpoint.available import available

Message = dict[str, Any]
_HUGE: Final = 2 << 20  # bytes of a huge page
_ASKERS_MAX: Final = 64  # for memory of one container at one instant
_MESSAGE_MAX: Final = 1 << 16  # bytes
_FILES_MAX: Final = 4
SILENCE_S: Final = 60.0  # of a saver that is alive: it may be starting, on a busy machine
_LENGTHS = struct.Struct("<QQ")


class Gone(ConnectionError):
    """The other end is gone."""


class SaverSilent(Gone):
    """The other end is there, and gives no sign of life: it is stopped, or stuck."""


class SaverSocket:
    """One end of a conversation. Files that are sent are dup'ed; received ones are the caller's."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def send(self, message: Message, files: tuple[int, ...] = (), *, wait: bool = True) -> None:
        """Raises Gone; also, if told not to wait, where the other end has long not listened."""
        raw = json.dumps(message).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        try:
            self.socket.sendmsg([raw], rights, socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT))
        except OSError as error:
            raise Gone(f"the other end does not listen: {error.strerror or error}") from error

    def reply(self, message: Message, files: tuple[int, ...] = ()) -> None:
        """Without waiting. That the other end is gone is noticed where it is read from."""
        with contextlib.suppress(Gone):
            self.send(message, files, wait=False)

    def receive(self, *, wait: bool = True) -> tuple[Message, list[int]] | None:
        """None if there is nothing yet (only if told not to wait). Raises Gone."""
        room = socket.CMSG_SPACE(_FILES_MAX * array.array("i").itemsize)
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            try:
                raw, rights, _, _ = self.socket.recvmsg(_MESSAGE_MAX, room, flags)
            except ConnectionResetError:  # it left without reading all; what it had said comes after that
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
        """The next thing a saver has to say to what it was asked, however long that takes, while it gives
        signs of life. Raises Gone; Silent where it has given none for ``SILENCE_S``."""
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
    """A socket to be connected to by others of this user and host, and its name (abstract: it is no
    file, and gone with the process)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = name or f"elasticd-saver-{os.getpid()}-{os.urandom(8).hex()}"
    sock.bind(f"\0{name}")
    sock.listen(512)
    return sock, name


def connect(name: str, secret: str = "") -> SaverSocket:
    """``secret``: what a saver without an agent asks for. Raises Gone where nobody listens by that name, or
    somebody else's process does."""
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


def is_ours(sock: socket.socket) -> bool:
    """Whether the process at the other end is of this user."""
    return bool(_peer(sock)[1] == os.geteuid())


def is_of(sock: socket.socket, agent: int) -> bool:
    """Whether the process at the other end is the agent of this pid, or one of its descendants: a worker, or
    what a worker started. The kernel says so, and no secret has to be kept from other processes."""
    pid = _peer(sock)[0]
    while pid > 0 and pid != agent:
        try:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it has ended
            return False
    return pid == agent > 0


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Pid and user of the process that made the connection."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


@dataclass(frozen=True, slots=True)
class Paper:
    """What is the same for all saves of a plan. ``metadata``: empty but where it is written."""

    index: bytes
    metadata: bytes

    def file(self) -> int:
        """In memory, for ``SaverSocket.send``; the caller closes it."""
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


class Memory:
    """A shard's place in memory, which outlives the process that filled it for as long as another
    holds it, and is gone when nobody does. Not a file, so that it cannot be left behind."""

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        self.fd = fd
        self.size = size
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if writable else 0)  # pay for the pages now
        self.map = mmap.mmap(fd, max(size, 1), flags=flags, prot=protection)
        self.view = memoryview(self.map)[:size]

    @classmethod
    def make(cls, size: int) -> Memory:
        """Raises OSError where there is not so much."""
        _require(size)
        fd = hugefiles.make_file() if size >= _HUGE else None
        if fd is None:
            fd = os.memfd_create("elasticd-shard", os.MFD_CLOEXEC)
        try:
            _set_aside(fd, max(size, 1))
            return cls(fd, size, writable=True)
        except BaseException:
            os.close(fd)
            raise

    def __del__(self) -> None:  # whoever still reads or writes it holds its mapping
        if hasattr(self, "map"):
            os.close(self.fd)


def _set_aside(fd: int, size: int) -> None:
    """So much memory for a file; a part at a time, as others ask for as much at the same instant, and whoever
    passes the limit of a container is killed. Raises OSError."""
    at = 0
    while at < size:
        part = max(_HUGE, _require(size - at) // _ASKERS_MAX // _HUGE * _HUGE)
        os.posix_fallocate(fd, at, min(part, size - at))
        at += part


def _require(size: int) -> int:
    """That there is so much memory, and enough beside it that others may be a part ahead of what is seen of
    them; how much there is beside it. Raises OSError."""
    there = available()
    if size + min(size, _ASKERS_MAX * _HUGE) > there:
        raise OSError(errno.ENOMEM, f"only {there} bytes are available")
    return there - size
