"""The line to the saver: the agent's, or one that the workers of a host start where there is no agent."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elasticd.checkpoint import handover
from elasticd.checkpoint.handover import Gone, Message, SaverSocket
from elasticd.checkpoint.manifest import BadCheckpoint
from elasticd.checkpoint.pointer import FilePointer
from elasticd.checkpoint.store import CheckpointStore, told
from elasticd.core import bandwidth
from elasticd.core.replicas import holders
from elasticd.core.retention import Keep
from elasticd.worker.together import Together

_ROOT: Final = str(Path(__file__).parents[2])
_PROGRAM: Final = (
    "import sys; sys.path.append({root!r}); "
    "from elasticd.checkpoint.alone import main; main({fd}, {options!r})"
)
started: Final[list[subprocess.Popen[bytes]]] = []  # they outlive us; kept so that nobody complains of it


@dataclass(frozen=True, slots=True)
class Terms:
    """What the ranks of a world save under. ``token`` and ``round`` are in the names of what they save;
    ``copies``: another node is to hold copies of this one's shards."""

    token: str
    round: int
    copies: bool


class SaverLine:
    """``take`` is given what the saver says; ``lost``: why it is gone, each time that it is."""

    def __init__(self, take: Callable[[Message], None], lost: Callable[[Gone], None]) -> None:
        self._take, self._lost = take, lost
        self._line: SaverSocket | None = None
        self.why = ""  # it is not open

    @property
    def is_open(self) -> bool:
        return self._line is not None

    def open(self, together: Together, store: CheckpointStore, keep: Keep) -> Terms:
        """All ranks: find or start the savers, and introduce ourselves. Whether that came to something,
        ``is_open`` says, and ``why`` not."""
        self.close()
        mine: dict[str, Any] = {"host": _host(), "saver": saver_name()}
        mine["node"] = os.environ.get("ELASTICD_HOLDER", "")
        numbered = int(os.environ.get("ELASTICD_ROUND", "0"))
        if together.rank == 0:
            before, why = 0, ""
            try:
                before = FilePointer(store).last_round()
            except BadCheckpoint:  # then no commit works, which is said
                pass
            except OSError as error:
                why = f"it cannot be told what was saved before: {told(error)}"
            mine |= {"token": os.urandom(4).hex(), "round": max(numbered, before + 1), "why": why}
        said = [json.loads(raw) for raw in together.gather(json.dumps(mine).encode())]
        token, round_, self.why = said[0]["token"], said[0]["round"], said[0]["why"]
        if self.why:
            return Terms(token, round_, copies=False)
        here = (mine["host"], mine["saver"])
        locals_ = [rank for rank, its in enumerate(said) if (its["host"], its["saver"]) == here]
        keeper = holders([its["node"] for its in said]) if all(its["node"] for its in said) else {}
        saver = mine["saver"]
        if not saver and together.rank == locals_[0]:
            saver = _start()
        names = [raw.decode() for raw in together.gather(saver.encode())]
        try:
            line = handover.connect(*names[locals_[0]].split())  # and the secret, if there is one
            line.send(
                {
                    "is": "open",
                    "path": store.url,
                    "token": token,
                    "rank": together.rank,
                    "world": together.size,
                    "round": round_,
                    "fence": numbered,
                    "locals": locals_,
                    "holder": keeper.get(mine["node"], ""),
                    "last": keep.last,
                    "every": keep.every,
                }
            )
            self._line = line
        except Gone as error:
            self._lose(error)
        return Terms(token, round_, mine["node"] in keeper)

    def say(self, message: Message, *files: int) -> bool:
        """Whether it was said. Training waits for no saver: one that has long not listened is lost."""
        if self._line is not None:
            try:
                self._line.send(message, files, wait=False)
            except Gone as error:
                self._lose(error)
        return self.is_open

    def mention(self, message: Message) -> None:
        """What a saver that has long not listened may miss."""
        if self._line is not None:
            self._line.reply(message)

    def say_when(self, landed: Future[str], message: Message, spoilt: Callable[[str], Message]) -> None:
        """Once it has landed, on another thread: ``message``, or what ``spoilt`` returns, which is told why.
        If the line is lost meanwhile, that is seen here."""
        line = self._line

        def send(done: Future[str]) -> None:
            said = spoilt(why) if (why := done.result()) else message
            if line is not None:
                with contextlib.suppress(Gone):
                    line.send(said)

        landed.add_done_callback(send)

    def listen(self) -> None:
        """To what has been said already."""
        while self._line is not None:
            try:
                heard = self._line.receive(wait=False)
            except Gone as error:
                self._lose(error)
                return
            if heard is None:
                return
            self._take(heard[0])

    def listen_while(self, waiting: Callable[[], bool], timeout_s: float) -> None:
        """Until there is nothing to wait for any more, the saver is gone, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while waiting() and self._line is not None:
            self._line.socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                heard = self._line.receive()
            except Gone as error:
                if time.monotonic() < deadline:
                    self._lose(error)
                return
            finally:
                if self._line is not None:
                    self._line.socket.settimeout(None)
            if heard is not None:
                self._take(heard[0])

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None

    def _lose(self, error: Gone) -> None:
        """Another is started at the next save, when all ranks are here."""
        self.close()
        self.why = str(error)
        self._lost(error)


def saver_name() -> str:
    """The name of the agent's; empty where there is none."""
    return os.environ.get("ELASTICD_SAVER", "")


def _host() -> str:
    """Equal for processes that can talk to each other without a network. psutil tells neither part."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.geteuid()}"


def _start() -> str:
    """A saver for those of this host: its name and its secret. It ends when all have left and what they left
    is done."""
    sock, name = handover.listen()
    with sock:
        rate = os.environ.get("ELASTICD_CHECKPOINT_RATE")
        options = json.dumps({"bytes_s": bandwidth.parse(rate)} if rate else {})
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
    with contextlib.suppress(OSError), saver.stdin as pipe:  # OSError: it has ended, which is noticed
        pipe.write(secret.encode())
    return f"{name} {secret}"
