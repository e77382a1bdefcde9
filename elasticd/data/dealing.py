"""Divide a global batch of constant size among the workers of any world.

The batch is cut into virtual ranks, and the virtual ranks are dealt to the workers.

    global batch        0 1 2 3 4 5 6 7 8 9 10 11
    virtual ranks       0     1     2      3
    a world of three    worker 0 | worker 1 | worker 2
                        0        | 1        | 2 and 3
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Portion:
    """The samples of one virtual rank that a worker's model sees at once.

    ``samples``: their indices in the global batch. ``weight``: the weight of their mean in the mean over the
    global batch. ``opens`` and ``closes``: whether this is the first and the last portion of its virtual
    rank. ``last``: whether this is the worker's last portion. ``counts``: whether the portion is a part of
    the batch; if not, the worker repeats samples with the weight 0, because other workers have more portions.
    """

    virtual_rank: int
    samples: range
    weight: float
    opens: bool
    closes: bool
    last: bool
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one step: ``samples`` positions of an epoch, from ``first``."""

    epoch: int
    first: int
    samples: int

    @property
    def end(self) -> int:
        return self.first + self.samples


def next_batch(epoch: int, position: int, *, length: int, size: int, drop_last: bool = False) -> Batch:
    """Return the batch after ``position`` samples of an epoch.

    It has ``size`` samples, or the rest of the epoch, which ``drop_last`` leaves out. Raises ValueError if an
    epoch has no batch at all.
    """
    for begin in ((epoch, position), (epoch + 1, 0)):
        samples = min(size, length - begin[1])
        if samples == size or (samples > 0 and not drop_last):
            return Batch(*begin, samples)
    raise ValueError(
        f"an epoch of {length} samples has no whole batch of {size}: give a smaller batch, or no drop_last"
    )


def cut(count: int, parts: int) -> tuple[range, ...]:
    """Return ``range(count)`` cut into contiguous pieces whose sizes differ by at most one."""
    return tuple(range(i * count // parts, (i + 1) * count // parts) for i in range(parts))


def deal(virtual_ranks: int, world: int) -> tuple[range, ...]:
    """Return the virtual ranks of each worker, by rank. In a larger world some workers have none."""
    return cut(virtual_ranks, world)


def parts_of(
    rank: int, world: int, *, samples: int, virtual_ranks: int, accumulate: int = 1
) -> list[Portion]:
    """Return a worker's portions of a global batch of ``samples``, in order.

    The list is empty where the batch is too short for all workers. Each virtual rank's samples come in
    ``accumulate`` pieces. The portions depend on the batch alone, not on the world.
    """
    batch = cut(samples, virtual_ranks)
    cuts = []
    for v in deal(virtual_ranks, world)[rank]:
        pieces = _pieces(batch[v], accumulate)
        cuts += [(v, piece, piece is pieces[0], piece is pieces[-1]) for piece in pieces]
    return [
        Portion(v, piece, len(piece) / samples, opens, closes, last=i == len(cuts) - 1)
        for i, (v, piece, opens, closes) in enumerate(cuts)
    ]


def parts_in_turns(
    rank: int, world: int, *, samples: int, virtual_ranks: int, accumulate: int = 1
) -> list[Portion]:
    """Return a worker's portions of a global batch for a model whose forward pass is a collective: all
    workers have equally many.

    In turn t, worker r has virtual rank ``t * world + r``. So the workers have neighbouring virtual ranks at
    a time. A worker that has fewer portions in a turn begins the turn with portions that do not count. Their
    virtual rank may not exist.
    """
    batch = cut(samples, virtual_ranks)
    repeated = _pieces(batch[-1], accumulate)[0]  # the last virtual rank always has samples
    found: list[Portion] = []
    for first in range(0, virtual_ranks, world):
        pieces = [_pieces(its, accumulate) for its in batch[first : first + world]]
        mine = pieces[rank] if rank < len(pieces) else []
        longest = max(map(len, pieces))
        missing = longest - len(mine)
        for place in range(longest):
            counts = place >= missing
            piece = mine[place - missing] if counts else repeated
            opens, closes = place == (missing if mine else 0), place == longest - 1
            weight = len(piece) / samples if counts else 0.0
            found.append(Portion(first + rank, piece, weight, opens, closes, last=False, counts=counts))
    return [*found[:-1], replace(found[-1], last=True)]


def _pieces(samples: range, accumulate: int) -> list[range]:
    """Return the pieces of a virtual rank's samples, without empty ones."""
    first = samples.start
    return [range(first + p.start, first + p.stop) for p in cut(len(samples), accumulate) if p]


@lru_cache(maxsize=16)  # all batches have the same size, except the last of an epoch
def counts_of(world: int, *, samples: int, virtual_ranks: int, accumulate: int = 1) -> tuple[int, ...]:
    """Return the number of portions that each worker of a world has of a batch, by rank."""
    cut = {"samples": samples, "virtual_ranks": virtual_ranks, "accumulate": accumulate}
    return tuple(len(parts_of(rank, world, **cut)) for rank in range(world))
