"""How often Python looks for reference cycles in an agent."""

from __future__ import annotations

import gc
from typing import Final

THRESHOLDS: Final = (10_000, 5, 20)  # by default (700, 10, 10) in Python 3.11


def look_rarely() -> None:
    """Have Python look for cycles rarely.

    All threads wait while Python looks. The facts of 10,000 nodes are 300,000 objects without a cycle, and a
    look at all of them takes 0.2 s. A new round brings so many new facts that by default Python looks at all
    of them several times, which takes longer than the decision. Connections and errors do make cycles, so
    Python must look at times.
    """
    gc.set_threshold(*THRESHOLDS)
