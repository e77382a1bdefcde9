"""The agent's side of its saver: start the process when a worker connects, and end the process."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Final

from elasticd.channel.warden_messages import Ended
from elasticd.checkpoint import protocol
from elasticd.checkpoint.server.save_report import BEHIND, Fate, Footprint, SaveReport, from_line
from elasticd.core.facts import SaverAddress
from elasticd.daemon.node_saver import VARIABLE, SaverOptions
from elasticd.etcd.access import EtcdAccess
from elasticd.procs.warden_client import Warden, WardenError
from elasticd.telemetry import describe, log

_log = log.get("elasticd.saver")
_ROOT = str(Path(__file__).parents[3])
_PROGRAM = (
    "import sys; sys.path.append({root!r}); from elasticd.daemon.node_saver.process import main; main()"
)
_LINE_MAX: Final = 500
_REPORTS_MAX: Final = 1000
FINISH_S: Final = 60.0  # the time for the last commits, if the agent is asked to leave
FINISH_S_MAX: Final = 1e6  # without limit
_ENDS_S: Final = 5.0  # the time for the saver to end after SIGKILL
_SAID_AFTER_S: Final = 2.0  # the time until the log says that the agent waits for the saver
_AGAIN_S: Final = 2.0  # the least time between two starts


class SaverService:
    """Runs a saver for the workers of this agent.

    The saver starts when a client connects to the socket ``name`` (ELASTICD_SAVER), and ends with the
    agent, after its last commits. ``reports`` has the saver's reports, oldest first. ``footprint``: the
    saver's memory.

    ``replica_listener``: the socket for copies of other nodes' shards, and its address. ``bytes_s``: the
    most bytes that the saver writes per second while training does not wait for the saver.
    """

    def __init__(
        self,
        warden: Warden,
        access: EtcdAccess,
        job: str,
        replica_listener: tuple[socket.socket, SaverAddress] | None = None,
        bytes_s: int | None = None,
    ) -> None:
        self._warden = warden
        self._also = [replica_listener[0]] if replica_listener is not None else []
        self.reports: deque[SaveReport] = deque(maxlen=_REPORTS_MAX)
        self.footprint = Footprint()
        self.newest: SaveReport | None = None  # the last commit
        self.unsaved = ""  # the checkpoints that failed, in words
        self._failures = 0
        self._listener, self.name = protocol.listen()
        self._said, self._saying = socket.socketpair()
        self._said.setblocking(False)
        self._saying.setblocking(False)  # a stopped agent must not block the saver
        self._rest = b""
        warden.watch(self._said, self._listen)
        self._closing = threading.Event()
        self._began = -_AGAIN_S
        self._pid = 0
        self._ready = threading.Event()
        self._ends: queue.SimpleQueue[bool] = queue.SimpleQueue()  # put is safe in signal handlers
        self._starter: threading.Thread | None = None
        self._password = access.password
        options = SaverOptions(
            replace(access, password=None),
            job,
            os.getpid(),
            bytes_s,
            replica_listener[1] if replica_listener is not None else None,
        )
        self._env = {**os.environ, VARIABLE: options.encoded()}
        self._await()

    def _await(self) -> None:
        """Start the saver at the first connection. The kernel holds the connection until the saver
        accepts."""
        watched = [listener.dup() for listener in (self._listener, *self._also)]

        def asked() -> None:
            if not watched:  # both sockets got a connection at the same time, and the saver is being started
                return
            while watched:
                self._warden.unwatch(watched.pop())
            self._starter = threading.Thread(target=self._start, name="elasticd-saver", daemon=True)
            self._starter.start()

        for listener in tuple(watched):
            self._warden.watch(listener, asked)

    def _start(self) -> None:
        gone = threading.Event()

        def ended(end: Ended) -> None:
            gone.set()
            self._listen()  # for the last reports
            self._pid = 0
            self.footprint = Footprint()  # the saver's memory is freed with its process
            self._ready.set()
            if self._closing.is_set():
                if end.code:
                    last = "the checkpoints that the saver had not written when it was killed"
                    self.unsaved = f"{self.unsaved}; and {last}" if self.unsaved else last
                self._ends.put(True)
            elif not self._warden.closing:
                note = "a new saver starts when a worker connects"
                said = f"the process that writes checkpoints {describe.ending(end.code)}; {note}"
                _log.warning("saver.ended", sentence=said, code=end.code, note=note)
                self._await()

        program = _PROGRAM.format(root=_ROOT)
        while not self._closing.wait(max(0.0, self._began + _AGAIN_S - time.monotonic())):
            self._began = time.monotonic()
            self._ready.clear()
            if self._password is not None:  # sent over a socket, which no other process can open
                self._said.send(f"{json.dumps(self._password)}\n".encode())
            try:
                self._pid = self._warden.spawn_service(
                    [sys.executable, "-c", program],
                    env=self._env,
                    stdin=self._listener.fileno(),
                    output=self._saying.fileno(),
                    also=[listener.fileno() for listener in self._also],
                    ended=ended,
                )
                if gone.is_set():  # it has ended before its pid was known here
                    self._pid = 0
                return
            except WardenError as error:  # the connected worker waits until the next try
                why = f"checkpoints cannot be saved yet: {error}"
                _log.warning("saver.failed", sentence=why, why=why)

    def hurry(self, _: object = None) -> None:
        """Shorten the wait of ``close`` to ``FINISH_S``. If the wait is that short already, end the wait.
        Signal handlers may call this."""
        self._ends.put(False)

    def close(self, finish_s: float = FINISH_S) -> None:
        """Start no more savers, and end the running saver after its last commits. If these take longer than
        ``finish_s``, kill the saver and note this in ``unsaved``. May be called again."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._starter is not None:
            self._starter.join()
        self._listener.close()
        for listener in self._also:
            listener.close()
        if self._pid:
            # Wait, since the signal would kill a saver that has not installed its handler yet.
            self._ready.wait(FINISH_S)
            self._see_off(finish_s)
        self._warden.unwatch(self._said)
        self._saying.close()

    def _see_off(self, finish_s: float) -> None:
        """Ask the saver to end, and wait for its end."""
        pid = self._pid
        self._warden.stop_service(pid, finish_s)
        wait_s, graces = _SAID_AFTER_S, iter((FINISH_S,) if finish_s > FINISH_S else ())
        while True:
            try:
                if self._ends.get(timeout=wait_s):
                    return
            except queue.Empty:
                if wait_s != _SAID_AFTER_S:
                    return  # the warden has died
                note = "the last checkpoints are being written and committed"
                _log.info("saver.finishing", sentence=note, note=note)
            else:
                finish_s = next(graces, 0.0)
                self._warden.stop_service(pid, finish_s)
            wait_s = finish_s + _ENDS_S

    def _listen(self) -> None:
        """Read the saver's lines. Runs on the warden's thread."""
        with contextlib.suppress(BlockingIOError):
            while data := self._said.recv(65536):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._take(line)

    def _take(self, line: bytes) -> None:
        if not line:
            self._ready.set()
            return
        report = from_line(line)
        if report is None:  # output of Python or a library
            _log.warning("saver.said", text=line.decode(errors="replace")[:_LINE_MAX])
            return
        if isinstance(report, Footprint):
            self.footprint = report
            return
        match report.fate:
            case Fate.COMMITTED:
                self.newest = report
                facts = {"size": report.size, "took_s": round(report.took_s, 3)}
                said = f"the checkpoint of step {report.step} is committed ({describe.size(report.size)})"
                _log.info("checkpoint.committed", sentence=said, step=report.step, name=report.name, **facts)
            case Fate.FAILED:
                said = f"the checkpoint of step {report.step} failed: {report.why}"
                _log.warning(
                    "checkpoint.failed", sentence=said, step=report.step, name=report.name, why=report.why
                )
                self._failures += 1
                many = describe.count(self._failures, "checkpoint")
                self.unsaved = f"{many}; the last, of step {report.step}: {report.why}"
            case Fate.SKIPPED:
                said = f"the checkpoint of step {report.step} is skipped: {BEHIND}"
                _log.warning("checkpoint.skipped", sentence=said, step=report.step, why=BEHIND)
        self.reports.append(report)
