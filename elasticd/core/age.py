"""How old what a worker remembers is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Age:
    """How far a training's state has come: the last committed step, and the round in which all its
    workers agreed on what came before that. ``agreed`` is the higher authority: a worker that was
    left behind may have committed a step that the others have since made anew."""

    agreed: int
    step: int

    def is_behind(self, round: int, step: int) -> bool:
        """Whether what was kept in that round, after that step, is of a later world that came further. By
        round alone it could not be told: those of checkpoints run ahead where a folder outlives jobs."""
        return round > self.agreed and step > self.step
