"""A worker's connection to the saver: the agent's saver, or, without an agent, one that the workers of a host
start."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elasticd.channel.codec import ChannelClosed
from elasticd.channel.framing import close_all
from elasticd.checkpoint import protocol
from elasticd.checkpoint.client.collectives import RankGroup
from elasticd.checkpoint.format.manifest import BadCheckpoint
from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.checkpoint.newest.retention import Keep
from elasticd.checkpoint.protocol import OpenWorld, SaverChannel, SaverSilent, SaverToWorker, WorkerToSaver
from elasticd.checkpoint.replication.replicas import holders
from elasticd.checkpoint.storage import CheckpointStore, error_text
from elasticd.checkpoint.storage.rate_limit import parse_rate

_ROOT: Final = str(Path(__file__).parents[3])
_PROGRAM: Final = (
    "import sys; sys.path.append({root!r}); "
    "from elasticd.checkpoint.server.standalone import main; main({fd}, {options!r})"
)
_LEFT_ALONE_S: Final = 60.0  # the time after which a silent saver is tried again
_MOMENT_S: Final = 1.0  # how long a saver that was silent may take to answer
# Savers outlive this process. They are kept here, since Python warns of processes that nobody has waited for.
started: Final[list[subprocess.Popen[bytes]]] = []


@dataclass(frozen=True, slots=True)
class Terms:
    """The common terms of a world's saves. ``token`` and ``round`` are part of their names. ``copies``:
    another node holds copies of this node's shards."""

    token: str
    round: int
    copies: bool


