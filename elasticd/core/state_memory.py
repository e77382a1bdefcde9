"""The memory that a sharded state takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class StateMemory:
    """What a sharded state takes of the host's memory, in bytes.

    ``own``: one whole state, with the copies that each worker keeps of its own shard. ``copy``: the copies
    that workers keep of others' shards, for each degree of ``redundancy``; no more than ``own``. ``unit``:
    the workers that hold one state together; 1: all workers of the world. ``replicated``: the part of the
    state that each worker has whole, with its copies; 0 until a world has been laid out.
    """

    own: int
    copy: int = 0
    redundancy: int = 0
    unit: int = 1
    replicated: int = 0

    def of_each(self, workers: int) -> int:
        """Return the bytes of each worker of a world."""
        together = self.unit if self.unit > 1 and workers % self.unit == 0 else workers
        replicas = workers // together
        copies = max(0, min(self.redundancy + 1, workers) - replicas)
        return self.replicated - (-(self.own * replicas + copies * self.copy) // workers)
