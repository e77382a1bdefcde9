"""Simulated workers: processes that train together, and fail together.

``Training`` is the user's training: worlds of workers that find each other, make steps, save, and finish.
``SimProcs`` implements ``elasticd.core.ports.Procs`` for the workers of one node.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from elasticd.channel.worker_messages import GIVES, HANDOVER
from elasticd.core.age import Age
from elasticd.core.agent.lingering import PATIENCE_S
from elasticd.core.facts import Exit, SlotProgress
from elasticd.core.page_layout import PageContents, Use
from elasticd.core.ports import (
    Assignment,
    WorkerBroke,
    WorkerCheckpointed,
    WorkerGone,
    WorkerLingers,
    WorkerLinked,
    WorkerNews,
    WorkerReturned,
    WorkerWaiting,
)
from elasticd.core.state_memory import StateMemory
from tests.sim.clock import Clock, Timer
from tests.sim.host import SimHost
from tests.sim.inspector import Ill, Illness
from tests.sim.shards import Point, given, newest_whole, with_copies

NEWS_S = 5.0  # the time from a lost connection until the worker reports it
HANG_S = 12.0  # an idle worker counts as hung after this time, and is killed
STEADY = 0.89  # the share of a step that a worker of a steady job computes; then it waits


class OnSigterm(StrEnum):
    """What the user's code does at SIGTERM."""

    DIE = "die"
    SAVE = "save"  # finishes the step, saves, and exits with 0
    IGNORE = "ignore"


@dataclass(slots=True)
class Job:
    """The user's code. ``saved``: the step from which a new world resumes. Times are in seconds.

    ``bug_at``: the step at which rank 0 always fails. ``fails_at_end``: how many workers fail after the last
    step, while the others finish. ``tells``: rank 0 reports each save, and waits until its agent lets it
    continue. ``taken_down_s``: how long the kernel takes a process down that has failed or was killed.

    ``inplace``: workers use elasticd.worker, and keep their process and their state. ``spares``: the spares
    of each node. Probabilities in such a job: ``stuck``, that a worker does not leave a round when told to;
    ``tears``, that a survivor's state is torn when its world breaks; ``dwells``, that a survivor is in the
    script's own code then, for ``dwell_s``; ``lingers``, that a failed worker needs as long to end.

    ``sharded``: each worker holds parts of the state, and copies of the parts of ``redundancy`` other
    workers. The parts are moved when a world forms. ``state``: the memory of all parts together, without
    copies.

    ``steady``: all workers compute for the same time in every step. So the world's steps say what each worker
    has done, and a step costs the simulator the same in a world of any size. No worker may be slow, crowded
    or ill.
    """

    total_steps: int = 100
    step_s: float = 0.1
    save_every: int = 5
    start_s: tuple[float, float] = (0.05, 0.5)  # from the fork until the worker can train
    end_s: tuple[float, float] = (0.005, 0.1)  # from the last step to the end of the process
    on_sigterm: OnSigterm = OnSigterm.DIE
    bug_at: int | None = None
    fails_at_end: int = 0
    tells: bool = False
    inplace: bool = False
    spares: int = 0
    stuck: float = 0.0
    tears: float = 0.0
    dwells: float = 0.0
    lingers: float = 0.0
    sharded: bool = False
    redundancy: int = 0
    state: int = 0
    unit: int = 1
    dwell_s: tuple[float, float] = (4.0, 20.0)
    taken_down_s: tuple[float, float] = (0.0, 0.0)
    steady: bool = False
    saved: int = 0


