"""Epochs: their steps, and what a script does after them, such as an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Epoch:
    """One epoch, from ``state.epochs()``.

    Iterate it for its remaining steps, in the form that ``state.steps()`` yields. Work after the steps, until
    the script asks for the next epoch, belongs to the epoch as well. ``number``: counts from 0. ``over``: all
    its steps are made. ``under_way``: the script iterates its steps.
    """

    def __init__(self, number: int, steps: Iterator[Any]) -> None:
        self.number = number
        self.over = self.under_way = self.stops = False
        self._steps = steps
        self._was_left = False

    def __repr__(self) -> str:
        return f"<epoch {self.number}>"

    def __iter__(self) -> Iterator[Any]:
        self.under_way = True
        try:
            yield from self._steps
            self.over = not self._was_left
        except GeneratorExit:  # its steps cannot be gone on with
            self._was_left = True
            raise
        finally:
            self.under_way = False

    def stop(self) -> None:
        """Let no further epoch follow, even after a restart of the job.

        Rank 0 decides for all. If the epoch has steps left, leave its loop as well, on all ranks.
        """
        self.stops = True


class Progress:
    """The progress of a training's epochs. ``ended``: the number of complete epochs, with the work after
    their steps. ``began``: the step after which the present epoch began, if any. ``stopped``: no epoch
    follows."""

    def __init__(self) -> None:
        self.ended = 0
        self.began: int | None = None
        self.stopped = False

    @property
    def marks(self) -> int:
        """The number of commits without a step."""
        return self.ended + self.stopped

    def state_dict(self) -> dict[str, Any]:
        return {"at": (self.ended, self.began, self.stopped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ended, self.began, self.stopped = state["at"]


class Ahead(Generic[T]):
    """An iterator whose next item can be looked at before it is taken."""

    def __init__(self, iterator: Iterator[T]) -> None:
        self._iterator = iterator
        self._looked = False
        self._next: T | None = None

    @property
    def next(self) -> T | None:
        """The next item; None at the end."""
        if not self._looked:
            self._next, self._looked = next(self._iterator, None), True
        return self._next

    def take(self) -> None:
        self._next, self._looked = None, self.next is None
