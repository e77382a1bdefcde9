"""Which slots have a bad or a strained GPU, judged from what the GPUs report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

STRAIN_S = 30.0  # how long a strain must last, or be absent, before it counts
MEMORY_FULL = 0.98  # the share of a GPU's memory in use from which the GPU is short of memory
# XID errors that concern the GPU, its memory or its links, after NVIDIA's catalogue. Others (13, 31, 43, 45)
# concern the program that ran on the GPU.
_ITS_OWN = frozenset((48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 109, 119, 120, 136, 140, 143, 145, 155, 156))


@dataclass(frozen=True, slots=True)
class GpuErrors:
    """What one GPU reports. ``xids``: XID errors since the last report. ``uncorrected``: memory errors that
    could not be corrected, since the driver was loaded; None if the GPU does not count them. ``lost``: the
    driver cannot reach the GPU any more."""

    xids: tuple[int, ...] = ()
    uncorrected: int | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """What strains one GPU. ``hot``: heat holds its clock down. ``slowed``: its hardware holds its clock
    down. ``memory``: the share of its memory in use; None if unknown."""

    hot: bool = False
    slowed: bool = False
    memory: float | None = None


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """``bad``: by slot, a clause about the GPU's own errors. ``strained``: by slot, a clause about what
    strains the GPU now. ``lately``: by slot, the strain in the last report (empty: none), and since when.
    ``uncorrected_before``: by slot, the errors of its memory when the agent began."""

    bad: Mapping[int, str] = field(default_factory=dict)
    strained: Mapping[int, str] = field(default_factory=dict)
    lately: Mapping[int, tuple[str, float]] = field(default_factory=dict)
    uncorrected_before: Mapping[int, int] = field(default_factory=dict)


def note_errors(health: GpuHealth, slot: int, errors: GpuErrors) -> GpuHealth:
    """Return the health after one more report. A GPU that was bad once counts as bad until the agent ends."""
    before = health.uncorrected_before
    if errors.uncorrected is not None and slot not in before:
        before = {**before, slot: errors.uncorrected}
    why = _trouble(errors, before.get(slot, 0))
    bad = {**health.bad, slot: why} if why and slot not in health.bad else health.bad
    return replace(health, bad=bad, uncorrected_before=before)


def note_load(health: GpuHealth, slot: int, load: GpuLoad, now: float) -> GpuHealth:
    """Return the health after one more report. A strain that comes and goes leaves it as it is."""
    why = _strain(load)
    before, since = health.lately.get(slot, ("", now))
    since = since if why == before else now
    health = replace(health, lately={**health.lately, slot: (why, since)})
    if now - since < STRAIN_S or health.strained.get(slot, "") == why:
        return health
    others = {number: clause for number, clause in health.strained.items() if number != slot}
    return replace(health, strained={**others, slot: why} if why else others)


def _strain(load: GpuLoad) -> str:
    if load.hot:
        return "it is hot, which holds its clock down"
    if load.slowed:
        return "its hardware holds its clock down"
    return "its memory is nearly full" if (load.memory or 0.0) >= MEMORY_FULL else ""


def _trouble(errors: GpuErrors, uncorrected_before: int) -> str:
    told = sorted(set(errors.xids) & _ITS_OWN)
    if told:
        return f"its driver reports XID {', '.join(map(str, told))}"
    if errors.lost:
        return "its driver cannot reach it: it is off the bus, or hangs"
    new = (errors.uncorrected or 0) - uncorrected_before
    return f"{new} of its memory errors could not be corrected" if new > 0 else ""
