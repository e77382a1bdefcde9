"""One end of a channel: packets with open files, over a Unix socket. Standard library only.

The sockets are of the type SOCK_SEQPACKET: the kernel keeps the boundaries of packets, delivers a packet with
its files or not at all, and never cuts one. So no end has to keep half a message. A message that is too long
for a packet comes as a file in memory.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from .codec import BadMessage, ChannelClosed, Codec

_Said = TypeVar("_Said")
_Heard = TypeVar("_Heard")
_PACKET_BYTES_MAX = 1 << 16  # smaller than the default limit of a socket, 200 KiB
_FILES_MAX = 16
_FILE = array.array("i").itemsize
_IN_A_FILE = b"in a file"  # the packet of a message that is the content of its first file
_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS}
_SCARCE_PAUSE_S = 0.01
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid


class Channel(Generic[_Said, _Heard]):
    """One end. Files that are sent are duplicated: the sender keeps its own descriptors and closes them.
    The receiver owns the files that it receives."""

    def __init__(self, sock: socket.socket, says: Codec[_Said], hears: Codec[_Heard]) -> None:
        self.socket = sock
        self._says, self._hears = says, hears

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: _Said, files: Sequence[int] = (), *, wait: bool = True) -> None:
        """Send a message. Raises ChannelClosed; with ``wait=False`` also if the socket has no room for
        it."""
        try:
            self._send(self._says.encode(message), files, wait=wait)
        except OSError as error:
            raise ChannelClosed(f"the other process does not read: {error.strerror or error}") from error

    def try_send(self, message: _Said, files: Sequence[int] = ()) -> None:
        """Send a message without waiting. A message that the socket has no room for is lost."""
        with suppress(ChannelClosed):
            self.send(message, files, wait=False)

    def receive(self) -> tuple[_Heard, list[int]]:
        """Wait for a message, and return it with its files. Raises ChannelClosed, or BadMessage."""
        return self._receive(0)

    def poll(self, within_s: float = 0.0) -> tuple[_Heard, list[int]] | None:
        """Return the next message, as ``receive`` does; None if there is none within the time."""
        if within_s > 0:
            _wait_for(self.socket, within_s)
        try:
            return self._receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def close(self) -> None:
        self.socket.close()

    def _receive(self, flags: int) -> tuple[_Heard, list[int]]:
        room = socket.CMSG_SPACE(_FILES_MAX * _FILE)
        flags |= socket.MSG_CMSG_CLOEXEC
        try:
            try:
                raw, attached, came, _ = self.socket.recvmsg(_PACKET_BYTES_MAX, room, flags)
            except ConnectionResetError:  # the other process left messages unread; the rest can be read
                raw, attached, came, _ = self.socket.recvmsg(_PACKET_BYTES_MAX, room, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ChannelClosed(f"the connection is lost: {error.strerror or error}") from error
        files = _files_in(attached)
        try:
            if came & socket.MSG_CTRUNC and len(files) < _FILES_MAX:
                raise BadMessage("this process has no descriptor left for a file of a packet")
            if came & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise BadMessage(f"a packet has more than {_PACKET_BYTES_MAX} bytes or {_FILES_MAX} files")
            if not raw:
                raise ChannelClosed("the other process has closed the channel")
            if raw == _IN_A_FILE and files:
                raw = _content(files.pop(0), self._hears.bytes_max)
            return self._hears.decode(raw), files
        except BaseException:
            close_all(files)
            raise

    def _send(self, raw: bytes, files: Sequence[int], *, wait: bool) -> None:
        assert len(files) < _FILES_MAX, f"{len(files)} files are more than one message carries"
        if len(raw) > _PACKET_BYTES_MAX:
            file = os.memfd_create("elasticd-message", os.MFD_CLOEXEC)
            try:
                with open(file, "wb", closefd=False) as out:
                    out.write(raw)
                self._send(_IN_A_FILE, (file, *files), wait=wait)
            finally:
                os.close(file)
            return
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        self.socket.sendmsg([raw], attached, socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT))


class QueuedChannel(Channel[_Said, _Heard]):
    """An end that never waits for the other one. Messages are queued if the socket does not take them yet, or
    if this process lacks a descriptor or memory."""

    def __init__(self, sock: socket.socket, says: Codec[_Said], hears: Codec[_Heard]) -> None:
        super().__init__(sock, says, hears)
        self._unsent: deque[tuple[bytes, list[int]]] = deque()

    @property
    def pending(self) -> bool:
        """Whether messages are queued for ``flush``."""
        return bool(self._unsent)

    def post(self, message: _Said, files: Sequence[int] = ()) -> None:
        """Queue a message, and send as much as possible. Raises ChannelClosed, or OSError if the message can
        be neither sent nor queued for want of descriptors."""
        raw = self._says.encode(message)
        if self._unsent or not self._is_taken(raw, files):
            self._unsent.append((raw, duplicates(files)))

    def try_send(self, message: _Said, files: Sequence[int] = ()) -> None:
        """As ``post``. The message is lost if the other process has closed the channel."""
        with suppress(ChannelClosed):
            self.post(message, files)

    def flush(self) -> None:
        """Send as much as possible. Raises ChannelClosed."""
        while self._unsent and self._is_taken(*self._unsent[0]):
            close_all(self._unsent.popleft()[1])

    def _is_taken(self, raw: bytes, files: Sequence[int]) -> bool:
        try:
            self._send(raw, files, wait=False)
        except BlockingIOError:
            return False
        except OSError as error:
            if _pause_if_scarce(error):  # the socket is writable: the loop would call ``flush`` again at once
                return False
            raise ChannelClosed(f"the connection is lost: {error.strerror or error}") from error
        return True

    def close(self) -> None:
        while self._unsent:
            close_all(self._unsent.popleft()[1])
        super().close()


# ------------------------------------------------------------ sockets


def pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def listen(name: str) -> socket.socket:
    """Return a socket that listens as ``name``. The name is abstract: it is no file, and ends with the
    process."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(f"\0{name}")
    sock.listen(512)
    return sock


