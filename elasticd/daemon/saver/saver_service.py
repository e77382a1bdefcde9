"""The agent's side of its saver: start the process when a worker asks for it, and see the process off."""

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
from pathlib import Path
from typing import Final

import msgspec

from elasticd.channel.warden_messages import Ended
from elasticd.checkpoint import protocol
from elasticd.checkpoint.server.save_report import Fate, Footprint, SaveReport, from_line
from elasticd.core.facts import Holder
from elasticd.daemon.saver import HOLDER, OPTIONS
from elasticd.etcd.access import EtcdAccess
from elasticd.procs.warden_client import Warden, WardenError
from elasticd.telemetry import describe, log

_log = log.get("elasticd.saver")
_ROOT = str(Path(__file__).parents[3])
_PROGRAM = "import sys; sys.path.append({root!r}); from elasticd.daemon.saver.process import main; main()"
_BEHIND: Final = "those before it are not yet durable"
_LINE_MAX: Final = 500
_REPORTS_MAX: Final = 1000
FINISH_S: Final = 60.0  # at the end of an agent that is asked to leave
FINISH_S_MAX: Final = 1e6  # as long as it takes
_ENDS_S: Final = 5.0  # once it is killed
_SAID_AFTER_S: Final = 2.0  # that it is waited for
_AGAIN_S: Final = 2.0  # from one start to the next, at least


class SaverService:
    """Has a saver run for the workers of this agent while there is one that asks for it.

    Until then there is only a socket, ``name`` (for workers: ELASTICD_SAVER). What it does is in the
    agent's log, and in ``reports`` for whoever counts it, oldest first; ``footprint`` is its memory. It
    ends with the agent, which waits until what was handed over is committed. ``holding``: the socket at
    which it holds copies for other nodes, and how those find it. ``bytes_s``: what it writes per second at
    most, while there is training that does not wait for it.
    """

    def __init__(
        self,
        warden: Warden,
        access: EtcdAccess,
        job: str,
        holding: tuple[socket.socket, Holder] | None = None,
        bytes_s: int | None = None,
    ) -> None:
        self._warden = warden
        self._also = [holding[0]] if holding is not None else []
        self.reports: deque[SaveReport] = deque(maxlen=_REPORTS_MAX)
        self.footprint = Footprint()
        self.newest: SaveReport | None = None  # that was committed
        self.unsaved = ""  # of checkpoints that came to nothing, in words
        self._failures = 0
        self._listener, self.name = protocol.listen()
        self._said, self._saying = socket.socketpair()
        self._said.setblocking(False)
        self._saying.setblocking(False)  # an agent that is stopped must not stop the saver
        self._rest = b""
        warden.watch(self._said, self._listen)
        self._closing = threading.Event()
        self._began = -_AGAIN_S
        self._pid = 0
        self._ready = threading.Event()
        self._ends: queue.SimpleQueue[bool] = queue.SimpleQueue()  # signal handlers may put there
        self._starter: threading.Thread | None = None
        options = {
            "endpoints": access.endpoints,
            "tls": access.tls,
            "cacert": str(access.cacert or ""),
            "cert": str(access.cert or ""),
            "key": str(access.key or ""),
            "username": access.username or "",
            "timeout_s": access.timeout_s,
            "job": job,
            "agent": os.getpid(),
            "bytes_s": bytes_s,
        }
        self._password = access.password
        self._env = {**os.environ, OPTIONS: json.dumps(options)}
        if holding is not None:
            self._env[HOLDER] = msgspec.json.encode(holding[1]).decode()
        self._await()

    def _await(self) -> None:
        """Until somebody connects, whom the kernel has wait for the saver to take over."""
        watched = [listener.dup() for listener in (self._listener, *self._also)]

        def asked() -> None:
            if not watched:  # somebody has come to the other one at the same time
                return
            while watched:
                self._warden.unwatch(watched.pop())
            self._starter = threading.Thread(target=self._start, name="elasticd-saver", daemon=True)
            self._starter.start()

        for listener in tuple(watched):
            self._warden.watch(listener, asked)

    def _start(self) -> None:
        def ended(end: Ended) -> None:
            self._listen()  # to its last words
            self._pid = 0
            self.footprint = Footprint()  # memory of a process that is gone
            self._ready.set()
            if self._closing.is_set():
                if end.code:
                    last = "what the saver had yet to write when it was ended"
                    self.unsaved = f"{self.unsaved}; and {last}" if self.unsaved else last
                self._ends.put(True)
            elif not self._warden.closing:
                _log.warning("saver.ended", code=end.code, note="another starts when it is asked for")
                self._await()

        program = _PROGRAM.format(root=_ROOT)
        while not self._closing.wait(max(0.0, self._began + _AGAIN_S - time.monotonic())):
            self._began = time.monotonic()
            self._ready.clear()
            if self._password is not None:  # a socket: no other process can open it, or read what it holds
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
                return
            except WardenError as error:  # who asked for it waits
                _log.warning("saver.failed", why=f"checkpoints cannot be saved yet: {error}")

    def hurry(self, _: object = None) -> None:
        """``close`` is to wait no longer than one of an agent that is asked to leave; if it is that, or when
        this is called again, no longer at all. Signal handlers may call this."""
        self._ends.put(False)

    def close(self, finish_s: float = FINISH_S) -> None:
        """No more are started, and the one there is ends when it has done what there is to do, or at
        once if that takes longer than ``finish_s``; then ``unsaved`` says so. May be called again."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._starter is not None:
            self._starter.join()
        self._listener.close()
        for listener in self._also:
            listener.close()
        if self._pid:
            self._ready.wait(FINISH_S)  # before that it would die of the signal
            self._see_off(finish_s)
        self._warden.unwatch(self._said)
        self._saying.close()

    def _see_off(self, finish_s: float) -> None:
        """Ask it to end, and wait until it has."""
        pid = self._pid
        self._warden.stop_service(pid, finish_s)
        wait_s, graces = _SAID_AFTER_S, iter((FINISH_S,) if finish_s > FINISH_S else ())
        while True:
            try:
                if self._ends.get(timeout=wait_s):
                    return
            except queue.Empty:
                if wait_s != _SAID_AFTER_S:
                    return  # whoever was to end it is gone
                _log.info("saver.finishing", note="what was handed over is yet to be written and committed")
            else:
                finish_s = next(graces, 0.0)
                self._warden.stop_service(pid, finish_s)
            wait_s = finish_s + _ENDS_S

    def _listen(self) -> None:
        """On the warden's thread."""
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
        if report is None:  # what Python itself or a library has to complain of
            _log.warning("saver.said", text=line.decode(errors="replace")[:_LINE_MAX])
            return
        if isinstance(report, Footprint):
            self.footprint = report
            return
        match report.fate:
            case Fate.COMMITTED:
                self.newest = report
                facts = {"size": report.size, "took_s": round(report.took_s, 3)}
                _log.info("checkpoint.committed", step=report.step, name=report.name, **facts)
            case Fate.FAILED:
                _log.warning("checkpoint.failed", step=report.step, name=report.name, why=report.why)
                self._failures += 1
                many = describe.count(self._failures, "checkpoint")
                self.unsaved = f"{many}; the last, of step {report.step}: {report.why}"
            case Fate.SKIPPED:
                _log.warning("checkpoint.skipped", step=report.step, why=_BEHIND)
        self.reports.append(report)
