"""Simulated workers: processes that train together, and fail together.

``Training`` is the user's job as it would be anywhere: worlds of workers that find each other, step,
save, and finish. ``SimProcs`` implements ``elasticd.core.ports.Procs`` on one node and feeds it.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from elasticd.core.facts import Exit
from elasticd.core.ports import Assignment
from tests.sim.clock import Clock, Timer
from tests.sim.host import SimHost


class OnSigterm(StrEnum):
    """What the user's code makes of SIGTERM."""

    DIE = "die"
    SAVE = "save"  # finishes its step, saves, and exits with 0
    IGNORE = "ignore"


@dataclass(slots=True)
class Job:
    """The user's code. ``saved`` is the step that a new world resumes from.

    ``bug_at``: the step at which rank 0 fails each time; ``fails_at_end``: how many workers fail
    after the last step, where the others finish. Times in seconds.
    """

    total_steps: int = 100
    step_s: float = 0.1
    save_every: int = 5
    start_s: tuple[float, float] = (0.05, 0.5)  # from the fork to being ready to train
    on_sigterm: OnSigterm = OnSigterm.DIE
    bug_at: int | None = None
    fails_at_end: int = 0
    saved: int = 0


class World:
    """The workers of one round that found each other.

    Steps are made by all of them or none. When one goes, the others soon fail, as gloo would have
    it; but one that still waits for the others to come does not notice that they are gone.
    """

    def __init__(self, training: Training, round_number: int, store: str, size: int) -> None:
        self.training = training
        self.round = round_number
        self.store = store
        self.size = size
        self.workers: dict[int, SimWorker] = {}
        self.step = 0  # of the job
        self.made = 0  # in this world
        self.running = False
        self.broken = False
        self._next: Timer | None = None

    def join(self, worker: SimWorker) -> None:
        assert worker.rank not in self.workers, f"two workers of rank {worker.rank} in round {self.round}"
        assert worker.rank < self.size, f"rank {worker.rank} in a world of {self.size}"
        self.workers[worker.rank] = worker
        if len(self.workers) == self.size and not self.broken:
            self.running = True
            self.step = self.training.job.saved
            self.training.clock.note("world", f"round {self.round}: {self.size} train from step {self.step}")
            for formed in self.training.formed:
                formed(self)
            self._go_on()

    def leave(self, worker: SimWorker) -> None:
        self.workers.pop(worker.rank, None)
        if not self.running or self.broken or self.step >= self.training.job.total_steps:
            return
        self.broken = True
        self.running = False
        if self._next:
            self._next.cancel()
        for other in list(self.workers.values()):
            other.fail_soon(1, f"connection closed by peer {worker.rank}", primary=False)

    def _go_on(self) -> None:
        job, clock = self.training.job, self.training.clock
        if self.step >= job.total_steps:
            for worker in list(self.workers.values()):
                if job.fails_at_end and self.training.random.random() < 0.3:
                    job.fails_at_end -= 1
                    worker.fail_soon(1, "a failure after the last step", primary=True)
                else:
                    worker.finish_soon()
        else:
            self._next = clock.after(job.step_s, self._make_step)

    def _make_step(self) -> None:
        job = self.training.job
        if job.bug_at is not None and self.step == job.bug_at:
            self.workers[0].die(1, f"a bug at step {self.step}", primary=True)
            return
        self.step += 1
        self.made += 1
        if self.step % job.save_every == 0 or self.step == job.total_steps:
            job.saved = max(job.saved, self.step)
        for stepped in self.training.stepped:
            stepped(self)
        self._go_on()


class Training:
    """The user's job, over all its worlds and nodes.

    ``formed`` and ``stepped`` are told of worlds, ``failed`` of workers that failed by themselves.
    """

    def __init__(self, clock: Clock, job: Job) -> None:
        self.clock = clock
        self.job = job
        self.random = clock.random("training")
        self.formed: list[Callable[[World], None]] = []
        self.stepped: list[Callable[[World], None]] = []
        self.failed: list[Callable[[SimWorker, Exit], None]] = []
        self.serves: Callable[[str], bool] = lambda store: True  # is a round's store open there?
        self._worlds: dict[tuple[int, str], World] = {}

    def world(self, round_number: int, store: str, size: int) -> World:
        key = (round_number, store)
        if key not in self._worlds:
            self._worlds = {k: w for k, w in self._worlds.items() if k[0] > round_number - 10}
            self._worlds[key] = World(self, round_number, store, size)
        world = self._worlds[key]
        assert world.size == size, f"round {round_number} has {world.size} workers, or {size}?"
        return world


