"""The agent's end of the links to its workers: admission, and bytes in both directions.

Workers connect to an abstract Unix socket, which every user of the machine can find in /proc/net/unix. The
agent therefore admits only processes that the warden started as workers, by the credentials that the kernel
reports. Their children are refused. ``conversation`` checks the messages.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from functools import partial

from elasticd.core.link import FromAgent, Lines, LinkError, Message, encode
from elasticd.procs.keeper import Warden
from elasticd.procs.linux import started_at

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_CHUNK_BYTES = 1 << 16
_EARLY_MAX = 64


class WorkerLine:
    """The link of one worker, from before its start until after its end.

    ``heard`` is called with each message, and ``lost`` with the reason when the link ends other than by
    ``hang_up``. Both are called in the keeper's thread.
    """

    def __init__(
        self, switchboard: Switchboard, heard: Callable[[Message], None], lost: Callable[[str], None]
    ) -> None:
        self._switchboard = switchboard
        self._heard = heard
        self._lost = lost
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._lines = Lines()
        self.pid = 0
        self._started_at = 0

    def started(self, pid: int) -> None:
        """Note the pid of the worker's process. Called in the keeper's thread."""
        self.pid, self._started_at = pid, started_at(pid)
        self._switchboard._is_known(self)

    def tell(self, message: FromAgent) -> bool:
        """Send a message, and return whether it was sent. Never blocks: the link to a worker that does not
        read is cut."""
        data = encode(message)
        with self._lock:
            if self._socket is None:
                return False
            try:
                sent = self._socket.send(data)
            except OSError:
                sent = 0
        if sent < len(data):
            self.hang_up()
        return sent == len(data)

    def release(self) -> None:
        """End the link. The worker may connect again."""
        self._close()

    def hang_up(self) -> None:
        """End the link, and refuse further connections."""
        self._switchboard._forget(self)
        self._close()

    def _close(self) -> None:
        with self._lock:
            sock, self._socket = self._socket, None
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # reaches the worker even if a fork has it
        if sock is not None:
            self._switchboard._warden.unwatch(sock)

    def _is(self, pid: int) -> bool:
        """Return whether ``pid`` is still the started process, not a later one with the same pid, and has no
        link yet."""
        return self._socket is None and 0 < self._started_at == started_at(pid)

    def _open(self, sock: socket.socket) -> None:
        with self._lock:
            self._socket = sock
            self._lines = Lines()
        self._switchboard._warden.watch(sock, partial(self._readable, sock))

    def _readable(self, sock: socket.socket) -> None:
        if sock is not self._socket:
            return
        try:
            data = sock.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._break(error.strerror or "it broke")
            return
        if not data:
            self._break("")
            return
        try:
            for message in self._lines.feed(data):
                self._heard(message)
                if sock is not self._socket:
                    return
        except (LinkError, RecursionError) as error:
            self._break(str(error))

    def _break(self, why: str) -> None:
        self._close()
        self._lost(why)


class Switchboard:
    """Accepts the connections of workers. ``address``: the value of ``ELASTICD_LINK`` in their
    environment."""

    def __init__(self, warden: Warden) -> None:
        self._warden = warden
        self.address = f"elasticd-link-{secrets.token_hex(16)}"
        self._unborn: set[WorkerLine] = set()  # lines whose pid is not known yet
        self._lines: dict[int, WorkerLine] = {}
        self._early: dict[int, socket.socket] = {}  # by pid: may be a worker whose pid is not known yet
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(128)
        warden.watch(self._socket, self._answer)

    def line(self, heard: Callable[[Message], None], lost: Callable[[str], None]) -> WorkerLine:
        """Return a line for a worker that is about to start."""
        line = WorkerLine(self, heard, lost)
        self._unborn.add(line)
        return line

    def close(self) -> None:
        """Accept no more connections. Existing lines stay open until their owners hang up."""
        self._warden.unwatch(self._socket)
        self._refuse_early()

    # ------------------------------------------------------------ in the keeper's thread

    def _answer(self) -> None:
        try:
            caller, _ = self._socket.accept()
        except OSError:  # the caller has left, or no descriptor is free
            return
        caller.setblocking(False)
        pid, uid, _ = _CREDENTIALS.unpack(
            caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        line = self._lines.get(pid)
        if uid != os.geteuid():
            caller.close()
        elif line is not None and line._is(pid):
            line._open(caller)
        elif line is None and self._unborn and len(self._early) < _EARLY_MAX and pid not in self._early:
            self._early[pid] = caller  # the worker may be faster than the warden's message
        else:
            caller.close()

    def _is_known(self, line: WorkerLine) -> None:
        self._unborn.discard(line)
        self._lines[line.pid] = line
        caller = self._early.pop(line.pid, None)
        if caller is not None and line._is(line.pid):
            line._open(caller)
        elif caller is not None:
            caller.close()
        if not self._unborn:
            self._refuse_early()

    def _forget(self, line: WorkerLine) -> None:
        self._unborn.discard(line)
        if self._lines.get(line.pid) is line:
            del self._lines[line.pid]
        if not self._unborn:
            self._warden.call_soon(self._refuse_early)

    def _refuse_early(self) -> None:
        if not self._unborn:
            while self._early:
                self._early.popitem()[1].close()
