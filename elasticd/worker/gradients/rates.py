"""Learning rates for a global batch whose size follows the number of workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

Rule = str | Callable[[float], float]

RULES: dict[str, Callable[[float], float]] = {
    "linear": lambda growth: growth,
    "sqrt": math.sqrt,
    "none": lambda growth: 1.0,
}


def factor(rule: Rule, growth: float) -> float:
    """Return the factor of the learning rates for a batch that is ``growth`` times as large. Raises
    ValueError."""
    found = RULES[rule](growth) if isinstance(rule, str) else rule(growth)
    try:
        times = float(found)
    except (TypeError, ValueError):
        times = math.nan
    if not (math.isfinite(times) and times > 0):
        raise ValueError(
            f"the rule for the learning rate gave {found!r} for a batch {growth:g} times as large: give a "
            "number above 0"
        )
    return times


def check(rule: Rule | None) -> Rule:
    """Return the rule if it is valid. Raises TypeError and ValueError."""
    if rule is None:
        raise TypeError(
            "with worker_batch the batch grows with the world: choose how the learning rate follows, with "
            "rate='linear', 'sqrt', 'none' or a function of the batch's growth (2.0 for a doubled batch)"
        )
    if not callable(rule) and rule not in RULES:
        raise ValueError(
            f"{rule!r} is no rule for the learning rate: there are {', '.join(RULES)}, or a function of "
            "the batch's growth (2.0 for a doubled batch)"
        )
    return rule


class ScaledRates:
    """Multiply the optimizers' learning rates by ``times``, but only during their steps: schedulers and
    scripts see the original rates."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.times = 1.0
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)
        self._asked: dict[Optimizer, list[Any]] = {}

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        # The second: a base class's step runs within a subclass's step.
        if self.times == 1.0 or optimizer in self._asked:
            return
        self._asked[optimizer] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.times

    def give_back(self) -> None:
        """Restore the rates of optimizers whose step was interrupted by an error."""
        for optimizer in [*self._asked]:
            self._after(optimizer)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._asked.pop(optimizer, ()), strict=False):
            group["lr"] = rate
