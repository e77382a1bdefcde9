"""Decide which worker hangs, if any, from the activity of each worker and the usual time of the job's steps.

In lock-step training all ranks stand still together: one hangs, and the others wait for it in a collective. A
standstill alone thus names no worker. The judge looks at what each worker does meanwhile. The surer the
evidence, the sooner the verdict:

* stopped (SIGSTOP): the worker cannot continue by itself;
* asleep in its own code, while others wait: the worker may be loading data over a slow network;
* all wait for each other: a worker left out a collective, or the workers are in different ones;
* busy in its own code: most likely an evaluation, a checkpoint or a compilation.

Times are arguments, in seconds; there is no clock here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, groupby
from operator import attrgetter
from statistics import median
from typing import Final

from elasticd.core.thread_activity import ActivityKind, ThreadActivity

FOREVER_S = 1e9  # no limit; JSON has no infinity
REPEAT_S = 30.0  # the time after which a verdict without effect may be repeated
FIRST_S = (
    300.0  # how long a worker may be asleep before a round's first step: data may come over a slow network
)
GUILTY_MAX = 64  # workers that a verdict names: 16 kB in etcd, which brings the verdict to every agent
GAPS_ENOUGH = 5  # with fewer times between steps, limits are wide: the first steps compile and connect
# A worker below all of these limits is asleep. A worker that sends a file over a slow network uses hardly any
# CPU, but wakes up for each piece. Background threads wake up by themselves.
BUSY_SHARE = 0.05  # CPU time, as a share of one core
BUSY_WAKES_PER_S = 2.0  # how often the main thread continues after a wait
BUSY_ALL_WAKES_PER_S = 100.0  # how often all threads together continue after a wait


class ProcessState(StrEnum):
    """The state of a process, as in /proc."""

    RUNNING = "R"
    SLEEPING = "S"
    DISK = "D"  # in the kernel, where signals have no effect
    STOPPED = "T"
    TRACED = "t"  # stopped by a debugger, which will continue the process
    GONE = "X"
    ZOMBIE = "Z"


# ---------------------------------------------------------------- how long is too long


@dataclass(frozen=True, slots=True)
class Patience:
    """The user's settings: bounds for the learned limits, or one fixed limit for all.

    ``floor_s``: the least limit, even for a stopped worker. ``ceiling_s``: the greatest limit for a worker
    that others wait for. If a step of the job took longer than half of this, the limit is twice that step.
    """

    floor_s: float = 1.0
    ceiling_s: float = 3600.0
    fixed_s: float | None = None


@dataclass(frozen=True, slots=True)
class Allowance:
    """How long a worker may make no step, by what the worker does.

    ``unasked_s``: for a busy worker for which no other worker waits. ``leaving_s``: for a worker that was
    told to leave a world that others have left. ``first_s``: before the first step of a round, for a worker
    with steps in an earlier round. ``settled_s``: if all workers wait, each must have been seen at its place
    for this long, since the step goes on once the last worker has come. After ``busy_s``, it is enough that
    each was seen to wait for ``settled_s`` at different places.
    """

    stopped_s: float
    asleep_s: float
    waiting_s: float
    busy_s: float
    unasked_s: float
    leaving_s: float = FOREVER_S
    first_s: float = FOREVER_S
    settled_s: float = 0.0

    @property
    def first_look_s(self) -> float:
        """The standstill at which to look first, so that a second look at workers that all wait is over by
        their limit."""
        return min(self.asleep_s, self.waiting_s - 2 * self.settled_s)

    def next_s(self, still_s: float) -> float:
        """Return the next limit above this standstill."""
        limits = (self.stopped_s, self.asleep_s, self.waiting_s, self.busy_s, self.unasked_s)
        return min((limit for limit in limits if limit > still_s), default=FOREVER_S)


def allowance(gaps: Sequence[float], steps: int, patience: Patience) -> Allowance | None:
    """Return the limits for a job with these times between its last steps; None before the first step.

    A stopped worker's limit follows from the usual step. All other limits follow from the longest step as
    well, which may have included an evaluation or a checkpoint.
    """
    if steps < 1:
        return None
    usual_s, largest_s = (median(gaps), max(gaps)) if gaps else (0.0, 0.0)
    floor_s, ceiling_s = patience.floor_s, max(patience.ceiling_s, patience.floor_s, 2 * largest_s)
    if len(gaps) < GAPS_ENOUGH:
        usual_s, largest_s = max(1.0, largest_s), max(6.0, largest_s)

    def bounded(seconds: float) -> float:
        return min(max(seconds, floor_s), ceiling_s)

    stopped_s, fixed_s = bounded(10 * usual_s), patience.fixed_s
    if fixed_s is not None:
        settled_s = min(stopped_s, fixed_s / 4)
        return Allowance(*(fixed_s,) * 6, first_s=max(fixed_s, FIRST_S), settled_s=settled_s)
    waiting_s = bounded(max(60 * usual_s, 10 * largest_s, 120 * floor_s))
    return Allowance(
        stopped_s=stopped_s,
        asleep_s=bounded(max(30 * usual_s, 5 * largest_s, 60 * floor_s)),
        waiting_s=waiting_s,
        busy_s=ceiling_s,
        unasked_s=FOREVER_S,  # perhaps an evaluation of hours, of which each rank does a part
        # Short, since other workers have the state, so that nothing is lost if this worker is killed.
        leaving_s=bounded(max(10 * usual_s, 2 * largest_s, 10 * floor_s)),
        first_s=bounded(max(30 * usual_s, 5 * largest_s, FIRST_S * floor_s)),
        settled_s=min(stopped_s, waiting_s / 4),
    )


# ---------------------------------------------------------------- what a worker does


class Doing(StrEnum):
    """What a worker does. The values are few, since they are written to etcd and become labels."""

    MOVING = "moving"  # makes steps
    STOPPED = "stopped"
    ASLEEP = "asleep"  # in the script's or a library's code, without CPU use
    BUSY = "busy"  # computing, or waiting for a program that the worker started
    WAITING = "waiting"  # for others, in a collective
    UNKNOWN = "unknown"  # asleep, with an unknown stack
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Pulse:
    """The recent activity of a process. ``cpu_share``: the cores that it and its children used.
    ``wakes_per_s``, ``all_wakes_per_s``: how often its main thread, and all its threads, continued after a
    wait."""

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


def doing(state: ProcessState, pulse: Pulse, where: ThreadActivity | None) -> Doing:
    match state:
        case ProcessState.STOPPED:
            return Doing.STOPPED
        case ProcessState.GONE | ProcessState.ZOMBIE:
            return Doing.GONE
        case ProcessState.TRACED | ProcessState.DISK:
            return Doing.BUSY
    if where is not None and where.kind is ActivityKind.COLLECTIVE:
        # A worker that computes in backward is busy. A worker that polls for the GPU or other ranks waits.
        return Doing.BUSY if where.doing == "backward" and pulse.cpu_share >= BUSY_SHARE else Doing.WAITING
    runs = state is ProcessState.RUNNING or pulse.busy  # or would run, if the machine had a free core
    if runs or (where is not None and where.kind is ActivityKind.PROGRAM):
        return Doing.BUSY
    return Doing.ASLEEP if where is not None else Doing.UNKNOWN


@dataclass(frozen=True, slots=True)
class Look:
    """One worker, as it was seen.

    ``step``: its steps in this round; its process may have made more. ``still_s``: the time since its last
    step. ``place`` and ``what``: see ``ThreadActivity``. ``there_s``: how long it has been seen to stay
    there. ``waits_s``: how long it has been seen in collectives, at whatever place. ``new``: its process has
    made no step yet, and may have something left to import or to compile.
    """

    node: str
    slot: int
    rank: int
    step: int
    still_s: float
    doing: Doing
    place: str = ""
    what: str = ""
    there_s: float = 0.0
    waits_s: float = 0.0
    new: bool = False


# ---------------------------------------------------------------- the verdict


class Why(StrEnum):
    STOPPED = "stopped"
    ASLEEP = "asleep"
    BUSY = "busy"
    APART = "apart"  # all workers wait, and the hung workers wait in another place than most
    DEADLOCK = "deadlock"  # all workers wait, and none is more to blame than another
    SILENT = "silent"  # the stack of the hung worker is unknown, while the others wait


@dataclass(frozen=True, slots=True)
class Verdict:
    """The workers that hang, to be killed and replaced. ``others``: the number of other workers seen.
    ``others_what``, ``others_place``: the most common collective and place of the others that wait.

    ``guilty`` are at most ``GUILTY_MAX`` workers, the first by rank, and ``more`` is the number of those left
    out: the verdict is one value in etcd. The end of the workers that are named ends the round for all.
    """

    why: Why
    guilty: tuple[Look, ...]
    others: int = 0
    others_what: str = ""
    others_place: str = ""
    more: int = 0


NOW: Final[Mapping[str, float]] = {}


def judge(looks: Sequence[Look], allowed: Allowance, since: Mapping[str, float] = NOW) -> Verdict | None:
    """Return the verdict on the workers that hang by now; None if no worker hangs.

    ``looks``: of every worker of the world, except those that have ended well. To judge stopped workers
    alone, fewer looks are enough. ``since``: how long ago the workers of a node were seen, if not just now;
    their standstills are longer by that time.
    """
    ordered = tuple(sorted(looks, key=attrgetter("rank")))

    def found(why: Why, guilty: Sequence[Look], limit_s: float) -> Verdict | None:
        late = bool(guilty) and all(_still_s(look, since) >= limit_s for look in guilty)
        return _verdict(why, tuple(guilty), ordered, since) if late else None

    runs = [(doing, tuple(run)) for doing, run in groupby(ordered, attrgetter("doing"))]

    def those(*kinds: Doing) -> list[Look]:
        return list(chain.from_iterable([run for doing, run in runs if doing in kinds]))

    stopped = [look for look in those(Doing.STOPPED) if _still_s(look, since) >= allowed.stopped_s]
    if stopped:
        return found(Why.STOPPED, stopped, allowed.stopped_s)
    if those(Doing.GONE):
        return None  # the report of the exit is on its way
    waiting, busy = those(Doing.WAITING), those(Doing.BUSY)
    asleep, silent = those(Doing.ASLEEP), those(Doing.UNKNOWN)
    if not waiting:
        return found(Why.ASLEEP, asleep, allowed.busy_s) or found(Why.BUSY, busy, allowed.unasked_s)
    if busy or those(Doing.MOVING, Doing.STOPPED):
        # Perhaps all other workers, the sleeping ones too, wait for the busy one.
        return found(Why.ASLEEP, asleep, allowed.busy_s) or found(Why.BUSY, busy, allowed.busy_s)
    if asleep:
        return found(Why.ASLEEP, asleep, allowed.asleep_s)
    if silent:
        return found(Why.SILENT, silent, allowed.waiting_s)
    settled = min(map(attrgetter("there_s"), waiting)) >= allowed.settled_s
    if settled or min(map(attrgetter("waits_s"), waiting)) >= allowed.settled_s:
        limit_s = allowed.waiting_s if settled else allowed.busy_s
        apart = _apart(waiting, allowed.settled_s)
        return found(Why.APART, apart, limit_s) or found(Why.DEADLOCK, waiting, limit_s)
    return None  # the last worker may just have come, so that the step goes on


def judge_first(
    looks: Sequence[Look], allowed: Allowance, since: Mapping[str, float] = NOW
) -> Verdict | None:
    """Return who hangs before the first step of a round: workers that stay asleep while no worker is busy.

    ``looks``: of all workers of the world. A worker that is new is not judged. ``since``: as for ``judge``.
    """
    asleep = tuple(look for look in looks if look.doing is Doing.ASLEEP)
    calm = all(look.doing in (Doing.ASLEEP, Doing.WAITING) for look in looks)
    late = all(not look.new and _still_s(look, since) >= allowed.first_s for look in asleep)
    return _verdict(Why.ASLEEP, asleep, looks, since) if asleep and calm and late else None


def judge_round(
    looks: Sequence[Look], allowed: Allowance, since: Mapping[str, float] = NOW
) -> Verdict | None:
    """Return who hangs in a round, before its first step or after.

    ``looks``: of every worker of the world, as for ``judge``, like ``since``.
    """
    if all(map(attrgetter("step"), looks)):
        return judge(looks, allowed, since)
    stopped = [look for look in looks if look.doing is Doing.STOPPED]
    return judge(stopped, allowed, since) or judge_first(looks, allowed, since)


def judge_leaving(looks: Sequence[Look]) -> Verdict | None:
    """Return who blocks the next world, when leaving this one has taken too long.

    ``looks``: of the workers that have not left. A sleeping worker may be waiting for a busy one, so all must
    be asleep.
    """
    asleep = tuple(look for look in looks if look.doing is Doing.ASLEEP)
    return _verdict(Why.ASLEEP, asleep, looks) if asleep and len(asleep) == len(looks) else None


def _still_s(look: Look, since: Mapping[str, float]) -> float:
    return look.still_s + since.get(look.node, 0.0)


def _verdict(
    why: Why, guilty: tuple[Look, ...], looks: Sequence[Look], since: Mapping[str, float] = NOW
) -> Verdict:
    others: list[Look] = []
    if len(guilty) < len(looks):
        ranks = {look.rank for look in guilty}
        others = [look for look in looks if look.rank not in ranks]
    named, more = guilty[:GUILTY_MAX], len(guilty[GUILTY_MAX:])
    if since:
        named = tuple(replace(look, still_s=_still_s(look, since)) for look in named)
    waits = Counter((look.what, look.place) for look in others if look.doing is Doing.WAITING)
    what, place = waits.most_common(1)[0][0] if waits else ("", "")
    return Verdict(why, named, len(others), what, place, more)


def _apart(waiting: Sequence[Look], settled_s: float) -> list[Look]:
    """Return the workers that wait in another place than most. Most must have stayed at their place. Of a
    worker whose place changes, only its step and its collective are compared: the worker may wait for the
    same collective from several places."""
    stayed = [look for look in waiting if look.there_s >= settled_s]
    places = Counter(map(attrgetter("step", "what", "place"), stayed))
    most, count = places.most_common(1)[0] if places else ((0, "", ""), 0)
    if 2 * count <= len(waiting) or count == len(waiting):
        return []
    elsewhere = {look.rank for look in stayed if (look.step, look.what, look.place) != most}
    return [look for look in waiting if look.rank in elsewhere or (look.step, look.what) != most[:2]]
