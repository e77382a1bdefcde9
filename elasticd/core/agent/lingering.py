"""Hold starts back while the kernel takes down processes that have ended.

The end of a worker is known when its exit begins. Its memory, its device and its ports are free only once the
process is gone, a second later if it held 2 GB. A new process waits for that; workers that keep their process
do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elasticd.core.agent.agent_state import AgentState, Decisions
from elasticd.core.reasons import ProcessLingers, StartHeldBack

LATE_S = 10.0  # a warning is due
PATIENCE_S = 60.0  # a process that takes longer may never be gone: a driver hangs, or the process is traced


def watch_the_lingering(do: Decisions) -> None:
    """Warn of a process that is not gone after ``LATE_S``. Wait for it no longer after ``PATIENCE_S``."""
    if not do.state.takedown.lingering and not do.state.takedown.held_back:
        return
    left = dict(do.state.takedown.lingering)
    for pid, one in do.state.takedown.lingering.items():
        late_at, until = one.since + LATE_S, one.since + PATIENCE_S
        if do.now >= until:
            del left[pid]
            do.reasons.append(ProcessLingers(one.slot, pid, PATIENCE_S, 0.0))
            continue
        if do.now >= late_at and not one.late:
            left[pid] = replace(one, late=True)
            do.reasons.append(ProcessLingers(one.slot, pid, LATE_S, PATIENCE_S - LATE_S))
        do.wakes.append(until if left[pid].late else late_at)
    do.takedown(lingering=left, held_back={})


def in_the_way(state: AgentState, slot: int | None = None) -> int | None:
    """Return the pid of a process that must be gone before a worker starts; None if there is none.

    ``slot``: a worker in no round waits only for the process of its own slot. A worker that starts in a round
    waits for all of the node: ranks may change from round to round, and with them devices.
    """
    found = (pid for pid, one in state.takedown.lingering.items() if slot in (None, one.slot))
    return next(found, None)


def hold_back(do: Decisions, slots: Iterable[int], pid: int) -> None:
    do.takedown(held_back={**do.state.takedown.held_back, **dict.fromkeys(slots, pid)})


def tell_of_the_held_back(do: Decisions, before: Iterable[int]) -> None:
    """Say which starts this step holds back. ``before``: the slots that were held back before it."""
    newly = {slot: pid for slot, pid in do.state.takedown.held_back.items() if slot not in before}
    if newly:
        do.reasons.append(StartHeldBack(tuple(sorted(newly)), min(newly.values())))