class World:
    """The workers of one round that found each other.

    A step is made by all workers or by none. If a worker ends, the others soon fail, as with gloo. A worker
    that still waits for the others to join does not notice that a worker has ended. Workers that keep their
    process do not fail: they are stuck until they are told to leave, and report the lost connection after a
    while.
    """

    def __init__(self, training: Training, round_number: int, store: str, size: int, handover: bool) -> None:
        self.training = training
        self.handover = handover  # the workers pass the state on, and all leave
        self.round = round_number
        self.store = store
        self.size = size
        self.workers: dict[int, SimWorker] = {}
        self.times: list[float] = []  # the times of the world's steps; each worker makes all of them
        self.waited_s = 0.0  # how long each worker of a steady world has waited
        self.step = 0  # the job's step
        self.made = 0  # the steps of this world
        self.running = False
        self.broken = False
        self.leaving = False  # all workers leave with the next step
        self.held = False  # the world waits after a save
        # the newest commit of a sharded model; at first the one with which the world begins
        self.point: Point | None = None
        self._moves_parts = False  # of a sharded model, before the first step
        self._waits = False  # whether the world waits for an ill worker
        self._awaits_leave = False  # whether its last step waits until each worker was told to leave
        self._began_at: float | None = None  # when the present step began
        self._next: Timer | None = None

    def join(self, worker: SimWorker) -> None:
        assert worker.rank not in self.workers, f"two workers of rank {worker.rank} in round {self.round}"
        assert worker.rank < self.size, f"rank {worker.rank} in a world of {self.size}"
        self.workers[worker.rank] = worker
        if len(self.workers) == self.size and not self.broken:
            self.running = True
            self.step = self._first_step()
            self.training.clock.note("world", f"round {self.round}: {self.size} train from step {self.step}")
            for formed in self.training.formed:
                formed(self)
            if self.training.job.sharded:
                self._lay_out()
                return
            if self.training.job.inplace:
                for other in list(self.workers.values()):
                    other.has_entered()
            if self.handover:
                self._next = self.training.clock.after(0.05, self._handed_over)
            else:
                self._go_on()

    def _lay_out(self) -> None:
        """Move the parts. A worker that has its own parts does not know whether the others have theirs."""
        random, clock = self.training.random, self.training.clock
        left = set(self.workers)
        self._moves_parts = True

        def enter(worker: SimWorker) -> None:
            if self.broken or worker.world is not self:
                return
            if not self.handover:
                worker.has_entered()
            left.discard(worker.rank)
            if left:
                return
            self._moves_parts = False
            for laid_out in self.training.laid_out:
                laid_out(self)
            if self.handover:
                self._handed_over()
            else:
                self._go_on()

        for worker in list(self.workers.values()):
            clock.after(random.uniform(0.001, 0.05), partial(enter, worker))

    def _pass_parts(self) -> None:
        """Have the workers that leave hand over the parts that no other worker has."""
        if self.point is None:
            return
        workers = [worker for _, worker in sorted(self.workers.items())]
        going, staying = [w for w in workers if w.going], [w for w in workers if not w.going]
        parts = given(self.point, [w.held for w in going], [w.held for w in staying])
        for worker, its in zip(staying, parts, strict=True):
            if self.point not in worker.held:
                worker.committed, worker.whole, worker.agreed = self.point[1], True, self.point[0]
            worker.held[self.point] = worker.held.get(self.point, frozenset()) | its

    def _handed_over(self) -> None:
        if self.training.job.sharded:
            self._pass_parts()
        self.running = False
        for worker in list(self.workers.values()):
            worker.come_out()

    def _first_step(self) -> int:
        """Return the step of the most advanced survivor, or the saved step."""
        if self.training.job.sharded:
            self.point = newest_whole(w.held for w in self.workers.values())
            return self.point[1] if self.point is not None else self.training.job.saved
        return max(
            (w.committed for w in self.workers.values() if w.whole and w.committed is not None),
            default=self.training.job.saved,
        )

    def leave(self, worker: SimWorker) -> None:
        self.workers.pop(worker.rank, None)
        worker.keep_times(self)
        self.break_up(f"connection closed by peer {worker.rank}")

    def break_up(self, why: str) -> None:
        """Break the connections between the world's workers."""
        past_the_last_step = self.step >= self.training.job.total_steps and not self._moves_parts
        if not self.running or self.broken or past_the_last_step:
            return
        self.broken = True
        self.running = False
        if self._next:
            self._next.cancel()
        job = self.training.job
        for other in list(self.workers.values()):
            if not job.inplace:
                other.fail_soon(1, why, primary=False)
                continue
            if self.training.random.random() < job.tears:
                other.whole = False
            other.loses_the_others()

    def _step_s(self) -> float:
        """Return how long the next step takes: as long as its slowest worker computes, and then the
        collective."""
        job, clock = self.training.job, self.training.clock
        if job.steady:
            self._began_at = clock.now()
            return job.step_s
        pace = clock.random("pace")
        for worker in self.workers.values():
            procs = worker.procs
            worker.own_s = job.step_s * procs.slow_slots.get(worker.slot, 1.0) * pace.uniform(0.88, 0.9)
            worker.delayed_s = job.step_s * procs.host.crowded * pace.random()
            worker.computes_until = clock.now() + worker.own_s if worker.own_s > job.step_s else 0.0
        slowest_s = max((w.own_s + w.delayed_s for w in self.workers.values()), default=0.0)
        if self._began_at is None:
            self._began_at = clock.now()
        return max(job.step_s, slowest_s + 0.1 * job.step_s)

    def _measure(self) -> None:
        """Record the waits of the step: each worker that was not ill waited for the others."""
        assert self._began_at is not None
        took_s = self.training.clock.now() - self._began_at
        if self.training.job.steady:
            self.waited_s += took_s * (1 - STEADY)
            self._began_at = None
            return
        for worker in self.workers.values():
            if worker.well_since < self._began_at:
                worker.wait_s += took_s - worker.own_s - worker.delayed_s
            worker.delay_s += worker.delayed_s
        self._began_at = None

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
            self._next = clock.after(self._step_s(), self._make_step)

    def go_on_after_all(self) -> None:
        """Continue: a worker has got well for which the others waited."""
        if self._waits and not any(worker.ill for worker in self.workers.values()):
            self._waits = False
            if self.running and not self.broken:
                self._go_on()

    def told_to_leave(self) -> None:
        """Let the world end with the next step, or with the present one if that step waits for this."""
        self.leaving = True
        if self._awaits_leave and self.running and self._is_each_told():
            self._awaits_leave = False
            self._make_step()

    def _is_each_told(self) -> bool:
        return all(worker.leaving or worker.stuck or worker.stopping for worker in self.workers.values())

    def _make_step(self) -> None:
        job = self.training.job
        if any(worker.ill for worker in self.workers.values()):
            self._waits = True
            return
        if job.inplace and self.leaving and not self._is_each_told():
            self._awaits_leave = True
            return
        if job.bug_at is not None and self.step == job.bug_at:
            self.workers[0].die(1, f"a bug at step {self.step}", primary=True)
            return
        self.step += 1
        self.made += 1
        self._measure()
        saves = self.step % job.save_every == 0 or self.step == job.total_steps
        if saves:
            job.saved = max(job.saved, self.step)
        self.times.append(self.training.clock.now())
        if job.inplace:
            for worker in self.workers.values():
                worker.committed = self.step
                worker.keep_parts(self)
        self.point = self.round, self.step
        for stepped in self.training.stepped:
            stepped(self)
        if self.leaving and self.step < job.total_steps:
            if job.sharded:
                self._pass_parts()
            self.running = False
            for worker in list(self.workers.values()):
                worker.come_out()
        elif saves and job.tells:
            self.held = True
            self.workers[0].procs.tell_of_checkpoint(self.workers[0])
        else:
            self._go_on()

    def continue_after_checkpoint(self) -> None:
        if self.held and self.running and not self.broken:
            self._go_on()
        self.held = False


