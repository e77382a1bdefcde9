"""A global batch of constant size, whatever the world: cut into virtual ranks, which are dealt onto
the workers that are there.

    global batch        0 1 2 3 4 5 6 7 8 9 10 11
    virtual ranks       0     1     2      3
    a world of three    worker 0 | worker 1 | worker 2
                        0        | 1        | 2 and 3
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Portion:
    """What a worker's model sees at once: samples of one virtual rank.

    ``samples``: which of the global batch, counted from its first. ``weight``: what a mean over them
    counts for in the mean over the global batch. ``opens`` and ``closes``: whether it is the first and
    the last of its virtual rank; ``last``: whether it is the last of its worker.
    """

    virtual_rank: int
    samples: range
    weight: float
    opens: bool
    closes: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one step: so many positions of an epoch, from ``first`` on."""

    epoch: int
    first: int
    samples: int

    @property
    def end(self) -> int:
        return self.first + self.samples


def next_batch(epoch: int, position: int, *, length: int, size: int, drop_last: bool = False) -> Batch:
    """What comes after ``position`` samples of an epoch of that length: ``size`` more, or what is left of
    it, which ``drop_last`` leaves out. Raises ValueError where an epoch has no batch at all."""
    for begin in ((epoch, position), (epoch + 1, 0)):
        samples = min(size, length - begin[1])
        if samples == size or (samples > 0 and not drop_last):
            return Batch(*begin, samples)
    raise ValueError(
        f"an epoch of {length} samples has no whole batch of {size}, and drop_last leaves out what is left"
    )


def cut(count: int, parts: int) -> tuple[range, ...]:
    """``range(count)`` in so many neighbouring pieces whose sizes differ by at most one."""
    return tuple(range(i * count // parts, (i + 1) * count // parts) for i in range(parts))


def deal(virtual_ranks: int, world: int) -> tuple[range, ...]:
    """The virtual ranks of each worker, by rank. A world larger than that leaves some with none."""
    return cut(virtual_ranks, world)


def parts_of(
    rank: int, world: int, *, samples: int, virtual_ranks: int, accumulate: int = 1
) -> list[Portion]:
    """What the worker of that rank computes of a global batch of ``samples``, in order; nothing where
    the batch is too short to reach all. Each virtual rank's samples come in ``accumulate`` pieces.

    How samples are put together depends on the batch alone, not on the world.
    """
    batch = cut(samples, virtual_ranks)
    cuts = []
    for v in deal(virtual_ranks, world)[rank]:
        first = batch[v].start
        pieces = [range(first + p.start, first + p.stop) for p in cut(len(batch[v]), accumulate) if p]
        cuts += [(v, piece, piece is pieces[0], piece is pieces[-1]) for piece in pieces]
    return [
        Portion(v, piece, len(piece) / samples, opens, closes, last=i == len(cuts) - 1)
        for i, (v, piece, opens, closes) in enumerate(cuts)
    ]
