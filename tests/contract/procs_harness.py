"""Harnesses: the same tests of ``core.ports.Procs`` run with simulated and with real processes.

A test says how a worker is to behave, starts the worker, and waits until a condition holds. The harness makes
that happen with its kind of processes and its kind of time.
"""

from __future__ import annotations

import os
import signal as signals
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest

from elasticd.core.facts import Exit
from elasticd.core.ports import Assignment, Procs
from elasticd.procs.death_notices import exit_under_way
from elasticd.procs.warden_client import Warden
from elasticd.procs.workers import LocalProcs
from tests.contract.heard import Heard
from tests.sim.clock import Clock
from tests.sim.host import SimHost
from tests.sim.procs import Job, OnSigterm, SimProcs, Training

PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Train:
    """Make steps for ever. ``on_sigterm``: die, save and exit with 0, or ignore the signal."""

    on_sigterm: OnSigterm = OnSigterm.DIE


@dataclass(frozen=True, slots=True)
class EndWith:
    """Make a few steps. Then end with this exit code, or by this signal if the number is negative."""

    code: int


@dataclass(frozen=True, slots=True)
class InPlace:
    """Keep the process from round to round, and make steps in each. ``leaves``: whether the worker leaves a
    round when told to."""

    leaves: bool = True


Behaviour = Train | EndWith | InPlace


class ProcsHarness(Protocol):
    procs: Procs
    exits: list[tuple[int, Exit]]  # in the order of the calls of `exited`
    heard: Heard

    def start(
        self, round_number: int, behaviours: Mapping[int, Behaviour], waiting: tuple[int, ...] = ()
    ) -> None:
        """Start one worker in each of these slots. Ranks follow the order of the slots."""

    def standby(self, behaviours: Mapping[int, Behaviour]) -> None:
        """Start one worker in each of these slots that belongs to no round."""

    def process(self, slot: int) -> object:
        """Return what distinguishes the process in this slot from other processes."""

    def until(self, predicate: Callable[[], bool]) -> None:
        """Let time pass until the condition holds. Fail if it never does."""

    def now(self) -> float:
        """Return the seconds since the epoch, by the clock of the fence."""

    def alive(self) -> bool:
        """Whether any worker's process runs, and is not about to end."""

    def close(self) -> None: ...


def _size(behaviours: Mapping[int, Behaviour]) -> dict[str, str]:
    return {"WORLD_SIZE": str(len(behaviours))}


class SimHarness:
    def __init__(self) -> None:
        self.exits: list[tuple[int, Exit]] = []
        self.heard = Heard()
        self._clock = Clock(seed=1)
        self._training = Training(self._clock, Job(total_steps=1_000_000, step_s=0.01))
        self._procs = SimProcs(SimHost(self._clock, "a"), self._training)
        self._procs.listen(self.heard.news.append)
        self.procs: Procs = self._procs

    def start(
        self, round_number: int, behaviours: Mapping[int, Behaviour], waiting: tuple[int, ...] = ()
    ) -> None:
        self._set(behaviours)
        assignments = tuple(
            Assignment(slot, i, i, {**_size(behaviours), "MASTER_PORT": str(round_number)})
            for i, slot in enumerate(sorted(behaviours))
        )
        self.procs.start(round_number, assignments, self._exited, waiting)
        for slot, behaviour in behaviours.items():
            if isinstance(behaviour, EndWith):
                self._clock.after(2.0, partial(self._procs.crash, slot, behaviour.code))

    def standby(self, behaviours: Mapping[int, Behaviour]) -> None:
        self._set(behaviours)
        self.procs.standby(tuple(Assignment(slot, slot, slot, {}) for slot in behaviours), self._exited)

    def process(self, slot: int) -> object:
        return self._procs.workers[slot]

    def _set(self, behaviours: Mapping[int, Behaviour]) -> None:
        job = self._training.job
        trains = (b.on_sigterm for b in behaviours.values() if isinstance(b, Train))
        job.on_sigterm = next(trains, OnSigterm.DIE)
        inplace = [b for b in behaviours.values() if isinstance(b, InPlace)]
        job.inplace, job.stuck = bool(inplace), float(not all(b.leaves for b in inplace))

    def _exited(self, round_number: int, exit: Exit) -> None:
        self.exits.append((round_number, exit))

    def until(self, predicate: Callable[[], bool]) -> None:
        if not predicate():
            assert self._clock.run(self._clock.now() + PATIENCE_S, predicate), "it never came true"

    def now(self) -> float:
        return self._clock.now()

    def alive(self) -> bool:
        return bool(self._procs.workers)

    def close(self) -> None:
        pass


class RealHarness:
    def __init__(self, folder: Path) -> None:
        self.exits: list[tuple[int, Exit]] = []
        self.heard = Heard()
        self._told = threading.Condition()
        self._warden = Warden.start()
        self._procs = LocalProcs(self._warden, _command, cwd=folder)
        self._procs.listen(partial(self._tell, self.heard.news))
        self.procs: Procs = self._procs

    def start(
        self, round_number: int, behaviours: Mapping[int, Behaviour], waiting: tuple[int, ...] = ()
    ) -> None:
        assignments = tuple(
            Assignment(slot, i, i, {**_size(behaviours), "BEHAVE": _spell(behaviours[slot])})
            for i, slot in enumerate(sorted(behaviours))
        )
        self.procs.start(round_number, assignments, self._exited, waiting)

    def standby(self, behaviours: Mapping[int, Behaviour]) -> None:
        assignments = tuple(
            Assignment(slot, slot, slot, {"BEHAVE": _spell(behaviour)})
            for slot, behaviour in behaviours.items()
        )
        self.procs.standby(assignments, self._exited)

    def process(self, slot: int) -> object:
        return self._procs.pids()[slot]

    def _exited(self, round_number: int, exit: Exit) -> None:
        self._tell(self.exits, (round_number, exit))

    def _tell(self, told: list[Any], what: Any) -> None:
        with self._told:
            told.append(what)
            self._told.notify_all()

    def until(self, predicate: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        with self._told:
            while not predicate():
                assert time.monotonic() < deadline, f"it never came true; exits so far: {self.exits}"
                self._told.wait(0.01)  # exits wake this; no event tells of steps

    def now(self) -> float:
        return time.time()

    def alive(self) -> bool:
        return any(_lives(beat.pid) for beat in self._procs.progress() if beat.pid)

    def close(self) -> None:
        self._warden.close()
        self._procs.close()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return exit_under_way(pid) is None


def _command(assignment: Assignment) -> list[str]:
    program = "linked.py" if assignment.env["BEHAVE"] in ("obeys", "deaf") else "behave.py"
    return [sys.executable, str(Path(__file__).parents[1] / "procs" / "programs" / program)]


def _spell(behaviour: Behaviour) -> str:
    match behaviour:
        case EndWith(code) if code < 0:
            return f"die:{-code}"
        case EndWith(code):
            return f"exit:{code}"
        case Train(OnSigterm.DIE):
            return "train"
        case Train(on_sigterm):
            return on_sigterm.value
        case InPlace(leaves):
            return "obeys" if leaves else "deaf"


@pytest.fixture(params=["simulated", "real"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProcsHarness]:
    harness: ProcsHarness = SimHarness() if request.param == "simulated" else RealHarness(tmp_path)
    yield harness
    harness.close()


SIGTERM, SIGKILL = int(signals.SIGTERM), int(signals.SIGKILL)