class Training:
    """The user's training, over all its worlds and nodes.

    Callbacks: ``formed``, ``laid_out`` and ``stepped`` get worlds, ``failed`` gets workers that failed by
    themselves, ``fell_ill`` gets workers that hang. ``stuck_until``: until then other workers may have to
    wait for a worker that does not leave its round.
    """

    def __init__(self, clock: Clock, job: Job) -> None:
        self.clock = clock
        self.job = job
        self.random = clock.random("training")
        self.kernel = clock.random("kernel")
        self.formed: list[Callable[[World], None]] = []
        self.laid_out: list[Callable[[World], None]] = []
        self.stepped: list[Callable[[World], None]] = []
        self.failed: list[Callable[[SimWorker, Exit], None]] = []
        self.fell_ill: list[Callable[[SimWorker], None]] = []
        # whether a round's store is open at that address
        self.serves: Callable[[str], bool] = lambda store: True
        self._worlds: dict[tuple[int, str], World] = {}
        self.stuck_until = 0.0
        self._pids = 100_000
        self._line = 100

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    def next_line(self) -> int:
        """Return a line of the script. Each worker that hangs does so at another line."""
        self._line += 1
        return self._line

    def world(self, round_number: int, store: str, size: int, handover: bool = False) -> World:
        key = (round_number, store)
        if key not in self._worlds:
            self._worlds = {k: w for k, w in self._worlds.items() if k[0] > round_number - 10}
            self._worlds[key] = World(self, round_number, store, size, handover)
        world = self._worlds[key]
        assert world.size == size, f"round {round_number} has {world.size} workers, or {size}?"
        return world


