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
from elasticd.channel.framing import Channel, accept, close_all, is_ours, listen, peer_of
from elasticd.channel.worker_messages import AGENT_TO_WORKER, WORKER_TO_AGENT, AgentToWorker, WorkerToAgent
from elasticd.procs.linux import started_at
from elasticd.procs.warden_client import Warden

_EARLY_MAX = 64


class WorkerLink:
    """The agent's end of one worker's link, from before the worker's start until after its exit.

    ``heard`` is called with each message. ``lost`` is called when the worker closes the link, with "", or
    sends an invalid message, with the reason. Both are called in the warden client's thread.
    """

    def __init__(
        self, listener: LinkListener, heard: Callable[[WorkerToAgent], None], lost: Callable[[str], None]
    ) -> None:
        self._listener = listener
        self._heard = heard
        self._lost = lost
        self._lock = threading.Lock()
        self._channel: Channel[AgentToWorker, WorkerToAgent] | None = None
        self.pid = 0
        self._started_at = 0

    def started(self, pid: int) -> None:
        """Note the pid of the worker's process. Called in the warden client's thread."""
        self.pid, self._started_at = pid, started_at(pid)
        self._listener._is_known(self)

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
        self.close()
        return False

    def close(self) -> None:
        """End the connection, and refuse further ones."""
        self._listener._forget(self)
        self.disconnect()

    def disconnect(self) -> None:
        """End the connection. The worker may connect again."""
        with self._lock:
            channel, self._channel = self._channel, None
            if channel is not None:
                with contextlib.suppress(OSError):
                    # Reaches the worker even if a child of the agent has inherited the socket.
                    channel.socket.shutdown(socket.SHUT_RDWR)
        if channel is not None:
            self._listener._warden.unwatch(channel.socket)

    def _may_connect(self, pid: int) -> bool:
        """Return whether ``pid`` is still this worker's process, not a later one with the same pid, and has
        not connected yet."""
        return self._channel is None and 0 < self._started_at == started_at(pid)

    def _open(self, sock: socket.socket) -> None:
        channel = Channel(sock, AGENT_TO_WORKER, WORKER_TO_AGENT)
        with self._lock:
            self._channel = channel
        self._listener._warden.watch(sock, partial(self._readable, channel))

    def drain(self) -> None:
        """Handle the messages that an ended worker has sent, up to the first invalid one. Called in the
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
        self.disconnect()
        self._lost(why)


class LinkListener:
    """Accepts the connections of workers. ``address``: the value of ``ELASTICD_LINK`` in their
    environment."""

    def __init__(self, warden: Warden) -> None:
        self._warden = warden
        self.address = f"elasticd-link-{secrets.token_hex(16)}"
        self._starting: set[WorkerLink] = set()  # links whose worker's pid is not known yet
        self._links: dict[int, WorkerLink] = {}
        self._early: dict[
            int, socket.socket
        ] = {}  # by pid: connections of processes not yet known as workers
        self._socket = listen(self.address)
        self._socket.setblocking(False)
        warden.watch(self._socket, self._accept)

    def new_link(self, heard: Callable[[WorkerToAgent], None], lost: Callable[[str], None]) -> WorkerLink:
        """Return a link for a worker that is about to start."""
        link = WorkerLink(self, heard, lost)
        self._starting.add(link)
        return link

    def close(self) -> None:
        """Accept no more connections. Open connections stay open until their links are closed."""
        self._warden.unwatch(self._socket)
        self._refuse_early()

    # ------------------------------------------------------------ in the warden client's thread

    def _accept(self) -> None:
        caller = accept(self._socket)
        if caller is None:
            return
        pid = peer_of(caller)
        link = self._links.get(pid)
        if not is_ours(caller):
            caller.close()
        elif link is not None and link._may_connect(pid):
            link._open(caller)
        elif link is None and self._starting and len(self._early) < _EARLY_MAX and pid not in self._early:
            self._early[pid] = caller  # the worker may be faster than the warden's message
        else:
            caller.close()

    def _is_known(self, link: WorkerLink) -> None:
        self._starting.discard(link)
        self._links[link.pid] = link
        caller = self._early.pop(link.pid, None)
        if caller is not None and link._may_connect(link.pid):
            link._open(caller)
        elif caller is not None:
            caller.close()
        if not self._starting:
            self._refuse_early()

    def _forget(self, link: WorkerLink) -> None:
        self._starting.discard(link)
        if self._links.get(link.pid) is link:
            del self._links[link.pid]
        if not self._starting:
            self._warden.call_soon(self._refuse_early)

    def _refuse_early(self) -> None:
        if not self._starting:
            while self._early:
                self._early.popitem()[1].close()
