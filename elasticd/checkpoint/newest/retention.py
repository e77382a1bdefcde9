"""Choose which checkpoints are kept, and which may be committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elasticd.core.checkpoint_names import folder_of
from elasticd.core.facts import Checkpoint, Saved


@dataclass(frozen=True, slots=True)
class Keep:
    """The rule by which checkpoints are kept: the ``last`` newest ones, and the first one in each ``every``
    steps (0: none)."""

    last: int = 3
    every: int = 0

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"cannot keep {self.last} checkpoints: at least 1, the newest, is always kept")
        if self.every < 0:
            raise ValueError(f"cannot keep a checkpoint every {self.every} steps: give 0 or more")


def kept(saved: Sequence[Saved], keep: Keep) -> tuple[Saved, ...]:
    """Return the checkpoints to keep, in the same order; the newest is always kept. ``saved``: oldest
    first."""
    stay = {s.name for s in saved[-keep.last :]}
    if keep.every:
        marks: set[int] = set()
        for s in saved:
            mark = s.step // keep.every
            if mark not in marks:
                marks.add(mark)
                stay.add(s.name)
    return tuple(s for s in saved if s.name in stay)


class CommitRefused(ValueError):
    """The checkpoint may not be committed. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The result of a commit. ``unsettled``: why some readers may still use an older checkpoint, so that none
    may be removed; empty otherwise."""

    checkpoint: Checkpoint
    unsettled: str = ""


def commit(known: Checkpoint, new: Saved, keep: Keep) -> Commit:
    """Return the checkpoints with ``new`` as the newest. Raises CommitRefused if a later round, or a later
    step of the same round, was committed before: the newest checkpoint never goes back. The workers of a
    world may save a step again, after what is no step, such as an evaluation."""
    newest = known.newest
    if newest is not None:
        if new.round < newest.round:
            raise CommitRefused(
                f"step {new.step} is of round {new.round}, and round {newest.round} has committed since"
            )
        this, last = folder_of(new.name), folder_of(newest.name)
        again = this.token == last.token and this.age > last.age
        if new.round == newest.round and new.step <= newest.step and not again:
            raise CommitRefused(f"step {new.step} is not newer than step {newest.step} of the same round")
    return Commit(replace(known, saved=kept((*known.saved, new), keep)))
