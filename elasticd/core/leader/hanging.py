"""Find hanging workers from the stalls that the agents of all nodes report.

In a world of several nodes no agent sees enough: a worker that waits may wait for a worker on any node. So
each agent reports, and the leader judges all reports together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, fields
from itertools import chain
from operator import attrgetter

from elasticd.core.facts import Hang, Member, Phase, Round
from elasticd.core.hang.judging import REPEAT_S, Allowance, Doing, Group, judge_round
from elasticd.core.leader.plan import Plan
from elasticd.core.leader.roll import Mark
from elasticd.core.leader.view import Judged, View
from elasticd.core.persistent_map import PersistentMap
from elasticd.core.ports import Put

LATER_S = 0.01  # added to a limit, so that the limit has surely passed at the wake-up


def name_the_hung(view: View, now: float) -> Plan:
    """Write which workers hang. If a worker hangs for certain and some agents have not reported, ask every
    agent first."""
    round = view.round
    if (
        not view.stalls
        or "hang" not in view.revisions
        or round is None
        or round.phase not in (Phase.LIVE, Phase.CLOSING)
    ):
        return Plan()
    found = view.hang if view.hang is not None and view.hang.round == round.number else None
    again_at = view.hang_at + REPEAT_S
    if found is not None and not found.asks and now < again_at:
        return Plan(wake_at=again_at)
    roll = view.roll
    quiet = (roll[Mark.FINISHED], roll[Mark.LEFT], roll[view.mark_of_lost(now)])
    if not roll[Mark.STILL]:
        return Plan()
    facts = (round, view.stalls, found, *quiet)
    if view.judged.holds(facts, now):
        return Plan(wake_at=view.judged.until, judged=view.judged)
    silent = _any_silent(round, roll[Mark.STILL], quiet)
    if silent and found is not None and now < again_at:  # the silent agents were asked for reports
        return Plan(wake_at=again_at)
    # Without all reports, only stopped workers are certain.
    stalls = view.stalls if silent else view.stalls.to_dict()  # a plain dict is faster for many
    received = [stalls[name] for name in roll[Mark.STOPPED if silent else Mark.STILL]]
    if not received:
        return _undecided(facts, (view.absence_counts_from,), now)
    groups = list(chain.from_iterable([one.groups for one in received]))
    if silent:
        groups = [group for group in groups if group.doing is Doing.STOPPED]
    since = {one.stall.node: now - one.at for one in received}
    allowed = _most_patient([one.stall.allowed for one in received])
    verdict = judge_round(groups, allowed, since)
    if verdict is None:
        return _undecided(facts, (*_limits(groups, allowed, since, now), view.absence_counts_from), now)
    return Plan(writes=(Put("hang", Hang(round.number, verdict, asks=silent), leased=True),))


def _undecided(facts: tuple[object, ...], wakes: Iterable[float], now: float) -> Plan:
    """Judge again at the first of these times that is still to come, or when the facts change."""
    wake_at = min((at for at in wakes if at > now), default=None)
    return Plan(wake_at=wake_at, judged=Judged(facts, wake_at))


def _any_silent(round: Round, still: PersistentMap[Member], quiet: Sequence[PersistentMap[Member]]) -> bool:
    """Whether workers of some member make steps, or its report has not come yet."""
    if len(still) == round.nodes:
        return False
    if len(still) + sum(map(len, quiet)) < round.nodes:
        return True
    return any(name not in still and not any(name in those for those in quiet) for name in round.by_node)


def _most_patient(allowances: Sequence[Allowance]) -> Allowance:
    """Return the greatest of each limit."""
    return Allowance(*(max(map(attrgetter(limit.name), allowances)) for limit in fields(Allowance)))


def _limits(
    groups: Sequence[Group], allowed: Allowance, since: Mapping[str, float], now: float
) -> Iterator[float]:
    """Yield for each limit the time at which the first standstill below the limit reaches it."""
    aged = [(group, since[group.node]) for group in groups]
    longest_s = max([group.longest_s + ago_s for group, ago_s in aged], default=math.inf)
    for limit_s in {*astuple(allowed)}:
        still = [longest_s]
        if longest_s >= limit_s:
            some = [(group, ago_s) for group, ago_s in aged if group.still_s + ago_s < limit_s]
            still = [look.still_s + ago_s for group, ago_s in some for look in group.looks]
        if below := [still_s for still_s in still if still_s < limit_s]:
            yield now + max(limit_s - max(below), LATER_S)
