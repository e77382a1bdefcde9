"""Does a worker hang, and which one? From what each does, and how long the job's steps take.

In lock-step training all ranks stand still together, whoever is to blame: one hangs, and the others
wait for it in a collective. So standing still is only the question. The answer is what each worker
does meanwhile, and the more certain that is, the less patience it gets:

* stopped (SIGSTOP): it can never go on by itself;
* asleep in its own code, while others wait for it: it may be loading data from far away;
* all wait for each other: somebody left a collective out, or they are in different ones;
* busy in its own code: most likely an evaluation, a checkpoint, a compilation.

Times are arguments, in seconds; there is no clock here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from elasticd.core.whereabouts import At, Whereabouts

FOREVER_S = 1e9  # JSON has no infinity
REPEAT_S = 30.0  # a verdict that changed nothing may be reached again
FIRST_S = 300.0  # asleep before the first step of a round: what it waits for may be far away
GAPS_ENOUGH = 5  # fewer say little: the first steps compile, allocate and connect
# Who does less than all of these is asleep. One who sends a file over a slow network hardly uses any
# CPU, but wakes up for each piece; and background threads wake up by themselves to look around.
BUSY_SHARE = 0.05  # of one core
BUSY_WAKES_PER_S = 2.0  # of the main thread
BUSY_ALL_WAKES_PER_S = 100.0  # of all threads


class ProcessState(StrEnum):
    """As /proc has it."""

    RUNNING = "R"
    SLEEPING = "S"
    DISK = "D"  # in the kernel, beyond signals
    STOPPED = "T"
    TRACED = "t"  # by a debugger, who will let it go on
    GONE = "X"
    ZOMBIE = "Z"


# ---------------------------------------------------------------- how long is too long


@dataclass(frozen=True, slots=True)
class Patience:
    """What people set: bounds of the limits that are learned, or one limit instead of all of them.

    ``floor_s``: even a stopped worker gets this long. ``ceiling_s``: even a busy one, if others
    wait for it, gets no longer, but for a job that has made a step half as long.
    """

    floor_s: float = 1.0
    ceiling_s: float = 3600.0
    fixed_s: float | None = None


@dataclass(frozen=True, slots=True)
class Allowance:
    """How long a worker may go without a step. ``unasked_s``: a busy one that nobody waits for;
    ``leaving_s``: after it was told to leave a world that others have left; ``first_s``: until the first
    step of a round, where it has made steps in an earlier one."""

    stopped_s: float
    asleep_s: float
    waiting_s: float
    busy_s: float
    unasked_s: float
    leaving_s: float = FOREVER_S
    first_s: float = FOREVER_S


def allowance(gaps: Sequence[float], steps: int, patience: Patience) -> Allowance | None:
    """What is allowed in a job whose last steps came at these gaps; None before its first step.

    A stopped worker is measured by the usual step; all others by the largest too, which may have
    had an evaluation or a checkpoint in it.
    """
    if steps < 1:
        return None
    if patience.fixed_s is not None:
        return Allowance(*(patience.fixed_s,) * 6, first_s=max(patience.fixed_s, FIRST_S))
    usual_s, largest_s = (median(gaps), max(gaps)) if gaps else (0.0, 0.0)
    floor_s, ceiling_s = patience.floor_s, max(patience.ceiling_s, patience.floor_s, 2 * largest_s)
    if len(gaps) < GAPS_ENOUGH:
        usual_s, largest_s = max(1.0, largest_s), max(6.0, largest_s)

    def bounded(seconds: float) -> float:
        return min(max(seconds, floor_s), ceiling_s)

    return Allowance(
        stopped_s=bounded(10 * usual_s),
        asleep_s=bounded(max(30 * usual_s, 5 * largest_s, 60 * floor_s)),
        waiting_s=bounded(max(60 * usual_s, 10 * largest_s, 120 * floor_s)),
        busy_s=ceiling_s,
        unasked_s=FOREVER_S,  # it may well be an evaluation of hours that every rank has its part of
        leaving_s=bounded(max(10 * usual_s, 2 * largest_s, 10 * floor_s)),  # others have what it has
        first_s=bounded(max(30 * usual_s, 5 * largest_s, FIRST_S * floor_s)),
    )


# ---------------------------------------------------------------- what a worker does


class Doing(StrEnum):
    """Bounded, as it is written to etcd and becomes a label."""

    MOVING = "moving"  # it makes steps
    STOPPED = "stopped"
    ASLEEP = "asleep"  # in code of its own, using no CPU
    BUSY = "busy"  # in code of its own, or waiting for a program it started
    WAITING = "waiting"  # for others, in a collective
    UNKNOWN = "unknown"  # asleep, and not saying where
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Pulse:
    """How a process has been of late. ``cpu_share``: cores that it and its children used;
    ``wakes_per_s``, ``all_wakes_per_s``: how often its main thread, and all threads, went on."""

    cpu_share: float
    wakes_per_s: float = 0.0
    all_wakes_per_s: float = 0.0

    @property
    def busy(self) -> bool:
        return (
            self.cpu_share >= BUSY_SHARE
            or self.wakes_per_s >= BUSY_WAKES_PER_S
            or self.all_wakes_per_s >= BUSY_ALL_WAKES_PER_S
        )


def doing(state: ProcessState, pulse: Pulse, where: Whereabouts | None) -> Doing:
    match state:
        case ProcessState.STOPPED:
            return Doing.STOPPED
        case ProcessState.GONE | ProcessState.ZOMBIE:
            return Doing.GONE
        case ProcessState.TRACED | ProcessState.DISK:
            return Doing.BUSY
    if where is not None and where.at is At.COLLECTIVE:
        # Who computes in backward is busy; who spins for the GPU, or for other ranks, waits for them.
        return Doing.BUSY if where.doing == "backward" and pulse.cpu_share >= BUSY_SHARE else Doing.WAITING
    runs = state is ProcessState.RUNNING or pulse.busy  # or would, were the machine less so
    if runs or (where is not None and where.at is At.PROGRAM):
        return Doing.BUSY
    return Doing.ASLEEP if where is not None else Doing.UNKNOWN


@dataclass(frozen=True, slots=True)
class Look:
    """One worker, looked at. ``step``: how many it has made in the round, which may not be all that its
    process made. ``still_s``: since its last step. ``place`` and ``what``: see ``Whereabouts``."""

    node: str
    slot: int
    rank: int
    step: int
    still_s: float
    doing: Doing
    place: str = ""
    what: str = ""


# ---------------------------------------------------------------- the verdict


class Why(StrEnum):
    STOPPED = "stopped"
    ASLEEP = "asleep"
    BUSY = "busy"
    APART = "apart"  # all wait, but these elsewhere than most
    DEADLOCK = "deadlock"  # all wait, and none is to blame more than another
    SILENT = "silent"  # does not say where it is, while the others wait


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who hangs: to be killed and replaced. ``others``: how many more were looked at, and what most
    of those that wait are in and where, if any does."""

    why: Why
    guilty: tuple[Look, ...]
    others: int = 0
    others_what: str = ""
    others_place: str = ""