class SaverConnection:
    """The connection, opened again for each world. ``take`` receives the saver's messages; ``lost`` is called
    with the reason each time the connection is lost."""

    def __init__(self, take: Callable[[SaverToWorker], None], lost: Callable[[ChannelClosed], None]) -> None:
        self._take, self._lost = take, lost
        self._line: SaverChannel | None = None
        self._silent_until, self._silence = 0.0, ""  # when to try the saver again (monotonic), and the error
        self.why = ""  # why the connection is not open
        self._sent: threading.Event | None = None  # set once the message that waits for a copy is sent

    @property
    def is_open(self) -> bool:
        return self._line is not None

    def open(self, ranks: RankGroup, store: CheckpointStore, keep: Keep) -> Terms:
        """Find or start the savers and connect, on all ranks together. Afterwards ``is_open`` tells whether
        the connection is open, and ``why`` the reason if it is not."""
        self.close()
        mine: dict[str, Any] = {"host": _host(), "saver": saver_name()}
        mine["node"] = os.environ.get("ELASTICD_HOLDER", "")
        numbered = int(os.environ.get("ELASTICD_ROUND", "0"))
        if ranks.rank == 0:
            before, why = 0, ""
            try:
                before = FilePointer(store).last_round()
            except BadCheckpoint:  # every commit then fails with this error
                pass
            except OSError as error:
                why = f"the earlier saves cannot be listed: {error_text(error)}"
            mine |= {"token": os.urandom(4).hex(), "round": max(numbered, before + 1), "why": why}
        said = [json.loads(raw) for raw in ranks.gather(json.dumps(mine).encode())]
        token, round_, self.why = said[0]["token"], said[0]["round"], said[0]["why"]
        if self.why:
            return Terms(token, round_, copies=False)
        here = (mine["host"], mine["saver"])
        locals_ = [rank for rank, its in enumerate(said) if (its["host"], its["saver"]) == here]
        keeper = holders([its["node"] for its in said]) if all(its["node"] for its in said) else {}
        saver = mine["saver"]
        if not saver and ranks.rank == locals_[0]:
            saver = _start()
        names = [raw.decode() for raw in ranks.gather(saver.encode())]
        try:
            line = self._connect(*names[locals_[0]].split())  # the saver's name, and its secret if it has one
            line.send(
                OpenWorld(
                    store.url,
                    token,
                    ranks.rank,
                    ranks.size,
                    round_,
                    fence=numbered,
                    locals=tuple(locals_),
                    holder=keeper.get(mine["node"], ""),
                    last=keep.last,
                    every=keep.every,
                )
            )
            self._line = line
        except ChannelClosed as error:
            self._lose(error)
        return Terms(token, round_, mine["node"] in keeper)

    def _connect(self, name: str, secret: str = "") -> SaverChannel:
        """Connect to the saver. A saver that was silent is not tried again for ``_LEFT_ALONE_S``, and then
        has ``_MOMENT_S`` to answer, because training waits. Raises ChannelClosed."""
        if time.monotonic() < self._silent_until:
            raise SaverSilent(self._silence)
        try:
            line = protocol.connect(name, secret, patience_s=_MOMENT_S if self._silent_until else None)
        except SaverSilent as error:
            self._silent_until, self._silence = time.monotonic() + _LEFT_ALONE_S, str(error)
            raise
        self._silent_until = 0.0
        return line

    def send(self, message: WorkerToSaver, *files: int) -> bool:
        """Send a message; return whether it was sent. Training does not wait: a saver that has not read for
        long counts as lost."""
        if self._line is not None:
            try:
                self._line.send(message, files, wait=False)
            except ChannelClosed as error:
                self._lose(error)
        return self.is_open

    def try_send(self, message: WorkerToSaver) -> None:
        """Send a message that a slow saver may miss."""
        if self._line is not None:
            self._line.try_send(message)

    def send_when_copied(
        self, copy_done: Future[str], message: WorkerToSaver, spoilt: Callable[[str], WorkerToSaver]
    ) -> None:
        """Send ``message`` once the copy has ended, from another thread, or ``spoilt(why)`` if it failed.
        The training thread notices a lost connection at its next call."""
        line, sent = self._line, threading.Event()

        def on_copied(done: Future[str]) -> None:
            try:
                said = spoilt(why) if (why := done.result()) else message
                if line is not None:
                    with contextlib.suppress(ChannelClosed):
                        line.send(said)
            finally:
                sent.set()

        self._sent = sent
        copy_done.add_done_callback(on_copied)

    def wait_until_sent(self, timeout_s: float) -> None:
        """Wait until the last message of ``send_when_copied`` is sent."""
        if self._sent is not None:
            self._sent.wait(timeout_s)

    def listen(self) -> None:
        """Take all messages that have arrived."""
        while self._listen_for(0.0):
            pass

    def listen_while(self, waiting: Callable[[], bool], timeout_s: float) -> None:
        """Take messages while ``waiting()`` holds, until the saver is lost or the time is over."""
        deadline = time.monotonic() + timeout_s
        while waiting() and self._listen_for(deadline - time.monotonic()):
            pass

    def _listen_for(self, within_s: float) -> bool:
        """Take a message. Return False if none comes within the time, or if the saver is lost."""
        try:
            heard = None if self._line is None else self._line.poll(within_s)
        except ChannelClosed as error:
            self._lose(error)
            return False
        if heard is not None:
            close_all(heard[1])
            self._take(heard[0])
        return heard is not None

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None

    def _lose(self, error: ChannelClosed) -> None:
        """Note the loss. Another saver is started at the next save, when all ranks take part."""
        self.close()
        self.why = str(error)
        self._lost(error)


def saver_name() -> str:
    """Return the name of the agent's saver; empty without an agent."""
    return os.environ.get("ELASTICD_SAVER", "")


def _host() -> str:
    """Return an id that is equal for processes that can connect to the same saver. psutil has no call for the
    parts."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.geteuid()}"


def _start() -> str:
    """Start a saver for the workers of this host; return its name and secret. The saver ends when all workers
    have left and its work is done."""
    sock, name = protocol.listen()
    with sock:
        rate = os.environ.get("ELASTICD_CHECKPOINT_RATE")
        options = json.dumps({"bytes_s": parse_rate(rate)} if rate else {})
        program = _PROGRAM.format(root=_ROOT, fd=sock.fileno(), options=options)
        saver = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            pass_fds=[sock.fileno()],
            start_new_session=True,
        )
        started.append(saver)
    secret = os.urandom(16).hex()
    assert saver.stdin is not None
    with contextlib.suppress(OSError), saver.stdin as pipe:  # OSError: the saver has ended already
        pipe.write(secret.encode())
    return f"{name} {secret}"
