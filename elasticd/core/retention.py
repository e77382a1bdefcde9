"""Which checkpoints are kept, and which may be committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elasticd.core.facts import Checkpoint, Saved


@dataclass(frozen=True, slots=True)
class Keep:
    """``last``: so many of the newest. ``every``: beside them, the first of each so many steps; 0: none."""

    last: int = 3
    every: int = 0

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"keep {self.last} checkpoints: the newest is always kept, so at least 1")
        if self.every < 0:
            raise ValueError(f"keep every {self.every} steps: it cannot be negative")


def kept(saved: Sequence[Saved], keep: Keep) -> tuple[Saved, ...]:
    """Those that stay, in the same order: the newest always does. ``saved``: oldest first."""
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
    """A checkpoint may not be committed. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What is true once it is committed.

    ``unsettled``: why some may yet go by what was true before, so that nothing of that may be removed."""

    checkpoint: Checkpoint
    unsettled: str = ""


def commit(known: Checkpoint, new: Saved, keep: Keep) -> Commit:
    """Take it in as the newest. Raises Refused where a later round, or a later step of its own,
    was committed before: what people resume from never goes back."""
    newest = known.newest
    if newest is not None:
        if new.round < newest.round:
            raise CommitRefused(
                f"step {new.step} is of round {new.round}, and round {newest.round} has committed since"
            )
        if new.round == newest.round and new.step <= newest.step:
            raise CommitRefused(f"step {new.step} is not newer than step {newest.step} of the same round")
    return Commit(replace(known, saved=kept((*known.saved, new), keep)))
