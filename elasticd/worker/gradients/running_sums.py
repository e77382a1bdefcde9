"""The sums of gradients so far, added up by a plan of elasticd.data.summing."""

from __future__ import annotations

import torch

from elasticd.data.summing import SumPlan


class RunningSums:
    """The sums of one worker: ``rows`` has one row for each subtree, and after the last subtree of a plan for
    all virtual ranks, the first row is the total.

    For each subtree call ``begin``, write into the row, and call ``end``. After the last one the sums begin
    anew.
    """

    def __init__(self, plan: SumPlan, length: int, like: torch.Tensor) -> None:
        self.rows = like.new_zeros((max(1, plan.height), length))
        self._plan = plan
        self._height = self._leaf = 0

    def begin(self) -> tuple[int, bool]:
        """Return the number of the row for the next subtree, and whether the subtree is added to the row:
        otherwise it replaces what the row has."""
        if self._leaf == len(self._plan.sums):
            self._leaf = self._height = 0
        adds = self._plan.sums[self._leaf] > 0
        self._height += not adds
        return self._height - 1, adds

    def end(self) -> None:
        """Add up the rows that are complete now."""
        for _ in range(self._plan.sums[self._leaf] - 1):
            self._height -= 1
            self.rows[self._height - 1] += self.rows[self._height]
        self._leaf += 1


def put(gradient: torch.Tensor | None, into: torch.Tensor, adds: bool) -> None:
    """Add the gradient to the tensor, or replace the tensor's values. None stands for zeros."""
    if adds:
        into.add_(0 if gradient is None else gradient)  # a sum with 0 turns -0.0 into 0.0
    elif gradient is None:
        into.zero_()
    else:
        into.copy_(gradient)
