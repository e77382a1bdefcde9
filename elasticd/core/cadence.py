"""How often to save: every so many steps, every so many seconds, or as often as it pays."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

BELIEVED_S: Final = 6 * 3600.0  # between failures, before any was seen
LEAST_S: Final = 1.0
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class EverySteps:
    steps: int


@dataclass(frozen=True, slots=True)
class EverySeconds:
    seconds: float


@dataclass(frozen=True, slots=True)
class Auto:
    """As often as makes the work that is lost and the price of saving cost least together."""


Cadence = EverySteps | EverySeconds | Auto


def parse(text: str) -> Cadence:
    """``100`` (steps), ``90s``, ``10m``, ``1h`` or ``auto``. Raises ValueError, with a clause for people."""
    if text == "auto":
        return Auto()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is neither a number of steps (100), a time (90s, 10m, 1h) nor auto")
    if match[2]:
        return EverySeconds(max(LEAST_S, float(match[1]) * _SECONDS[match[2]]))
    if "." in match[1]:
        raise ValueError(f"{text} is no whole number of steps; for a time, say {text}s")
    return EverySteps(int(match[1]))


def between_failures_s(failures: int, over_s: float) -> float:
    """The mean time from one to the next, after so many in so long. What was believed before counts as
    much as one failure does."""
    return (BELIEVED_S + max(0.0, over_s)) / (1 + failures)


def best_interval_s(cost_s: float, between_s: float) -> float:
    """Daly's refinement of Young's sqrt(2 C M), in seconds of training from one save to the next.

    ``cost_s``: by how much a save holds the training up. ``between_s``: mean time between failures."""
    cost_s, between_s = max(cost_s, 1e-6), max(between_s, LEAST_S)
    if cost_s >= 2 * between_s:
        return max(LEAST_S, between_s)
    x = cost_s / (2 * between_s)
    return max(LEAST_S, math.sqrt(2 * cost_s * between_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s)


def interval_s(cadence: EverySeconds | Auto, cost_s: float, durable_s: float, between_s: float) -> float:
    """From one save to the next. ``durable_s``: how long the last one took to be committed, below
    which it is of no use to begin another."""
    if isinstance(cadence, EverySeconds):
        return cadence.seconds
    return max(best_interval_s(cost_s, between_s), durable_s)


@dataclass(frozen=True, slots=True)
class CadenceLook:
    """``save`` now; and with which step to ask again."""

    save: bool
    next: int


def look(step: int, now: float, due: float, step_s: float | None) -> CadenceLook:
    """All ranks must save at the same step, and only one clock can say when: this is asked seldom, the
    more so the longer there is time, and everybody goes by the answer. ``step_s``: how long steps
    take, if that is known."""
    if step_s is None:
        return CadenceLook(False, step + 1)
    left = (due - now) / max(step_s, 1e-9)
    if left < 0.5:
        return CadenceLook(True, step + 1)
    return CadenceLook(False, step + max(1, int(left / 2)))
