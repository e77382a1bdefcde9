"""Standbys: worker processes that are in no round. They have left a round, or were started in advance.

Only jobs that recover in place have standbys. A round is formed of waiting workers, so no round waits for a
process to start. Survivors go on at once, and replacements join at a later commit.
"""

from __future__ import annotations

from elasticd.core.agent.agent_state import SIGTERM, AgentState, Decisions, Setback
from elasticd.core.agent.lingering import hold_back, in_the_way
from elasticd.core.agent_messages import StartStandbys, StopWorkers
from elasticd.core.facts import Exit, Phase
from elasticd.core.lifecycle import Life, become
from elasticd.core.reasons import StandbyFailed, StandbysStarted

KEEP_S = 30.0  # how long a worker is kept for the part that it holds, after a round that ended with a failure
RETRY_FIRST_S, RETRY_MOST_S = 0.5, 60.0  # the waits before a process that did not become ready is replaced


def keep_standbys(do: Decisions, stays: bool) -> None:
    """Keep as many waiting processes as the world lacks workers, plus the spares, within this node's slots.

    ``stays``: a leaving node keeps its waiting workers for a while.
    """
    state = do.state
    if not _wanted_at_all(state):
        if state.departure is not None and state.crew is None and not stays:
            dismiss(do)
        return
    wanted, full = _wanted(state)
    have = len(state.standbys)
    if have > wanted and full and not _parts_may_be_needed(do):
        kept = [slot for slot in sorted(state.standbys) if state.standbys[slot] is not Life.STOPPING]
        _dismiss(do, kept[wanted:])
    busy = state.standbys.keys() | state.alive
    chosen: list[int] = []
    later: dict[int, int] = {}
    for slot in state.me.slots:
        if slot in busy or len(chosen) >= wanted - have:
            continue
        setback, pid = state.setbacks.get(slot), in_the_way(state, slot)
        if setback is not None and do.now < setback.retry_at:
            do.wakes.append(setback.retry_at)
        elif pid is not None:
            later[slot] = pid
        else:
            chosen.append(slot)
    for slot in list(later)[: wanted - have - len(chosen)]:
        hold_back(do, [slot], later[slot])
    if chosen:
        do.set(standbys={**do.state.standbys, **dict.fromkeys(chosen, become(None, Life.STARTING))})
        do.actions.append(StartStandbys(tuple(chosen)))
        do.reasons.append(StandbysStarted(tuple(chosen)))


def _parts_may_be_needed(do: Decisions) -> bool:
    """Whether this node's waiting workers hold parts of a state with which another world may have to go on.
    A world that follows a failure may fail before it has formed."""
    state, round = do.state, do.state.round
    held = state.features.sharded and state.waiting & state.ages.keys()
    if not held or round is None or not round.cause.failure or do.now >= (until := round.since + KEEP_S):
        return False
    do.wakes.append(until)
    return True


def _wanted_at_all(state: AgentState) -> bool:
    return (
        state.inplace
        and state.registration.joined
        and state.reaches_etcd
        and state.round is not None
        and not state.round.handover  # after a handover round, all workers wait
        and not state.over
        and state.departure is None
        and state.exiting is None
        and not (state.crew is not None and (state.crew.report.returned or state.crew.finished))
    )


def _wanted(state: AgentState) -> tuple[int, bool]:
    """Return the wanted number of standbys, and whether the world is as large as it may be.

    A worker that ended here counts as missing at once, before its round closes.
    """
    round, limits = state.round, state.limits
    assert round is not None
    acting, wait = 0, False  # ``wait``: workers of this node that are in the round wait
    if round.phase in (Phase.LIVE, Phase.CLOSING):
        acting = round.world_size - round.leaving_workers
        member, crew = round.member(state.me.node, state.me.incarnation), state.crew
        if member is not None and (crew is None or state.released.round >= round.number):
            wait = True  # for this round or the next
            acting -= len(member.slots)
        elif member is not None and crew is not None and crew.round.number == round.number:
            wait = any(life is Life.WAITING for life in crew.workers.values())
            # A finished worker needs no replacement.
            acting -= (
                len(member.slots) - len(crew.alive) if crew.order is not None else len(crew.report.exits)
            )
    # A worker that has just left the round may have the only copy of its part of the state.
    full = round.phase is Phase.LIVE and acting >= limits.max and not wait
    return max(0, limits.max - acting) + state.config.spares, full


def lose_standby(do: Decisions, exit: Exit) -> None:
    """Note the end of a standby. No world was disturbed, so nothing is charged.

    The slot is tried again, after a longer wait each time if its process never becomes ready.
    """
    state, slot = do.state, exit.slot
    setbacks = dict(state.setbacks)
    if exit.fenced or state.standbys[slot] is Life.STARTING:
        times = setbacks[slot].times + 1 if slot in setbacks else 1
        wait_s = min(RETRY_FIRST_S * 2.0 ** min(times - 1, 20), RETRY_MOST_S)
        setbacks[slot] = Setback(times, do.now + wait_s)
        do.reasons.append(StandbyFailed(slot, exit.code, exit.message, do.now + wait_s))
    do.set(
        standbys={s: life for s, life in state.standbys.items() if s != slot},
        setbacks=setbacks,
    )


def dismiss(do: Decisions) -> None:
    """End all standbys."""
    _dismiss(do, sorted(do.state.standbys))


def dismiss_holders(do: Decisions) -> None:
    """End the waiting workers that hold a state in memory: the job goes back to a checkpoint."""
    state = do.state
    _dismiss(do, sorted(state.waiting & state.ages.keys()))


def _dismiss(do: Decisions, slots: list[int]) -> None:
    standbys = do.state.standbys
    slots = [slot for slot in slots if standbys[slot] is not Life.STOPPING]
    if slots:
        do.set(standbys={**standbys, **{slot: become(standbys[slot], Life.STOPPING) for slot in slots}})
        do.actions.append(StopWorkers(SIGTERM, do.state.policy.broken_s, tuple(slots)))
