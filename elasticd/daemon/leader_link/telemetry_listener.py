"""Serves the agents that tell this agent their telemetry, and the commands that ask for it, on one thread
that nothing else waits for.

The thread imports asyncio at the first connection: most runs of one node have none. Connections are bounded
in number, in the size of a message, and in the time for the greeting and for a message. A connection gets the
answer to one message before its next message is read, so memory is bounded, too.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
from typing import TYPE_CHECKING, Final, Self

from elasticd.checkpoint.replication.wire import HEAD, NONCE, PeerGone, Seals, digest_of
from elasticd.core.facts import NodeTelemetry
from elasticd.core.persistent_map import PersistentMap
from elasticd.daemon.gathering import Gathering
from elasticd.daemon.leader_link import telemetry_messages
from elasticd.daemon.leader_link.telemetry_messages import (
    BATCH_NODES,
    REQUEST_MAX,
    InvalidRequest,
    InvalidTold,
    NotLeading,
    Taken,
    TelemetryBatch,
    Tell,
)
from elasticd.etcd.clock import SteadyClock
from elasticd.telemetry import log
from elasticd.telemetry.accepting import BACKLOG, Scarcity, serve_from_the_first

if TYPE_CHECKING:
    import asyncio

CONNECTIONS_MAX: Final = 4096  # or a quarter of the files that this process may open, if that is less
# The most connections that have not proved yet that they know the secret, or half of all connections if that
# is less. A further connection closes the oldest.
STRANGERS_MAX: Final = 256
GREET_S: Final = 5.0  # the most time for a greeting
SENDERS_SAID_MAX: Final = 100  # senders of invalid messages that the log names
IDLE_S: Final = 300.0  # the most time between two messages


class TelemetryListener:
    """Serves ``gathering`` at ``listener`` to agents and commands that know ``secret``, until ``close``."""

    def __init__(
        self, listener: socket.socket, secret: str, gathering: Gathering, clock: SteadyClock | None = None
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._gathering = gathering
        self._clock = clock or SteadyClock()
        self._most = min(CONNECTIONS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._open: set[asyncio.StreamWriter] = set()
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._scarcity = Scarcity("the leader")
        self._refused: set[str] = set()  # senders of invalid messages
        self._over, self._closed_to_end = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="elasticd-telemetry", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, and drop all connections."""
        self._closed_to_end.close()
        self._thread.join()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        def serve() -> None:
            import asyncio

            asyncio.run(self._serve_all())

        with self._listener, self._over:
            serve_from_the_first(self._listener, self._over, serve, self._scarcity)

    async def _serve_all(self) -> None:
        import asyncio

        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._scarcity.note)
        loop.add_reader(self._over, ended.set)
        self._listener.setblocking(False)
        server = await asyncio.start_server(self._serve, sock=self._listener)
        self._listener.listen(BACKLOG)  # asyncio has set 100
        await ended.wait()
        server.close()
        for writer in tuple(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import asyncio

        if len(self._open) >= self._most:
            writer.transport.abort()
            return
        self._open.add(writer)
        self._strangers[writer] = None
        if len(self._strangers) > min(STRANGERS_MAX, self._most // 2):
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]  # its task ends later
            oldest.transport.abort()
        answer: Taken | TelemetryBatch | NotLeading | InvalidTold
        shown: PersistentMap[NodeTelemetry] = PersistentMap()
        try:
            async with asyncio.timeout(GREET_S):
                seals = await _greet(reader, writer, self._secret)
            self._strangers.pop(writer, None)
            while True:
                async with asyncio.timeout(IDLE_S):
                    raw = await _received(reader, seals)
                    try:
                        answer, shown = self._answer(telemetry_messages.request(raw), shown)
                    except InvalidRequest as error:
                        self._say_refused(error, writer)
                        answer = InvalidTold(str(error))
                    content = telemetry_messages.encoded(answer)
                    writer.write(seals.head(len(content), digest_of(content)) + content)
                    await writer.drain()
        except (OSError, EOFError, TimeoutError):  # PeerGone is an OSError
            pass
        except asyncio.CancelledError:  # the listener ends; Python 3.11 would print a traceback
            pass
        finally:
            self._open.discard(writer)
            self._strangers.pop(writer, None)
            writer.transport.abort()

    def _answer(
        self, asked: object, shown: PersistentMap[NodeTelemetry]
    ) -> tuple[Taken | TelemetryBatch | NotLeading, PersistentMap[NodeTelemetry]]:
        """Return the answer, and what this connection has been shown."""
        if isinstance(asked, Tell):
            heard = self._gathering.hear(asked.nodes)
            return (Taken(heard) if heard is not None else NotLeading()), shown
        known, summary = self._gathering.known, self._gathering.summary(self._clock())
        if known is None or summary is None:
            return NotLeading(), shown
        news = [name for name in known.nodes.differing(shown) if name in known.nodes]
        some = {name: known.nodes[name] for name in news[:BATCH_NODES]}
        batch = TelemetryBatch(tuple(some.values()), summary, more=len(news) > len(some))
        return batch, shown.updated(some)

    def _say_refused(self, error: InvalidRequest, writer: asyncio.StreamWriter) -> None:
        """Say once of each sender that its message is not valid."""
        address = str((writer.get_extra_info("peername") or ("an unknown address",))[0])
        sender = error.sender or address
        if sender in self._refused or len(self._refused) >= SENDERS_SAID_MAX:
            return
        self._refused.add(sender)
        who = f"the agent of node {sender} at {address}" if error.sender else f"an agent at {address}"
        said = (
            f"{who} tells something that is not valid ({error}): what it tells is ignored; all agents need "
            "the same version of elasticd"
        )
        log.get("elasticd.agent").warning("telemetry.refused", sentence=said, sender=sender, why=str(error))


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> Seals:
    """Do what ``Wire.accept`` does."""
    mine = os.urandom(NONCE)
    writer.write(mine)
    seals = Seals(secret, mine, await reader.readexactly(NONCE), server=True)
    seals.check_proof(await reader.readexactly(len(seals.proof)))
    writer.write(seals.proof)
    return seals


async def _received(reader: asyncio.StreamReader, seals: Seals) -> bytes:
    length, seal = HEAD.unpack(await reader.readexactly(HEAD.size))
    if length > REQUEST_MAX:
        raise PeerGone(f"a message of {length} bytes, more than {REQUEST_MAX}")
    content = await reader.readexactly(length)
    seals.check(length, seal, digest_of(content))
    return content
