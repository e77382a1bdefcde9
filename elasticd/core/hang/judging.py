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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
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
    with steps in an earlier round. ``settled_s``: for this long each worker must have been seen at its place
    if all workers wait, since the step goes on once the last worker has come. After ``busy_s``, it is enough
    that each was seen to wait for ``settled_s`` at different places.
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
    """What was seen of one worker.

    ``step``: the worker's steps in this round; its process may have made more. ``still_s``: the seconds since
    the last step. ``place`` and ``what``: see ``ThreadActivity``. ``there_s``: for how many seconds the
    worker has been seen at this place. ``waits_s``: for how many seconds it has been seen in collectives, at
    any place. ``new``: the worker's process has made no step yet, and may still have to import or compile.
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


@dataclass(frozen=True, slots=True)
class Group:
    """Workers of one node that were seen to do the same, after the same step, at the same place, in the order
    of their ranks. In a large job, judging groups is faster than judging each worker.

    ``still_s``, ``there_s``, ``waits_s``: the least of all looks; ``longest_s``: the greatest ``still_s``.
    ``new``: whether any is new.
    """

    looks: tuple[Look, ...]
    node: str
    rank: int  # of the first worker
    doing: Doing
    step: int
    what: str
    place: str
    still_s: float
    longest_s: float
    there_s: float
    waits_s: float
    new: bool

    @classmethod
    def of(cls, looks: Sequence[Look]) -> Group:
        one, still_s = looks[0], [look.still_s for look in looks]
        return cls(
            tuple(looks),
            one.node,
            one.rank,
            one.doing,
            one.step,
            one.what,
            one.place,
            min(still_s),
            max(still_s),
            min([look.there_s for look in looks]),
            min([look.waits_s for look in looks]),
            any(look.new for look in looks),
        )


def in_groups(looks: Iterable[Look]) -> tuple[Group, ...]:
    """Return the groups that these workers are in."""
    alike: dict[tuple[object, ...], list[Look]] = {}
    for look in sorted(looks, key=attrgetter("rank")):
        alike.setdefault((look.node, look.doing, look.step, look.what, look.place), []).append(look)
    return tuple([Group.of(those) for those in alike.values()])


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


def judge(groups: Sequence[Group], allowed: Allowance, since: Mapping[str, float] = NOW) -> Verdict | None:
    """Return the verdict on the workers that hang by now; None if no worker hangs.

    ``groups``: with every worker of the world, except those that have ended well. To judge stopped workers
    alone, fewer groups are enough. ``since``: how long ago the workers of a node were seen, if not just now;
    their standstills are longer by that time.
    """
    those: dict[Doing, list[Group]] = {doing: [] for doing in Doing}
    for group in groups:
        those[group.doing].append(group)

    def found(why: Why, doing: Doing, limit_s: float) -> Verdict | None:
        guilty = those[doing]
        if not guilty or not _are_late(guilty, limit_s, since):
            return None
        return _verdict(why, guilty, [group for group in groups if group.doing is not doing], since)

    stopped, others = _parted(those[Doing.STOPPED], lambda k: _still_s(k, since) >= allowed.stopped_s)
    if stopped:
        others += [group for group in groups if group.doing is not Doing.STOPPED]
        return _verdict(Why.STOPPED, stopped, others, since)
    if those[Doing.GONE]:
        return None  # the report of the exit is on its way
    waiting, busy = those[Doing.WAITING], those[Doing.BUSY]
    if not waiting:
        return found(Why.ASLEEP, Doing.ASLEEP, allowed.busy_s) or found(
            Why.BUSY, Doing.BUSY, allowed.unasked_s
        )
    if busy or those[Doing.MOVING] or those[Doing.STOPPED]:
        # Perhaps all other workers, the sleeping ones too, wait for the busy one.
        return found(Why.ASLEEP, Doing.ASLEEP, allowed.busy_s) or found(Why.BUSY, Doing.BUSY, allowed.busy_s)
    if those[Doing.ASLEEP]:
        return found(Why.ASLEEP, Doing.ASLEEP, allowed.asleep_s)
    if those[Doing.UNKNOWN]:
        return found(Why.SILENT, Doing.UNKNOWN, allowed.waiting_s)
    settled = min([group.there_s for group in waiting]) >= allowed.settled_s
    if settled or min([group.waits_s for group in waiting]) >= allowed.settled_s:
        limit_s = allowed.waiting_s if settled else allowed.busy_s
        apart, others = _apart(waiting, allowed.settled_s)
        if apart and _are_late(apart, limit_s, since):
            return _verdict(Why.APART, apart, others, since)
        return found(Why.DEADLOCK, Doing.WAITING, limit_s)
    return None  # the last worker may just have come, so that the step goes on


def judge_first(
    groups: Sequence[Group], allowed: Allowance, since: Mapping[str, float] = NOW
) -> Verdict | None:
    """Return which workers hang before the first step of a round: those that stay asleep while none is busy.

    ``groups``: with all workers of the world. A worker that is new is not judged. ``since``: as for
    ``judge``.
    """
    asleep = [group for group in groups if group.doing is Doing.ASLEEP]
    waiting = [group for group in groups if group.doing is Doing.WAITING]
    calm = len(asleep) + len(waiting) == len(groups) and not any(group.new for group in asleep)
    late = calm and _are_late(asleep, allowed.first_s, since)
    return _verdict(Why.ASLEEP, asleep, waiting, since) if asleep and late else None


def judge_round(
    groups: Sequence[Group], allowed: Allowance, since: Mapping[str, float] = NOW
) -> Verdict | None:
    """Return which workers hang in a round, before its first step or after.

    ``groups``: with every worker of the world, as for ``judge``, like ``since``.
    """
    if all(group.step for group in groups):
        return judge(groups, allowed, since)
    stopped = [group for group in groups if group.doing is Doing.STOPPED]
    return judge(stopped, allowed, since) or judge_first(groups, allowed, since)


def judge_leaving(groups: Sequence[Group]) -> Verdict | None:
    """Return which workers block the next world, when they take too long to leave this one.

    ``groups``: of the workers that have not left. A sleeping worker may be waiting for a busy one, so all
    must be asleep.
    """
    asleep = all(group.doing is Doing.ASLEEP for group in groups)
    return _verdict(Why.ASLEEP, groups, ()) if groups and asleep else None


def _still_s(seen: Look | Group, since: Mapping[str, float]) -> float:
    return seen.still_s + since.get(seen.node, 0.0)


def _are_late(groups: Sequence[Group], limit_s: float, since: Mapping[str, float]) -> bool:
    """Whether no worker of the groups has made a step for ``limit_s`` seconds."""
    return min([_still_s(group, since) for group in groups], default=limit_s) >= limit_s


def _parted(groups: Iterable[Group], guilty: Callable[[Look], bool]) -> tuple[list[Group], list[Group]]:
    """Return groups of the workers that are guilty, and groups of the others."""
    parts: tuple[list[Group], list[Group]] = [], []
    for group in groups:
        those = [look for look in group.looks if guilty(look)]
        if len(those) == len(group.looks):
            parts[0].append(group)
        elif not those:
            parts[1].append(group)
        else:
            parts[0].append(Group.of(those))
            parts[1].append(Group.of([look for look in group.looks if look not in those]))
    return parts


def _verdict(
    why: Why, guilty: Sequence[Group], others: Sequence[Group], since: Mapping[str, float] = NOW
) -> Verdict:
    looks = sorted(chain.from_iterable([group.looks for group in guilty]), key=attrgetter("rank"))
    named, more = looks[:GUILTY_MAX], len(looks[GUILTY_MAX:])
    if since:
        named = [replace(look, still_s=_still_s(look, since)) for look in named]
    waits: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], int] = {}  # by collective and place, the least rank
    for group in others:
        if group.doing is Doing.WAITING:
            at = group.what, group.place
            waits[at] += len(group.looks)
            first[at] = min(first.get(at, group.rank), group.rank)
    what, place = max(waits, key=lambda at: (waits[at], -first[at]), default=("", ""))
    return Verdict(why, tuple(named), sum([len(group.looks) for group in others]), what, place, more)


def _apart(waiting: Sequence[Group], settled_s: float) -> tuple[list[Group], list[Group]]:
    """Return the workers that wait in another place than most, and the others. Most must have stayed at their
    place. Of a worker whose place changes, only its step and its collective are compared: the worker may wait
    for the same collective from several places."""
    places: Counter[tuple[int, str, str]] = Counter()
    for group in waiting:
        looks = group.looks
        if group.there_s < settled_s:  # not all of these workers have stayed
            looks = tuple(look for look in looks if look.there_s >= settled_s)
        places[group.step, group.what, group.place] += len(looks)
    most, count = places.most_common(1)[0]
    workers = sum([len(group.looks) for group in waiting])
    if 2 * count <= workers or count == workers:
        return [], []
    elsewhere = [group for group in waiting if (group.step, group.what) != most[:2]]
    there = [group for group in waiting if (group.step, group.what, group.place) == most]
    near = [group for group in waiting if (group.step, group.what) == most[:2] and group.place != most[2]]
    settled, moving = _parted(near, lambda look: look.there_s >= settled_s)
    return [*elsewhere, *settled], [*there, *moving]
