"""Which slots have a bad GPU, judged from the errors that the GPUs report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
class GpuHealth:
    """``bad``: by slot, a clause about the GPU's own errors. ``uncorrected_before``: by slot, the errors of
    its memory when the agent began."""

    bad: Mapping[int, str] = field(default_factory=dict)
    uncorrected_before: Mapping[int, int] = field(default_factory=dict)


def note_errors(health: GpuHealth, slot: int, errors: GpuErrors) -> GpuHealth:
    """Return the health after one more report. A GPU that was bad once counts as bad until the agent ends."""
    before = health.uncorrected_before
    if errors.uncorrected is not None and slot not in before:
        before = {**before, slot: errors.uncorrected}
    why = _trouble(errors, before.get(slot, 0))
    bad = {**health.bad, slot: why} if why and slot not in health.bad else health.bad
    return replace(health, bad=bad, uncorrected_before=before)


def _trouble(errors: GpuErrors, uncorrected_before: int) -> str:
    told = sorted(set(errors.xids) & _ITS_OWN)
    if told:
        return f"its driver reports XID {', '.join(map(str, told))}"
    if errors.lost:
        return "its driver cannot reach it: it is off the bus, or hangs"
    new = (errors.uncorrected or 0) - uncorrected_before
    return f"{new} of its memory errors could not be corrected" if new > 0 else ""
