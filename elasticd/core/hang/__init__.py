"""Hanging workers. ``judging``: how long is too long, and which worker is to blame. ``standstill`` and
``messages``: what the agent sees of workers that stand still. ``watching``: what the agent of a node does.
The leader's part is in ``core.leader.hanging``."""

from elasticd.core.hang.judging import (
    BUSY_ALL_WAKES_PER_S,
    BUSY_SHARE,
    BUSY_WAKES_PER_S,
    FIRST_S,
    FOREVER_S,
    GAPS_ENOUGH,
    REPEAT_S,
    Allowance,
    Doing,
    Look,
    Patience,
    ProcessState,
    Pulse,
    Verdict,
    Why,
    allowance,
    doing,
    judge,
    judge_first,
    judge_leaving,
)

__all__ = [
    "BUSY_ALL_WAKES_PER_S",
    "BUSY_SHARE",
    "BUSY_WAKES_PER_S",
    "FIRST_S",
    "FOREVER_S",
    "GAPS_ENOUGH",
    "REPEAT_S",
    "Allowance",
    "Doing",
    "Look",
    "Patience",
    "ProcessState",
    "Pulse",
    "Verdict",
    "Why",
    "allowance",
    "doing",
    "judge",
    "judge_first",
    "judge_leaving",
]
