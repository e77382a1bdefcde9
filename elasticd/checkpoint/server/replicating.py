"""Replication between savers: a saver sends its shards to other nodes, stores their shards, and lists the
shards that it holds. Only the saver's loop decides and changes records; threads wait for the network."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from elasticd.channel.framing import accept
from elasticd.checkpoint.format.layout import Layout
from elasticd.checkpoint.replication.peers import WAIT, Host, Peers, PeerSaver, serve
from elasticd.checkpoint.replication.replicas import Label, Offer, Replica, Replicas, offers
from elasticd.checkpoint.replication.wire import SILENCE_S, PeerGone, Wire
from elasticd.checkpoint.server.background import Background
from elasticd.checkpoint.shared_memory import Memory, available
from elasticd.core.facts import SaverAddress

_CALLERS_MAX: Final = 64  # the most callers served at the same time; further callers wait
# The most connections that are not authenticated yet; a further connection closes the oldest.
_STRANGERS_MAX: Final = 256
_FEW: Final = 16  # addresses that are looked up one by one
_SPARE: Final = 0.1  # the share of available memory that stays free


class Replication:
    """Holds and sends replicas. ``me``: this node's address and secret; other nodes connect to ``listener``.
    ``jobs``: the calls in progress, whose results the saver's loop handles."""

    def __init__(
        self,
        me: SaverAddress,
        listener: socket.socket,
        peers: Peers,
        *,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._me = me
        self.listener = listener
        self.jobs = Background()
        self._peers = peers
        self._say = say
        self._replicas = Replicas()
        self._strangers: dict[socket.socket, None] = {}  # oldest first
        self._lock = threading.Lock()  # protects ``_strangers``
        self._callers = threading.Semaphore(_CALLERS_MAX)
        self._senders = ThreadPoolExecutor(8, "replicate")
        self._own: Callable[[str], Iterable[Replica]] = lambda _: ()

    def join(self, own: Callable[[str], Iterable[Replica]]) -> None:
        """Attach to the saver's loop. ``own`` returns this node's own shards at a path; it is called in the
        loop."""
        self._own = own
        self.listener.setblocking(False)

    def close(self) -> None:
        self.listener.close()
        self._senders.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ in the loop

    def accept(self) -> None:
        """Accept a connection, and serve it in a thread."""
        sock = accept(self.listener)
        if sock is None:
            return
        sock.setblocking(True)
        with self._lock:
            if len(self._strangers) >= _STRANGERS_MAX:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with contextlib.suppress(OSError):  # the connection is closed already
                    oldest.shutdown(socket.SHUT_RDWR)  # its own thread closes the connection
            self._strangers[sock] = None
        try:
            threading.Thread(target=self._serve, args=(sock,), name="peer", daemon=True).start()
        except RuntimeError as error:  # there is no thread for one more
            with self._lock:
                self._strangers.pop(sock, None)
            sock.close()
            self._say(f"another node's saver cannot be served now: {error}")

    def push(
        self, node: str, label: Label, layout: Layout, memory: Memory, then: Callable[[str], None]
    ) -> None:
        """Store a replica on ``node``. ``then`` gets the reason of a failure, or an empty string. The memory
        must not change until ``then`` is called."""

        def send() -> None:
            with PeerSaver(self._peers.find(node)) as peer:
                peer.store_replica(label, layout.index, memory.view)

        def sent(outcome: BaseException | None) -> None:
            then("" if outcome is None else str(outcome) or repr(outcome))

        self.jobs.run(self._senders, send, sent)

    def survey(self, path: str, then: Callable[[list[Offer]], None]) -> None:
        """Call ``then`` with the offers of this node and of all reachable nodes at ``path``."""
        near = self.offers(path)

        def ask(saver: SaverAddress) -> list[Offer]:
            try:
                with PeerSaver(saver) as peer:
                    return [offer for offer in peer.offers(path) if offer.node == saver.node]
            except PeerGone:
                return []  # a node that cannot be reached offers nothing

        def look() -> list[Offer]:
            try:
                others = [saver for saver in self._peers.others() if saver.node != self._me.node]
            except PeerGone as error:
                self._say(f"the shards in other nodes' memory are not known: {error}")
                return []
            if not others:
                return []
            with ThreadPoolExecutor(min(32, len(others)), "survey") as pool:
                return [found for its in pool.map(ask, others) for found in its]

        def looked(outcome: list[Offer] | BaseException) -> None:
            then(near if isinstance(outcome, BaseException) else near + outcome)

        self.jobs.run(self._senders, look, looked)

    def addresses(self, nodes: Iterable[str], then: Callable[[list[SaverAddress]], None]) -> None:
        """Call ``then`` with the addresses of the known nodes among ``nodes``. Few are looked up one by one:
        in a large job all addresses are a megabyte for each worker."""
        wanted = set(nodes)

        def look() -> list[SaverAddress]:
            if len(wanted) > _FEW:
                return [saver for saver in self._peers.others() if saver.node in wanted]
            found = []
            for node in sorted(wanted):
                with contextlib.suppress(PeerGone):
                    found.append(self._peers.find(node))
            return found

        self.jobs.run(
            self._senders, look, lambda found: then([] if isinstance(found, BaseException) else found)
        )

    def offers(self, path: str) -> list[Offer]:
        """Return this node's offers: its own shards of ended worlds, and replicas."""
        return offers(self.held(path), self._me.node)

    def held(self, path: str, name: str = "") -> list[Replica]:
        both = (*self._own(path), *self._replicas)
        return [r for r in both if r.label.path == path and name in ("", r.label.name)]

    def forget(self, path: str, *, before: int) -> None:
        self._replicas.forget(path, before=before)

    @property
    def size(self) -> int:
        """Bytes of replicas."""
        return self._replicas.size

    # ------------------------------------------------------------ in threads, for other nodes

    def _serve(self, sock: socket.socket) -> None:
        try:
            wire = Wire.accept(sock, self._me.secret)
        except OSError:  # PeerGone is an OSError
            sock.close()
            return
        finally:
            with self._lock:
                self._strangers.pop(sock, None)
        try:
            while not self._callers.acquire(timeout=SILENCE_S / 4):
                wire.send_message(WAIT)
        except PeerGone:
            wire.close()
            return
        try:
            serve(wire, Host(self._offers, self._find, self._room, self._keep, self._give_up))
        finally:
            self._callers.release()

    def _offers(self, path: str) -> list[Offer]:
        return self.jobs.ask(lambda: self.offers(path))

    def _find(self, path: str, name: str, rank: int) -> Replica | None:
        found = self.jobs.ask(lambda: self.held(path, name))
        return next((r for r in found if r.label.rank == rank), None)

    def _room(self, label: Label, size: int) -> Memory:
        there = available() + self.jobs.ask(lambda: self._replicas.replaced(label))
        if size > there * (1 - _SPARE):
            raise OSError(errno.ENOMEM, f"only {there} bytes are available")
        self.jobs.ask(lambda: self._replicas.make_room(label, size))
        try:
            return Memory.make(size)
        except OSError:
            self._give_up(size)
            raise

    def _keep(self, replica: Replica) -> None:
        self.jobs.ask(lambda: self._replicas.keep(replica))

    def _give_up(self, size: int) -> None:
        self.jobs.ask(lambda: self._replicas.give_up(size))
