"""Measure this node's workers for the comparison with their peers: their own times for a step, in periods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elasticd.core.agent.agent_state import AgentState
from elasticd.core.facts import BadSlot, Member, Paces, SlotPace, Stragglers
from elasticd.core.gpu_health import GpuHealth
from elasticd.core.page_layout import PageContents
from elasticd.core.straggler import PERIODS, own_times

PERIOD_S_MIN = 0.5
FIRST_STEPS = 5  # a worker's first steps of a round are not measured: they connect, allocate and compile


@dataclass(frozen=True, slots=True)
class Measuring:
    """The measurement of this node's workers. ``due``: when the present period may end. ``number``: the
    number of the last report. ``first``: the workers' pages when they entered ``round``. ``before``: their
    pages when the period began; empty until each worker has made its first steps. ``throttled_s``: the delay
    by a quota before the period. ``own``: the workers' own times in the last period, by slot. ``ill``: the
    GPUs of the last report."""

    due: float = 0.0
    number: int = 0
    round: int = 0
    first: Mapping[int, PageContents] = field(default_factory=dict)
    before: Mapping[int, PageContents] = field(default_factory=dict)
    throttled_s: float = 0.0
    own: Mapping[int, float] = field(default_factory=dict)
    ill: tuple[BadSlot, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotLag:
    """How a worker compares with its peers. ``ratio``: its own time for a step over the usual one, if
    known."""

    ratio: float | None
    straggling: bool


def measure(
    known: Measuring,
    state: AgentState,
    pages: Mapping[int, PageContents],
    throttled_s: float,
    gpus: GpuHealth,
    now: float,
) -> tuple[Measuring, Paces | None]:
    """Return the measurement after the workers' pages were read, and the report for the leader, if there is
    one.

    A period ends once each worker has measured a step in it: a step may take longer than the planned period.
    ``throttled_s``: for how long a quota has delayed this node's processes so far.
    """
    crew = state.crew
    window_s = state.policy.straggler_window_s
    known = replace(known, due=now + max(PERIOD_S_MIN, window_s / PERIODS))
    if crew is None or not crew.alive or crew.order or crew.fenced:
        return Measuring(known.due, known.number, crew.round.number if crew is not None else 0), None
    if crew.round.number != known.round:
        known = Measuring(known.due, known.number, crew.round.number)
    here = {slot: page for slot, page in pages.items() if slot in crew.alive}
    known, fresh = _period(known, here, throttled_s)
    own = sorted(known.own.items()) if fresh else ()
    paces = tuple(SlotPace(s, crew.member.rank_of(s), own_s) for s, own_s in own)
    ill = _ill(gpus, crew.member)
    if not paces and not ill and not known.ill:
        return known, None
    known = replace(known, number=known.number + 1, ill=ill)
    return known, Paces(state.me.node, state.me.incarnation, known.round, known.number, paces, ill)


def _ill(gpus: GpuHealth, member: Member) -> tuple[BadSlot, ...]:
    """Return the slots of the round whose GPU is bad, or strained."""
    strained = {slot: why for slot, why in gpus.strained.items() if slot not in gpus.bad}
    return tuple(
        BadSlot(slot, member.rank_of(slot), why, is_strained)
        for whys, is_strained in ((gpus.bad, False), (strained, True))
        for slot, why in whys.items()
        if slot in member.slots
    )


def lags(known: Measuring, found: Stragglers | None, node: str) -> dict[int, SlotLag]:
    """Return how each worker of this node compares with its peers, by slot. ``found``: the leader's last
    findings."""
    if found is None or found.round != known.round:
        return {slot: SlotLag(None, False) for slot in known.own}
    slow = {one.slot for one in found.slow if one.node == node and not one.why}
    return {
        slot: SlotLag(own_s / found.usual_s if found.usual_s else None, slot in slow)
        for slot, own_s in known.own.items()
    }


def _period(
    known: Measuring, pages: Mapping[int, PageContents], throttled_s: float
) -> tuple[Measuring, bool]:
    """Return the measurement after these pages were read, and whether they end a period."""
    if pages.keys() != known.first.keys():
        return replace(known, first=pages, before={}), False
    if not known.before:
        begun = all(pages[s].steps >= known.first[s].steps + FIRST_STEPS for s in pages)
        return (replace(known, before=pages, throttled_s=throttled_s) if begun else known), False
    if any(pages[slot].measured <= known.before[slot].measured for slot in pages):
        return known, False
    own = own_times(known.before, pages, throttled_s - known.throttled_s)
    return replace(known, own=own, before=pages, throttled_s=throttled_s), True
