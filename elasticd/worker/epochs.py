"""Epochs: so many steps each, and what a script does after them, such as an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Epoch:
    """What ``state.epochs()`` yields. Iterate it for its steps that are still to be made, as
    ``state.steps()`` yields them; what the script does after them, until it asks for the next epoch, belongs
    to it, too. ``number``: how many epochs came before.

    ``over``: all its steps are made; ``under_way``: the script goes through them."""

    def __init__(self, number: int, steps: Iterator[Any]) -> None:
        self.number = number
        self.over = self.under_way = self.stops = False
        self._steps = steps

    def __repr__(self) -> str:
        return f"<epoch {self.number}>"

    def __iter__(self) -> Iterator[Any]:
        self.under_way = True
        try:
            yield from self._steps
            self.over = True
        finally:
            self.under_way = False

    def stop(self) -> None:
        """No other epoch comes after this one, also if the job is started again. Rank 0 decides for all. If
        the epoch has steps left, leave its loop as well, on all ranks."""
        self.stops = True


class Progress:
    """How far a training's epochs have come. ``ended``: how many are over, with all that belongs to them;
    ``began``: after which step the present one began, if any has; ``stopped``: none is to come."""

    def __init__(self) -> None:
        self.ended = 0
        self.began: int | None = None
        self.stopped = False

    @property
    def marks(self) -> int:
        """How often this was committed without a step."""
        return self.ended + self.stopped

    def state_dict(self) -> dict[str, Any]:
        return {"at": (self.ended, self.began, self.stopped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ended, self.began, self.stopped = state["at"]


class Ahead(Generic[T]):
    """An iterator of which the next can be looked at before it is taken."""

    def __init__(self, iterator: Iterator[T]) -> None:
        self._iterator = iterator
        self._looked = False
        self._next: T | None = None

    @property
    def next(self) -> T | None:
        """None at the end."""
        if not self._looked:
            self._next, self._looked = next(self._iterator, None), True
        return self._next

    def take(self) -> None:
        self._next, self._looked = None, self.next is None
