"""When gloo connects the workers of a group to each other.

By default gloo connects each worker to each other when a group is made. That takes as many open files in each
worker as the group has workers, and a world of 512 workers takes longer to form than to train a step. In a
large group gloo connects two workers when they first talk to each other, and a collective has a worker talk
to few others. In a small group nothing is won by that, and the first step of a world would be slower.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from elasticd.checkpoint.client import levels

LATE = "TORCH_GLOO_LAZY_INIT"  # torch reads this variable each time that a group is made
_YES = {"1", "t", "true", "y", "yes"}  # as torch reads the variable


def is_late(size: int) -> bool:
    """Whether two workers of a group of this size are connected when they first talk to each other, as the
    user asked, or else as the group is large."""
    asked = os.environ.get(LATE)
    return size > levels.FLAT_MAX if asked is None else asked.lower() in _YES


@contextlib.contextmanager
def as_suits(size: int) -> Iterator[None]:
    """Have groups that are made in the block, of this size, connect as ``is_late`` says."""
    if LATE in os.environ or not is_late(size):
        yield
        return
    os.environ[LATE] = "1"
    try:
        yield
    finally:
        del os.environ[LATE]
