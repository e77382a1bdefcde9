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