def judge(looks: Sequence[Look], allowed: Allowance) -> Verdict | None:
    """Whether somebody hangs by now. ``looks``: of every worker of the world, where more is asked
    than whether one is stopped; those that have ended well are left out."""
    ordered = tuple(sorted(looks, key=lambda look: look.rank))

    def found(why: Why, guilty: Sequence[Look], limit_s: float) -> Verdict | None:
        late = bool(guilty) and all(look.still_s >= limit_s for look in guilty)
        return _verdict(why, tuple(guilty), ordered) if late else None

    def those(*kinds: Doing) -> list[Look]:
        return [look for look in ordered if look.doing in kinds]

    stopped = [look for look in those(Doing.STOPPED) if look.still_s >= allowed.stopped_s]
    if stopped:
        return found(Why.STOPPED, stopped, allowed.stopped_s)
    if those(Doing.GONE):
        return None  # its exit is on its way, and says more
    waiting, busy = those(Doing.WAITING), those(Doing.BUSY)
    asleep, silent = those(Doing.ASLEEP), those(Doing.UNKNOWN)
    if not waiting:
        return found(Why.ASLEEP, asleep, allowed.busy_s) or found(Why.BUSY, busy, allowed.unasked_s)
    if busy or those(Doing.MOVING, Doing.STOPPED):
        # Perhaps all the others, the sleeping ones too, wait for the busy one in their own ways.
        return found(Why.ASLEEP, asleep, allowed.busy_s) or found(Why.BUSY, busy, allowed.busy_s)
    if asleep:
        return found(Why.ASLEEP, asleep, allowed.asleep_s)
    if silent:
        return found(Why.SILENT, silent, allowed.waiting_s)
    apart = _apart(waiting)
    return found(Why.APART, apart, allowed.waiting_s) or found(Why.DEADLOCK, waiting, allowed.waiting_s)


def judge_first(looks: Sequence[Look], experienced: Collection[int], allowed: Allowance) -> Verdict | None:
    """Who hangs before the first step of a round: whoever sleeps on, while nobody is busy. ``looks``: of all
    workers of the world; ``experienced``: the ranks of those that have made steps in an earlier round, and so
    have nothing to import, nor to compile for the first time."""
    asleep = tuple(look for look in looks if look.doing is Doing.ASLEEP)
    calm = all(look.doing in (Doing.ASLEEP, Doing.WAITING) for look in looks)
    late = all(look.rank in experienced and look.still_s >= allowed.first_s for look in asleep)
    return _verdict(Why.ASLEEP, asleep, looks) if asleep and calm and late else None


def judge_leaving(looks: Sequence[Look]) -> Verdict | None:
    """Who keeps the others from their next world, once it has taken too long to leave this one. ``looks``:
    of those that have not left it. One that is busy may be what the sleeping ones wait for."""
    asleep = tuple(look for look in looks if look.doing is Doing.ASLEEP)
    return _verdict(Why.ASLEEP, asleep, looks) if asleep and len(asleep) == len(looks) else None


def _verdict(why: Why, guilty: tuple[Look, ...], looks: Sequence[Look]) -> Verdict:
    others = [look for look in looks if look not in guilty]
    waits = Counter((look.what, look.place) for look in others if look.doing is Doing.WAITING)
    what, place = waits.most_common(1)[0][0] if waits else ("", "")
    return Verdict(why, guilty, len(others), what, place)


def _apart(waiting: Sequence[Look]) -> list[Look]:
    """Those that are elsewhere than most of them."""
    places = Counter((look.step, look.what, look.place) for look in waiting)
    most, count = places.most_common(1)[0]
    if 2 * count <= len(waiting):
        return []
    return [look for look in waiting if (look.step, look.what, look.place) != most]