def accept(listener: socket.socket) -> socket.socket | None:
    """Accept a connection of a socket that does not block. Return None if there is none.

    Also return None if there is no descriptor for the connection. The socket then stays readable, so this
    function waits a moment before the caller's loop tries again.
    """
    try:
        return listener.accept()[0]
    except OSError as error:
        _pause_if_scarce(error)
        return None


def connect(name: str) -> socket.socket:
    """Connect to the process that listens as ``name``. Raises ChannelClosed if there is none, or if it is
    another user's: every user of the machine may take a name."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(f"\0{name}")
        if not is_ours(sock):
            raise ChannelClosed(f"the process that listens as {name} belongs to another user")
    except ChannelClosed:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise ChannelClosed(f"no process listens as {name}: {error.strerror}") from error
    return sock


def peer_of(sock: socket.socket) -> int:
    """Return the pid of the process that made the connection, as the kernel reports it."""
    return _credentials(sock)[0]


def is_ours(sock: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this user."""
    return _credentials(sock)[1] == os.geteuid()


def _credentials(sock: socket.socket) -> tuple[int, int]:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


# ------------------------------------------------------------ files


def duplicates(files: Iterable[int]) -> list[int]:
    """Return duplicates of all files. Raises OSError, and leaves none, if there are too few descriptors."""
    made: list[int] = []
    try:
        made.extend(map(os.dup, files))
    except OSError:
        close_all(made)
        raise
    return made


def close_all(files: Iterable[int]) -> None:
    for fd in files:
        with suppress(OSError):
            os.close(fd)


def _files_in(attached: Iterable[tuple[int, int, bytes]]) -> list[int]:
    files = array.array("i")
    for level, kind, data in attached:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    return list(files)


def _content(fd: int, bytes_max: int) -> bytes:
    """Return the content of a file in memory, and close the file. Raises BadMessage."""
    try:
        # Fails for files that are not in memory, on which this process might block.
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
        if size > bytes_max:
            raise BadMessage(f"a message has {size} bytes, and {bytes_max} are allowed")
        return os.pread(fd, size, 0)
    except BadMessage:
        raise
    except OSError as error:
        raise BadMessage(f"the file of a message cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


def _pause_if_scarce(error: OSError) -> bool:
    """Wait a moment if this process lacks a descriptor or memory. Return whether it does."""
    if error.errno not in _SCARCE:
        return False
    time.sleep(_SCARCE_PAUSE_S)
    return True


def _wait_for(sock: socket.socket, within_s: float) -> None:
    """Wait until the socket is readable. Unlike ``select.select``, ``poll`` takes descriptors above 1,023."""
    readable = select.poll()
    readable.register(sock, select.POLLIN)
    readable.poll(max(0.0, within_s) * 1000)
