"""The agent's end of the links to its workers: admission, and messages in both directions.

Workers connect to an abstract Unix socket, which every user of the machine can find in /proc/net/unix. The
agent therefore admits only processes that the warden started as workers, by the credentials that the kernel
reports. Their children are refused. ``link_protocol`` checks the order of the messages.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from functools import partial

from elasticd.channel.codec import BadMessage, ChannelClosed
from elasticd.channel.framing import Channel, close_all, is_ours, listen, peer_of
from elasticd.channel.worker_messages import AGENT_TO_WORKER, WORKER_TO_AGENT, AgentToWorker, WorkerToAgent
from elasticd.procs.linux import started_at
from elasticd.procs.warden_client import Warden

_EARLY_MAX = 64


class WorkerLine:
    """The link of one worker, from before its start until after its end.

    ``heard`` is called with each message, and ``lost`` with the reason when the link ends other than by
    ``hang_up``. Both are called in the warden client's thread.
    """

    def __init__(
        self, switchboard: Switchboard, heard: Callable[[WorkerToAgent], None], lost: Callable[[str], None]
    ) -> None:
        self._switchboard = switchboard
        self._heard = heard
        self._lost = lost
        self._lock = threading.Lock()
        self._channel: Channel[AgentToWorker, WorkerToAgent] | None = None
        self.pid = 0
        self._started_at = 0

    def started(self, pid: int) -> None:
        """Note the pid of the worker's process. Called in the warden client's thread."""
        self.pid, self._started_at = pid, started_at(pid)
        self._switchboard._is_known(self)

    def tell(self, message: AgentToWorker) -> bool:
        """Send a message, and return whether it was sent. Never blocks: the link to a worker that does not
        read is cut."""
        with self._lock:
            if self._channel is None:
                return False
            try:
                self._channel.send(message, wait=False)
                return True
            except ChannelClosed:
                pass
        self.hang_up()
        return False

    def release(self) -> None:
        """End the link. The worker may connect again."""
        self._close()

    def hang_up(self) -> None:
        """End the link, and refuse further connections."""
        self._switchboard._forget(self)
        self._close()

    def _close(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
            if channel is not None:
                with contextlib.suppress(OSError):
                    channel.socket.shutdown(socket.SHUT_RDWR)  # reaches the worker even if a fork has it
        if channel is not None:
            self._switchboard._warden.unwatch(channel.socket)

    def _is(self, pid: int) -> bool:
        """Return whether ``pid`` is still the started process, not a later one with the same pid, and has no
        link yet."""
        return self._channel is None and 0 < self._started_at == started_at(pid)

    def _open(self, sock: socket.socket) -> None:
        channel = Channel(sock, AGENT_TO_WORKER, WORKER_TO_AGENT)
        with self._lock:
            self._channel = channel
        self._switchboard._warden.watch(sock, partial(self._readable, channel))

    def drain(self) -> None:
        """Handle the messages that an ended worker has sent, up to the first that is none. Called in the
        warden client's thread."""
        with contextlib.suppress(ChannelClosed):
            while (channel := self._channel) is not None and (heard := channel.poll()) is not None:
                message, files = heard
                close_all(files)
                self._heard(message)

    def _readable(self, channel: Channel[AgentToWorker, WorkerToAgent]) -> None:
        if channel is not self._channel:
            return
        try:
            heard = channel.poll()
            if heard is not None:
                message, files = heard
                close_all(files)
                self._heard(message)
        except BadMessage as error:
            self._break(str(error))
        except ChannelClosed:
            self._break("")

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
        self._socket = listen(self.address)
        self._socket.setblocking(False)
        warden.watch(self._socket, self._answer)

    def line(self, heard: Callable[[WorkerToAgent], None], lost: Callable[[str], None]) -> WorkerLine:
        """Return a line for a worker that is about to start."""
        line = WorkerLine(self, heard, lost)
        self._unborn.add(line)
        return line

    def close(self) -> None:
        """Accept no more connections. Existing lines stay open until their owners hang up."""
        self._warden.unwatch(self._socket)
        self._refuse_early()

    # ------------------------------------------------------------ in the warden client's thread

    def _answer(self) -> None:
        try:
            caller, _ = self._socket.accept()
        except OSError:  # the caller has left, or no descriptor is free
            return
        pid = peer_of(caller)
        line = self._lines.get(pid)
        if not is_ours(caller):
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