@dataclass(slots=True, eq=False, repr=False)
class SimWorker:
    """One worker process. ``round``: its present round, or its last one; 0 for a standby.

    ``committed`` and ``whole``: the state that the worker holds. ``held``: its parts, if the model is
    sharded. ``going``: the worker is not in the next round. ``made``: its steps in the round. ``steps``: all
    its steps; ``steps_before``: the steps before its present round. ``leaving``: the worker was told to
    leave, and is killed if it is late. ``ill``: what keeps the worker from its next step; the worker hears
    messages only once it is well. ``own_s`` and ``delayed_s``: the time of the present step in which the
    worker computes, and in which it has no processor. ``wait_s`` and ``delay_s``: its waits and delays so
    far. ``awaits_news``: the world broke, and the worker waits, outside of collectives, for its agent to
    close the round.
    """

    procs: SimProcs
    slot: int
    rank: int
    exited: Callable[[int, Exit], None]
    pid: int
    steps_before: int = 0
    ill: Ill | None = None
    well_since: float = 0.0
    computes_until: float = 0.0
    own_s: float = 0.0
    delayed_s: float = 0.0
    wait_s: float = 0.0
    delay_s: float = 0.0
    world: World | None = None
    _times: list[float] = field(default_factory=list)  # the times of its steps in earlier worlds
    round: int = 0
    made: int = 0
    acts: bool = False
    alive: bool = True
    doomed: bool = False
    finishing: bool = False
    stopping: bool = False
    stuck: bool = False
    leaving: bool = False
    failing: bool = False
    committed: int | None = None
    whole: bool = False
    agreed: int = 0
    held: dict[Point, frozenset[int]] = field(default_factory=dict)
    going: bool = False
    awaits_news: bool = False
    _unheard: list[Callable[[], None]] = field(default_factory=list)
    _there: bool = False  # the worker has come to its run function
    _busy_until: float = 0.0  # until then the worker is in the script's own code, and hears nothing
    _next: Timer | None = None
    _kill: Timer | None = None
    _kill_at: float = 0.0

    def begin(self) -> None:
        training = self.procs.training
        clock, random = training.clock, training.random
        bad_until = self.procs.bad_slots.get(self.slot, 0.0)
        if bad_until > clock.now():
            self._next = clock.after(
                random.uniform(0.05, 1.5), lambda: self.die(-signals.SIGBUS, "the GPU is gone", primary=True)
            )
            clock.after(random.uniform(*training.job.start_s), self._arrive)
        else:
            self._next = clock.after(random.uniform(*training.job.start_s), self._arrive)

    def act(self, world: World, rank: int, going: bool = False) -> None:
        """Take part in this world, now or once the worker waits for a world."""
        self.world, self.round, self.rank, self.going = world, world.round, rank, going
        self.made, self.acts, self.leaving = 0, True, False
        self.steps_before = self.steps
        if self._there:
            self._join()

    def _arrive(self) -> None:
        if not self.alive or self.stopping:
            return
        if self.procs.training.job.inplace:
            self._there = True
            self.procs.tell(WorkerLinked(self.slot))
            if not self.acts or self.leaving:
                self.come_out()
        self._join()

    def _join(self) -> None:
        world = self.world
        if not self.alive or self.stopping or not self.acts or world is None:
            return
        if world.workers.get(self.rank) is self:
            return
        if self.procs.training.serves(world.store):
            world.join(self)
        else:  # the port is taken, or the store is gone: the worker tries until it is killed
            self.procs.training.clock.after(0.2, self._join)

    # ---- its steps

    @property
    def _shared(self) -> list[float]:
        """The times of the steps that the worker has made in its present world."""
        world = self.world
        return world.times if world is not None and world.workers.get(self.rank) is self else []

    @property
    def steps(self) -> int:
        return len(self._times) + len(self._shared)

    @property
    def last_at(self) -> float:
        """The time of the worker's last step; 0 before the first."""
        times = self._shared or self._times
        return times[-1] if times else 0.0

    def progress(self) -> SlotProgress:
        made, world = self.steps - self.steps_before, self.world
        at = self.last_at + self.procs.host.skew_s if made else 0.0
        base = world.step - world.made if world is not None else None
        return SlotProgress(self.slot, self.rank, self.pid, made, at, base)

    @property
    def waited_s(self) -> float:
        """Return how long the worker has waited for others."""
        world = self.world
        there = world is not None and world.workers.get(self.rank) is self
        return self.wait_s + (world.waited_s if there and world is not None else 0.0)

    def times(self, after: int, most: int = 250) -> list[float]:
        """Return the times of the worker's last steps, without the first ``after`` ones."""
        shared, own = self._shared, self._times
        first = max(after, len(own) + len(shared) - most)
        return own[first:] + shared[max(0, first - len(own)) :]

    def keep_times(self, world: World) -> None:
        """Keep the times of the world's steps: the worker leaves the world."""
        self._times += world.times
        self.wait_s += world.waited_s

    # ---- ill

    @property
    def computes(self) -> bool:
        """Whether the worker is busy in the script's own code."""
        if self.ill is not None:
            return self.ill.illness is Illness.BUSY
        away = self.world is None or self.world.workers.get(self.rank) is not self
        busy_until = max(self._busy_until, self.computes_until)
        return away or self.finishing or busy_until > self.procs.host.clock.now()

    @property
    def deaf(self) -> bool:
        """Whether the worker hears no message. A worker in a collective hears its agent."""
        return self.ill is not None and not self.ill.illness.waits

    def fall_ill(self, illness: Illness) -> None:
        procs = self.procs
        self.ill = Ill(illness, procs.training.next_line(), procs.host.clock.now())
        procs.host.clock.note(procs.host.name, f"slot {self.slot} is {illness} from now on")
        for ill in procs.training.fell_ill:
            ill(self)

    def get_well(self) -> None:
        if self.ill is None or not self.alive:
            return
        self.ill, self.well_since = None, self.procs.host.clock.now()
        self.procs.host.clock.note(self.procs.host.name, f"slot {self.slot} is well again")
        unheard, self._unheard = self._unheard, []
        for call in unheard:
            call()
        if self.world is not None:
            self.world.go_on_after_all()

    # ---- in place

    def leave(self, planned: bool) -> bool:
        """Return whether the worker can leave the round. ``come_out`` follows: at a step, if the leave is
        planned."""
        if not self._there or self.stopping:
            return False
        if self.deaf:
            number = self.round
            self._unheard.append(lambda: self._hear(number, planned))
            return True
        training = self.procs.training
        clock, random = training.clock, training.random
        if self.leaving and not planned and self._busy_until > clock.now():
            return True  # the worker has not heard of the world yet
        if not self.stuck and random.random() < training.job.stuck:
            self.stuck = True
            if self.world is not None and self.world.leaving:
                self.world.told_to_leave()
            training.stuck_until = clock.now() + HANG_S
            clock.after(HANG_S, lambda: self.die(-signals.SIGKILL, "hung", primary=False))
        if self.stuck:
            return True
        self.leaving = True
        world = self.world
        if planned and world is not None and world.running and world.workers.get(self.rank) is self:
            world.told_to_leave()
        else:
            abort_s = max(random.uniform(0.005, 0.05), self._busy_until - clock.now())
            clock.after(abort_s, partial(self._abort, self.round, planned))
        return True

    def _hear(self, number: int, planned: bool) -> None:
        """Handle a message that came while the worker was ill."""
        if self.alive and self.acts and self.round == number and not (self.leaving and planned):
            self.leave(planned)

    def _abort(self, number: int, planned: bool = False) -> None:
        """Leave the round of this number. A worker that is told twice may have left already, and be in the
        next round. If the world has begun to train since, the worker leaves as planned at the next step. A
        worker that has lost the others cannot leave as planned, and says so."""
        world = self.world
        if self.deaf:
            self._unheard.append(partial(self._abort, number, planned))
        elif self.alive and self.acts and self.leaving and self.round == number:
            trains = world is not None and world.running and world.workers.get(self.rank) is self
            if planned and world is not None and trains and not self.awaits_news:
                world.told_to_leave()
                return
            if planned and self.awaits_news:
                self.procs.tell(WorkerBroke(self.slot, number, fails=False))
            self.come_out()

    def has_entered(self) -> None:
        """Note that the worker's world has formed."""
        assert self.world is not None
        self.committed, self.whole, self.agreed = self.world.step, True, self.world.round
        if self.procs.training.job.sharded:
            self.held = {point: parts for point, parts in self.held.items() if point == self.world.point}
            self.keep_parts(self.world)

    def keep_parts(self, world: World) -> None:
        """Keep the parts of the world's present step, and of the commit before."""
        job = self.procs.training.job
        if job.sharded:
            before = dict(sorted(self.held.items())[-1:])
            parts = with_copies(self.rank, world.size, job.unit, job.redundancy)
            self.held = {**before, (world.round, world.step): parts}

    def loses_the_others(self) -> None:
        """Note that the connections are lost: at once, or when the script's own code ends. A worker that was
        to leave as planned leaves then."""
        training, number = self.procs.training, self.round
        clock, random = training.clock, training.random
        if self.deaf:
            self._unheard.append(self.loses_the_others)
            return
        if training.job.dwells and random.random() < training.job.dwells:
            self._busy_until = clock.now() + random.uniform(*training.job.dwell_s)
        self.awaits_news = True

        def say() -> None:
            if self.ill:  # in another collective, whose connections hold: the worker says it later
                self._unheard.append(say)
            elif self.alive and self.acts and self.round == number and not self.stuck:
                self.procs.tell(WorkerBroke(self.slot, number, fails=False))
                self._abort(number)

        clock.after(max(0.0, self._busy_until - clock.now()) + (0.0 if self.leaving else NEWS_S), say)

    @property
    def age(self) -> Age | None:
        """The age of the state that the worker could send."""
        return Age(self.agreed, self.committed) if self.whole and self.committed is not None else None

    def come_out(self) -> None:
        """Leave the world, if the worker is in one, and wait for the next."""
        if self.stopping or self.stuck or self.finishing:
            return
        if self.ill is not None and not self.deaf:  # the worker leaves the collective in which it was alone
            self.ill, self.well_since = None, self.procs.host.clock.now()
        self._leave_world()
        self.acts = False
        if self.leaving:
            self.spare()
        job = self.procs.training.job
        memory = StateMemory(job.state, job.state // 2, job.redundancy, job.unit) if job.state else None
        self.procs.tell(WorkerWaiting(self.slot, self.round, self.made, self.age, job.sharded, memory))

    def _leave_world(self) -> None:
        world, self.world, self.awaits_news = self.world, None, False
        if world is not None:
            self.made = world.made
            if world.workers.get(self.rank) is self:
                world.leave(self)

    # ---- its end

    def kill_after(self, grace_s: float) -> None:
        """Send SIGKILL after this time, unless an earlier one is on its way."""
        clock = self.procs.host.clock
        kill_at = clock.now() + grace_s
        if self._kill is None or kill_at < self._kill_at:
            self.spare()
            self._kill_at = kill_at
            self._kill = clock.at(kill_at, lambda: self.signal(signals.SIGKILL))

    def spare(self) -> None:
        if self._kill:
            self._kill.cancel()
            self._kill = None

    def fail_soon(self, code: int, message: str, *, primary: bool) -> None:
        if self.deaf:
            self._unheard.append(lambda: self.fail_soon(code, message, primary=primary))
        elif not self.doomed:
            self.doomed = True
            training = self.procs.training
            training.clock.after(
                training.random.uniform(0.005, 0.1), lambda: self.die(code, message, primary=primary)
            )

    def fail(self, code: int, message: str, **how: Any) -> None:
        """Fail by a fault of the user's code. A worker that keeps its process reports that to its agent, and
        may need time to end. ``how``: further fields of its ``Exit``."""
        training, world = self.procs.training, self.world
        job, random = training.job, training.random
        trains = job.inplace and world is not None and world.running and self.acts
        if not trains or random.random() >= job.lingers or self.leaving or self.stuck or self.stopping:
            self.die(code, message, primary=True, **how)
            return
        self.failing = self.finishing = True
        self.procs.note_failure(self, Exit(self.slot, self.rank, code, self.procs.host.now(), message))
        self.procs.tell(WorkerBroke(self.slot, self.round, fails=True))
        self._leave_world()
        training.clock.after(random.uniform(*job.dwell_s), lambda: self.die(code, message, primary=False))

    def finish_soon(self) -> None:
        self.finishing = True
        training = self.procs.training
        if training.job.inplace:
            self.procs.tell(WorkerReturned(self.slot, self.round))
        end_s = training.random.uniform(*training.job.end_s)
        training.clock.after(end_s, lambda: self.die(0, "", primary=False))

    def signal(self, number: int, *, fenced: bool = False) -> None:
        """Handle a signal."""
        if not self.alive:
            return
        if number == signals.SIGKILL:
            self.die(-number, "", primary=False, fenced=fenced)
        elif self.ill is not None and self.ill.illness is Illness.STOPPED:
            self._unheard.append(lambda: self.signal(number))
        elif self.procs.training.job.on_sigterm is not OnSigterm.IGNORE:
            self.stopping = True
            if self.world is not None and self.world.leaving:
                self.world.told_to_leave()
            clock, random = self.procs.training.clock, self.procs.training.random
            if self.procs.training.job.on_sigterm is OnSigterm.DIE:
                clock.after(random.uniform(0.001, 0.02), lambda: self.die(-number, "", primary=False))
            else:
                if self.world is not None and self.world.running:
                    self.procs.training.job.saved = max(self.procs.training.job.saved, self.world.step)
                clock.after(random.uniform(0.05, 2.0), lambda: self.die(0, "", primary=False))

    def die(self, code: int, message: str, *, primary: bool, fenced: bool = False, **how: Any) -> None:
        """End the process. ``primary``: by a fault of the user's code or of the slot, not because other
        workers ended."""
        if not self.alive:
            return
        self.alive = False
        if self._next:
            self._next.cancel()
        self.spare()
        procs = self.procs
        exit = Exit(self.slot, self.rank, code, procs.host.now(), message, fenced=fenced, **how)
        del procs.workers[self.slot]
        if primary:
            procs.note_failure(self, exit)
        trained = self.world is not None and self.acts and not (self.leaving or self.failing or self.stopping)
        self._leave_world()
        self.acts = False
        procs._made[self.slot] = (self.round, self.made)
        number, exited = self.round, self.exited
        if code and procs.training.job.taken_down_s[1]:
            procs.take_down(self, failed=trained and not fenced)
        procs.host.call(lambda: exited(number, exit))


@dataclass(slots=True)
class SimProcs:
    """The workers of one node: ``elasticd.core.ports.Procs``.

    ``bad_slots``: slots whose workers fail soon after each start, until that time. ``slow_slots``: how many
    times longer than others a worker in that slot computes.
    """

    host: SimHost
    training: Training
    bad_slots: dict[int, float] = field(default_factory=dict)
    slow_slots: dict[int, float] = field(default_factory=dict)
    workers: dict[int, SimWorker] = field(default_factory=dict)
    news: Callable[[WorkerNews], None] = lambda news: None
    # by pid: the slot, and the time of its end
    lingering: dict[int, tuple[int, float]] = field(default_factory=dict)
    # of workers that ended: the round and the steps
    _made: dict[int, tuple[int, int]] = field(default_factory=dict)
    _round: int = 0
    _fence: Timer | None = None
    _fence_at: float | None = None

    # ---- the port

    def listen(self, news: Callable[[WorkerNews], None]) -> None:
        self.news = news

    def tell(self, said: WorkerNews) -> None:
        told = self.news
        self.host.call(lambda: told(said))

    def start(
        self,
        round_number: int,
        assignments: tuple[Assignment, ...],
        exited: Callable[[int, Exit], None],
        waiting: Collection[int] = (),
    ) -> None:
        acting = [w for w in self.workers.values() if w.acts]
        assert not acting, f"round {round_number} starts while workers of round {acting[0].round} act"
        assert round_number > self._round, f"round {round_number} after round {self._round}"
        assert self.host.alive
        self._round = round_number
        self._made.clear()
        for a in assignments:
            size = int(a.env.get("WORLD_SIZE", len(assignments)))
            store = f"{a.env.get('MASTER_ADDR', '')}:{a.env.get('MASTER_PORT', '')}"
            world = self.training.world(round_number, store, size, HANDOVER in a.env)
            if (worker := self.workers.get(a.slot)) is None:
                if a.slot in waiting:
                    continue
                self._require_room()
                worker = self._add(a, exited)
            worker.exited = exited
            worker.act(world, a.rank, a.env.get(HANDOVER) == GIVES)
        self._put_up_fence()  # the fence may have passed while there was no worker to kill

    def standby(self, assignments: tuple[Assignment, ...], exited: Callable[[int, Exit], None]) -> None:
        assert self.host.alive
        for a in assignments:
            assert a.slot not in self.workers, f"slot {a.slot} has a worker already"
            self._require_room(a.slot)
            self._add(a, exited)
        self._put_up_fence()

    def _add(self, a: Assignment, exited: Callable[[int, Exit], None]) -> SimWorker:
        worker = self.workers[a.slot] = SimWorker(self, a.slot, a.rank, exited, self.training.next_pid())
        worker.begin()
        return worker

    def _require_room(self, of: int | None = None) -> None:
        """Check that no worker starts while the kernel takes down the worker before it in its slot, which
        still has memory and the device. After a long wait workers start all the same."""
        now = self.host.clock.now()
        held = {slot for slot, since in self.lingering.values() if now < since + PATIENCE_S}
        assert not (held if of is None else held & {of}), f"a worker starts while {held} are being taken down"

    def take_down(self, worker: SimWorker, *, failed: bool) -> None:
        """Take the process down as the kernel does; the process is gone only then. ``lingering`` is what the
        agent has heard: a slow agent hears of the end late."""
        training, slot, pid, ended_at = self.training, worker.slot, worker.pid, self.host.clock.now()
        told = self.news

        def lingers() -> None:
            self.lingering[pid] = slot, ended_at
            told(WorkerLingers(slot, pid, failed))

        def gone() -> None:
            del self.lingering[pid]
            told(WorkerGone(pid))

        self.host.call(lingers)
        taken_down_s = training.kernel.uniform(*training.job.taken_down_s)
        training.clock.after(taken_down_s, lambda: self.host.call(gone))

    def leave(
        self,
        planned: bool,
        signal: int,
        grace_s: float,
        leave_s: float | None,
        going: Collection[int] = (),
    ) -> None:
        for worker in [w for w in self.workers.values() if w.acts]:
            worker.going = worker.slot in going
            if worker.failing or (worker.finishing and planned):
                worker.kill_after(grace_s)
            elif not worker.finishing and worker.leave(planned):
                if leave_s is not None:
                    worker.kill_after(leave_s)
            else:
                self.stop(signal, grace_s, (worker.slot,))

    def stop(self, signal: int, grace_s: float, slots: tuple[int, ...] | None = None) -> None:
        for worker in [w for slot, w in self.workers.items() if slots is None or slot in slots]:
            worker.kill_after(grace_s)
            worker.signal(signal)

    def tell_of_checkpoint(self, worker: SimWorker) -> None:
        self.tell(WorkerCheckpointed(worker.slot, worker.round, ""))

    def go_on(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            worker = self.workers.get(slot)
            if worker is not None and worker.world is not None:
                worker.world.continue_after_checkpoint()

    def fence(self, until: float | None) -> None:
        self._fence_at = None if until is None else until - self.host.skew_s
        self._put_up_fence()

    def steps(self) -> Mapping[int, int]:
        made = {slot: steps for slot, (number, steps) in self._made.items() if number == self._round}
        for slot, worker in self.workers.items():
            if worker.round == self._round > 0:
                made[slot] = worker.world.made if worker.world else worker.made
        return made

    def progress(self, round_number: int) -> tuple[SlotProgress, ...]:
        if self._round != round_number:
            return ()
        return tuple(
            worker.progress() for _, worker in sorted(self.workers.items()) if worker.round == round_number
        )

    def step_times(self, slot: int, after: int) -> tuple[float, ...]:
        worker = self.workers.get(slot)
        times = worker.times(worker.steps_before + after) if worker is not None else ()
        return tuple(at + self.host.skew_s for at in times)

    def page_contents(self, round_number: int) -> Mapping[int, PageContents]:
        return {
            slot: PageContents(
                worker.pid,
                worker.steps,
                stepped_at=worker.last_at,
                measured=worker.steps,
                measured_s=worker.last_at,
                wait_s=worker.waited_s,
                waits=worker.steps,
                delay_s=worker.delay_s,
                uses=Use.DATA,
            )
            for slot, worker in sorted(self.workers.items())
            if worker.round == self._round == round_number
        }

    # ---- faults

    def condemn(self, worker: SimWorker, why: str) -> None:
        """Kill a worker that hung. The failure is charged to the user's code."""
        worker.die(-signals.SIGKILL, why, primary=True, hung=True)

    def make_ill(self, illness: Illness, much: float, for_s: float) -> None:
        """Make a training worker ill, for a while or (0) for good."""
        training = [
            worker
            for _, worker in sorted(self.workers.items())
            if worker.world is not None
            and worker.world.running
            and worker.world.made
            and worker.world.workers.get(worker.rank) is worker
            and not (worker.ill or worker.stopping or worker.finishing or worker.leaving or worker.stuck)
        ]
        if training:
            assert not self.training.job.steady
            worker = training[int(much * len(training))]
            worker.fall_ill(illness)
            if for_s:
                self.host.clock.after(for_s, worker.get_well)

    def crash(self, slot: int, code: int = 1, message: str = "the user's code raised", **how: Any) -> None:
        """Have the user's code fail. ``how``: further fields of its worker's ``Exit``."""
        if (worker := self.workers.get(slot)) and not worker.ill:
            worker.fail(code, message, **how)

    def note_failure(self, worker: SimWorker, exit: Exit) -> None:
        """Note that the failure is the user's fault."""
        self.host.clock.note(self.host.name, f"slot {worker.slot} fails by itself: {exit.message}")
        for failed in self.training.failed:
            failed(worker, exit)

    def kill(self) -> None:
        """Send SIGKILL to all workers, as the kernel also does when the agent is gone."""
        for worker in list(self.workers.values()):
            worker.signal(signals.SIGKILL)

    def _put_up_fence(self) -> None:
        if self._fence:
            self._fence.cancel()
            self._fence = None
        if self._fence_at is not None:  # do not call the agent: a stopped agent must not delay the kill
            self._fence = self.host.clock.at(self._fence_at, self._fenced)

    def _fenced(self) -> None:
        if self.workers:
            self.host.clock.note(self.host.name, "the fence kills the workers")
            for worker in list(self.workers.values()):
                worker.signal(signals.SIGKILL, fenced=True)
