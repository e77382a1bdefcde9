"""Helpers for tests of faults: states in which every byte shows the step, savers, and processes to kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from elasticd.checkpoint import protocol
from elasticd.checkpoint.server.saver import Saver
from elasticd.worker.checkpoints import Checkpoints

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]
ELEMENTS = 1 << 18


def filled(step: int, elements: int = ELEMENTS) -> dict[str, Any]:
    """Return a state in which every byte depends on the step, so that a mix of two steps would show."""
    return {
        "w": torch.full((elements,), step, dtype=torch.int64),
        "b": torch.full((7, 3), step),
        "step": step,
    }


def state_of(step: int, kind: str) -> dict[str, Any]:
    """Return the state of ``filled``, replicated or sharded over the world."""
    state = filled(step)
    if kind == "sharded":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state["w"] = distribute_tensor(state["w"], mesh, [Shard(0)])
    return state


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """Return the values for ``check``, as this rank sees them. Of a sharded tensor the rank sees its own
    part."""
    w = state["w"]
    return state | {"w": w.to_local() if isinstance(w, DTensor) else w}


def check(state: dict[str, Any], step: int) -> None:
    assert state["step"] == step
    assert bool((state["w"] == step).all()) and bool((state["b"] == step).all()), "a torn state"


def commit(checkpoints: Checkpoints, *steps: int, elements: int = ELEMENTS) -> None:
    """Save these steps. Wait until each is committed before the next one is saved."""
    for step in steps:
        assert checkpoints.save(filled(step, elements), step)
        assert checkpoints.wait() and not checkpoints.failed, checkpoints.last_error


@contextmanager
def served(**options: Any) -> Iterator[str]:
    """A saver in a thread of this process. Yields the saver's name."""
    listener, name = protocol.listen()
    saver = Saver(listener, linger_s=None, **options)
    serving = threading.Thread(target=saver.serve)
    serving.start()
    try:
        yield name
    finally:
        saver.leave()
        serving.join()
        listener.close()


def held_by(pid: int) -> int:
    """Return the bytes of shards that the process keeps in memory."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = f"/proc/{pid}/fd/{fd}"
            if "elasticd-shard" in (name := os.readlink(target)) or name.startswith("/#"):  # of huge pages
                found.add((os.stat(target).st_ino, os.stat(target).st_size))
        except FileNotFoundError:
            continue
    return sum(size for _, size in found)


class Helper:
    """A program of ``programs`` that forks a process for each line it gets, and prints lines."""

    def __init__(self, program: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / program)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.said: list[str] = []

    def ask(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def until(self, start: str) -> list[str]:
        """Return the words of the next line that begins so. Lines before it are kept in ``said``."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            self.said.append(line.strip())
            if line.startswith(start):
                return line.split()
        raise AssertionError(f"it ended before it said {start!r}: {self.said[-5:]}")

    def saver(self, **options: Any) -> tuple[str, int]:
        """Start a saver. Return its name and pid."""
        self.ask(**options)
        _, name, pid = self.until("saver ")
        return name, int(pid)

    def end_all(self) -> None:
        """Kill all processes that the program has forked, and forget their lines."""
        self.ask(end=True)
        self.until("ended all")
        self.said.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.read()
        self._process.wait(60.0)
        self._process.stdout.close()
