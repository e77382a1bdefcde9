"""How often Python looks for reference cycles in an agent."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

THRESHOLDS: Final = (10_000, 5, 20)  # by default (700, 10, 10) in Python 3.11
LONG_S: Final = 0.05  # a look at the facts of a thousand nodes takes about as long
_ALL: Final = 2  # the generation of a look at all objects


def look_rarely() -> None:
    """Have Python look for cycles rarely, and in a large job no more than once at each object that lasts.

    All threads wait while Python looks. The facts of 10,000 nodes are 300,000 objects without a cycle, and a
    look at all of them takes 0.2 s. A new round brings so many new facts that by default Python looks at all
    of them several times, which takes longer than the decision. Connections and errors do make cycles, so
    Python must look at times.

    Looks leave out what the agent has imported, and after a look that took long also the objects that were
    there then. Their memory is freed all the same once nothing refers to them, unless they are in a cycle.
    """
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    if not any(isinstance(one, _LongLooks) for one in gc.callbacks):
        gc.callbacks.append(_LongLooks())


@contextmanager
def not_now() -> Iterator[None]:
    """Keep Python from looking for cycles meanwhile, for a decision that others wait for."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _LongLooks:
    """Python calls this object before and after each look."""

    def __init__(self) -> None:
        self._began_s = 0.0

    def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
        if info["generation"] != _ALL:
            return
        if phase == "start":
            self._began_s = time.perf_counter()
        elif time.perf_counter() - self._began_s > LONG_S:
            gc.freeze()