class SimWorker:
    """One process."""

    __slots__ = ("_next", "alive", "doomed", "exited", "procs", "rank", "slot", "stopping", "world")

    def __init__(
        self,
        procs: SimProcs,
        world: World,
        slot: int,
        rank: int,
        exited: Callable[[int, Exit], None],
    ) -> None:
        self.procs = procs
        self.world = world
        self.slot = slot
        self.rank = rank
        self.exited = exited
        self.alive = True
        self.doomed = False
        self.stopping = False
        self._next: Timer | None = None

    def begin(self) -> None:
        training = self.procs.training
        clock, random = training.clock, training.random
        bad_until = self.procs.bad_slots.get(self.slot, 0.0)
        if bad_until > clock.now():
            self._next = clock.after(
                random.uniform(0.05, 1.5), lambda: self.die(-signals.SIGBUS, "the GPU is gone", primary=True)
            )
            clock.after(random.uniform(*training.job.start_s), self._join)
        else:
            self._next = clock.after(random.uniform(*training.job.start_s), self._join)

    def _join(self) -> None:
        if not self.alive or self.stopping:
            return
        if self.procs.training.serves(self.world.store):
            self.world.join(self)
        else:  # the port listens already, or nobody is there any more: try until killed
            self.procs.training.clock.after(0.2, self._join)

    def fail_soon(self, code: int, message: str, *, primary: bool) -> None:
        if not self.doomed:
            self.doomed = True
            training = self.procs.training
            training.clock.after(
                training.random.uniform(0.005, 0.1), lambda: self.die(code, message, primary=primary)
            )

    def finish_soon(self) -> None:
        training = self.procs.training
        training.clock.after(training.random.uniform(0.005, 0.1), lambda: self.die(0, "", primary=False))

    def signal(self, number: int, *, fenced: bool = False) -> None:
        """What the process makes of it."""
        if not self.alive:
            return
        if number == signals.SIGKILL:
            self.die(-number, "", primary=False, fenced=fenced)
        elif self.procs.training.job.on_sigterm is not OnSigterm.IGNORE:
            self.stopping = True
            clock, random = self.procs.training.clock, self.procs.training.random
            if self.procs.training.job.on_sigterm is OnSigterm.DIE:
                clock.after(random.uniform(0.001, 0.02), lambda: self.die(-number, "", primary=False))
            else:
                clock.after(random.uniform(0.05, 2.0), lambda: self.die(0, "", primary=False))

    def die(self, code: int, message: str, *, primary: bool, fenced: bool = False) -> None:
        """``primary``: by a fault of the user's code or its slot, not because others went."""
        if not self.alive:
            return
        self.alive = False
        if self._next:
            self._next.cancel()
        procs = self.procs
        exit = Exit(self.slot, self.rank, code, procs.host.now(), message, fenced=fenced)
        procs.workers.pop(self.slot, None)
        procs._made[self.slot] = self.world.made
        if primary:
            procs.host.clock.note(procs.host.name, f"slot {self.slot} fails by itself: {message}")
            for failed in procs.training.failed:
                failed(self, exit)
        self.world.leave(self)
        number = self.world.round
        procs.host.call(lambda: self.exited(number, exit))


@dataclass(slots=True)
class SimProcs:
    """The workers of one node: ``elasticd.core.ports.Procs``.

    ``bad_slots``: slots whose workers fail soon after each start, until that time.
    """

    host: SimHost
    training: Training
    bad_slots: dict[int, float] = field(default_factory=dict)
    workers: dict[int, SimWorker] = field(default_factory=dict)
    _made: dict[int, int] = field(default_factory=dict)  # by those that ended, as of then
    _round: int = 0
    _world: World | None = None
    _kill_at: float = 0.0
    _kill: Timer | None = None
    _fence: Timer | None = None
    _fence_at: float | None = None

    # ---- the port

    def start(
        self,
        round_number: int,
        assignments: tuple[Assignment, ...],
        exited: Callable[[int, Exit], None],
    ) -> None:
        assert not self.workers, f"round {round_number} starts while workers of round {self._round} run"
        assert round_number > self._round, f"round {round_number} after round {self._round}"
        assert self.host.alive
        self._round = round_number
        self._disarm()
        self._made.clear()
        for a in assignments:
            size = int(a.env.get("WORLD_SIZE", len(assignments)))
            store = f"{a.env.get('MASTER_ADDR', '')}:{a.env.get('MASTER_PORT', '')}"
            self._world = self.training.world(round_number, store, size)
            worker = SimWorker(self, self._world, a.slot, a.rank, exited)
            self.workers[a.slot] = worker
            self._made[a.slot] = 0
            worker.begin()
        self._put_up_fence()  # it may have passed while nobody was there to kill

    def listen(self, linked: Callable[[int], None], waiting: Callable[[int, int, int], None]) -> None:
        """No worker is linked yet."""

    def standby(self, assignments: tuple[Assignment, ...], exited: Callable[[int, Exit], None]) -> None:
        raise AssertionError("no worker is linked, so none is to wait")

    def part(self, planned: bool, signal: int, grace_s: float, part_s: float) -> None:
        self.stop(signal, grace_s)

    def stop(self, signal: int, grace_s: float, slots: tuple[int, ...] | None = None) -> None:
        for worker in list(self.workers.values()):
            worker.signal(signal)
        if not self.workers:
            return
        kill_at = self.host.clock.now() + grace_s
        if self._kill is None or kill_at < self._kill_at:
            self._disarm()
            self._kill_at = kill_at
            self._kill = self.host.clock.at(kill_at, self.kill)

    def fence(self, until: float | None) -> None:
        self._fence_at = None if until is None else until - self.host.skew_s
        self._put_up_fence()

    def steps(self) -> Mapping[int, int]:
        made = self._world.made if self._world else 0
        return {slot: made if slot in self.workers else left for slot, left in self._made.items()}

    # ---- faults

    def crash(self, slot: int, code: int = 1) -> None:
        """The user's code fails."""
        if worker := self.workers.get(slot):
            worker.die(code, "the user's code raised", primary=True)

    def kill(self) -> None:
        """SIGKILL to all; also what the kernel does when the agent is gone."""
        for worker in list(self.workers.values()):
            worker.signal(signals.SIGKILL)

    def _put_up_fence(self) -> None:
        if self._fence:
            self._fence.cancel()
            self._fence = None
        if self._fence_at is not None:  # no call into the agent: a stopped agent must not hold it up
            self._fence = self.host.clock.at(self._fence_at, self._fenced)

    def _fenced(self) -> None:
        if self.workers:
            self.host.clock.note(self.host.name, "the fence kills the workers")
            for worker in list(self.workers.values()):
                worker.signal(signals.SIGKILL, fenced=True)

    def _disarm(self) -> None:
        if self._kill:
            self._kill.cancel()
            self._kill = None
