"""Real workers for tests, run in this process's own ``LocalProcs``."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.core.facts import Exit
from elasticd.core.ports import Assignment
from elasticd.procs.linux import children
from elasticd.procs.output import Output
from elasticd.procs.warden_client import Warden
from elasticd.procs.workers import LocalProcs
from tests.procs.agents import PATIENCE_S, wait_until


class Recorded:
    """A console that keeps what is written. ``terminal``: whether it counts as a terminal."""

    def __init__(self, *, terminal: bool = False) -> None:
        self.written = {1: b"", 2: b""}
        self.terminal = terminal
        self._changed = threading.Condition()

    def write(self, stream: int, data: bytes) -> None:
        with self._changed:
            self.written[stream] += data
            self._changed.notify_all()

    def is_terminal(self, stream: int) -> bool:
        return self.terminal

    def wait_for(self, text: bytes, stream: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.written[stream], PATIENCE_S), self.written

    def wait_for_lines(self, count: int, start: bytes = b"") -> list[bytes]:
        """Wait for so many lines of stdout that start so, and return them."""

        def found() -> list[bytes]:
            return [line for line in self.lines() if line.startswith(start)]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, PATIENCE_S), self.written
            return found()

    def lines(self, stream: int = 1) -> list[bytes]:
        return self.written[stream].splitlines()

    def clear(self) -> None:
        with self._changed:
            self.written = {1: b"", 2: b""}


class News:
    """Keeps the events of ``say`` and ``warn``."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._told = threading.Condition()

    def __call__(self, event: str, **fields: Any) -> None:
        with self._told:
            self.events.append((event, fields))
            self._told.notify_all()

    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == event]

    def wait_for(self, event: str, times: int = 1) -> None:
        with self._told:
            assert self._told.wait_for(lambda: len(self.of(event)) >= times, PATIENCE_S), self.events


class Bench:
    """Runs workers, and waits for their exits."""

    def __init__(self, warden: Warden) -> None:
        self.warden = warden
        self.console = Recorded()
        self.exits: list[Exit] = []
        self._told = threading.Condition()
        self._made: list[LocalProcs] = []
        self._round = 0

    def procs(self, command: list[str] | Callable[[Assignment], list[str]], **how: Any) -> LocalProcs:
        how.setdefault("output", Output(self.console))
        self._made.append(LocalProcs(self.warden, command, **how))
        return self._made[-1]

    def start(self, procs: LocalProcs, workers: int = 1, **env: str) -> None:
        """Start workers for the next round. Forget what was printed and reported before."""
        self._round += 1
        self.exits.clear()
        self.console.clear()
        procs.start(
            self._round,
            tuple(Assignment(10 + i, i, i, {"RANK": str(i), **env}) for i in range(workers)),
            lambda _, exit: self._exited(exit),
        )

    def wait(self, count: int = 1) -> list[Exit]:
        with self._told:
            assert self._told.wait_for(lambda: len(self.exits) >= count, PATIENCE_S), self.console.written
        return sorted(self.exits, key=lambda exit: exit.slot)

    def kill(self, procs: LocalProcs, workers: int = 1) -> None:
        """Kill the workers, and wait for their exits."""
        procs.stop(signal.SIGKILL, 0.0)
        self.wait(workers)

    @contextlib.contextmanager
    def room(self, descriptors: int) -> Iterator[None]:
        """Within this block the warden has only ``descriptors`` file descriptors left."""
        used = {int(fd) for fd in os.listdir(f"/proc/{self.warden.pid}/fd")}
        limit = next(
            n for n in range(len(used) + 20) if n - len([fd for fd in used if fd < n]) == descriptors
        )
        _, hard = resource.prlimit(self.warden.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(self.warden.pid, resource.RLIMIT_NOFILE, (limit, hard))
        try:
            yield
        finally:
            resource.prlimit(self.warden.pid, resource.RLIMIT_NOFILE, (hard, hard))

    def run(self, program: str, workers: int = 1, *args: str, env: dict[str, str] | None = None, **how: Any):  # type: ignore[no-untyped-def]
        """Run this Python program in each worker, to its end."""
        procs = self.procs([sys.executable, "-c", program, *args], **how)
        self.start(procs, workers, **(env or {}))
        return self.wait(workers)

    def stopped(self, program: str, *said: bytes) -> Exit:
        """Have one worker run this Python program. Stop the worker once it has printed all these lines."""
        procs = self.procs([sys.executable, "-c", program])
        self.start(procs)
        for words in said:
            self.console.wait_for(words)
        procs.stop(signal.SIGTERM, PATIENCE_S)
        (exit,) = self.wait()
        return exit

    def _exited(self, exit: Exit) -> None:
        with self._told:
            self.exits.append(exit)
            self._told.notify_all()

    def close(self) -> None:
        self.warden.close()
        for procs in self._made:
            procs.close()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    bench = Bench(Warden.start())
    yield bench
    bench.close()


def wait_until_ready(procs: LocalProcs) -> None:
    """Wait until workers can be forked, and the next one is forked in advance."""
    preload = procs._preload
    assert preload is not None
    wait_until(lambda: preload.ready and named(procs._warden, "elasticd-embryo"), "the zygote comes up")


def named(warden: Warden, name: str) -> list[int]:
    """Return the pids of the warden's children of that name."""
    found = []
    for pid in children(warden.pid):
        with contextlib.suppress(OSError):  # the child has ended already
            if Path(f"/proc/{pid}/comm").read_text() == f"{name}\n":
                found.append(pid)
    return found
