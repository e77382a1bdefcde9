"""Collects what workers report through the port, so that tests can ask for it."""

from __future__ import annotations

from elasticd.core.age import Age
from elasticd.core.ports import WorkerBroke, WorkerLinked, WorkerNews, WorkerReturned, WorkerWaiting


class Heard:
    def __init__(self) -> None:
        self.news: list[WorkerNews] = []

    @property
    def linked(self) -> list[int]:
        return [n.slot for n in self.news if isinstance(n, WorkerLinked)]

    @property
    def waits(self) -> list[tuple[int, int, int, Age | None]]:
        return [(n.slot, n.round, n.steps, n.age) for n in self.news if isinstance(n, WorkerWaiting)]

    @property
    def returns(self) -> list[tuple[int, int]]:
        return [(n.slot, n.round) for n in self.news if isinstance(n, WorkerReturned)]

    @property
    def broke(self) -> list[tuple[int, int, bool]]:
        return [(n.slot, n.round, n.fails) for n in self.news if isinstance(n, WorkerBroke)]
