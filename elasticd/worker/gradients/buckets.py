"""Buckets, which hold several gradients in one tensor, and their exchange in consistent mode.

Each worker owns a slice of each bucket. The owner receives the slice of all workers, adds the slices up in
the order of elasticd.data.summing, and sends the sum to all. This takes as many bytes as an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from elasticd.data.summing import plan_sums
from elasticd.worker.gradients.running_sums import RunningSums, put

FIRST_BYTES = 1 << 20  # small, so that sending begins early, as in DistributedDataParallel
BUCKET_BYTES = 25 << 20
_ALIGNED = 16  # the length of a slice is a multiple of this number of elements

Gradients = Sequence[torch.Tensor | None]


class Exchange:
    """The subtrees of sums that workers exchange (see elasticd.data.summing). ``leaves``: the plan by which
    this worker adds up its virtual ranks. ``all``: the plan by which the owner of a slice adds up the
    subtrees of all workers. ``counts``: the number of each worker's subtrees, by rank."""

    def __init__(self, blocks: Sequence[range], rank: int, virtual_ranks: int) -> None:
        plans = [plan_sums((range(v, v + 1) for v in block), virtual_ranks) for block in blocks]
        self.rank, self.size = rank, len(blocks)
        self.leaves = plans[rank]
        self.counts = [len(plan.left) for plan in plans]
        self.all = plan_sums([subtree for plan in plans for subtree in plan.left], virtual_ranks)

    @property
    def arriving(self) -> int:
        """The number of other workers' subtrees."""
        return sum(self.counts) - self.counts[self.rank]


class Bucket:
    """Adds up the gradients of some parameters over all virtual ranks. ``members``: the parameters' numbers.
    ``examples``: one tensor for each parameter, with its shape; all have one dtype and one device.

    A step calls ``add`` for each virtual rank, then ``hand_in``, ``add_up`` and ``gather``.
    """

    def __init__(self, members: Sequence[int], examples: Sequence[torch.Tensor], exchange: Exchange) -> None:
        self.members = members
        self._exchange = exchange
        elements = sum(t.numel() for t in examples)
        self._slice = -(-elements // (exchange.size * _ALIGNED)) * _ALIGNED
        self._running = RunningSums(exchange.leaves, exchange.size * self._slice, examples[0])
        self._rows = self._running.rows  # after ``gather``, the first row is the total
        self._views = [cut(row, examples) for row in self._rows]
        self.arrival_elements = exchange.arriving * self._slice
        self._arrived = self._rows[:0]
        self._works: list[dist.Work] = []

    @property
    def sums(self) -> list[torch.Tensor]:
        """The sums, one for each of ``members``. They are valid until the next step."""
        return self._views[0]

    def add(self, gradients: Gradients) -> None:
        """Add the gradients of the next virtual rank. None stands for zeros."""
        row, adds = self._running.begin()
        views = self._views[row]
        whole = [g for g in gradients if g is not None]
        if len(whole) == len(views):
            (torch._foreach_add_ if adds else torch._foreach_copy_)(views, whole)
        else:
            for view, gradient in zip(views, gradients, strict=True):
                put(gradient, view, adds)
        self._running.end()

    def hand_in(self, room: torch.Tensor) -> None:
        """Begin to send each owner its slice of this worker's sums. ``room``: a tensor for the arriving data,
        with at least ``arrival_elements`` elements. It is in use until ``add_up`` has returned."""
        exchange = self._exchange
        self._arrived = room[: self.arrival_elements].view(exchange.arriving, self._slice)
        arriving = iter(self._arrived)
        receives = [(next(arriving), peer) for peer in self._peers() for _ in range(exchange.counts[peer])]
        mine = self._rows[: exchange.counts[exchange.rank]]
        sends = [(row, peer) for peer in self._peers() for row in mine[:, self._of(peer)]]
        self._works = _start(sends, receives)

    def add_up(self) -> None:
        """Wait for the other workers' sums of this worker's slice, add them up, and begin to send the total
        to all."""
        self._finish()
        exchange = self._exchange
        own = self._rows[:, self._of(exchange.rank)]
        arrived = iter(self._arrived)
        handed_in = (
            own[row] if rank == exchange.rank else next(arrived)
            for rank, count in enumerate(exchange.counts)
            for row in range(count)
        )
        stack: list[torch.Tensor] = []
        for subtree, halves in zip(handed_in, exchange.all.sums, strict=True):
            stack.append(subtree)
            for _ in range(halves):
                upper = stack.pop()
                stack[-1] += upper
        [total] = stack
        if total.data_ptr() != own[0].data_ptr():
            own[0].copy_(total)
        sends = [(own[0], peer) for peer in self._peers()]
        self._works = _start(sends, [(self._rows[0, self._of(peer)], peer) for peer in self._peers()])

    def gather(self) -> None:
        """Wait for the totals of all slices."""
        self._finish()

    def _finish(self) -> None:
        for work in self._works:
            work.wait()

    def _peers(self) -> Iterator[int]:
        return (peer for peer in range(self._exchange.size) if peer != self._exchange.rank)

    def _of(self, owner: int) -> slice:
        return slice(owner * self._slice, (owner + 1) * self._slice)


def fill(tensors: Sequence[torch.Tensor], order: Iterable[int]) -> list[list[int]]:
    """Return the indices of the tensors of each bucket. All tensors of a bucket have one dtype and one
    device. Tensors are put into buckets in ``order``, and the buckets are sorted by their last tensors."""
    open_: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    full: list[list[int]] = []
    places = {number: place for place, number in enumerate(order)}
    for number in places:
        kind = tensors[number].dtype, tensors[number].device
        members = open_.setdefault(kind, [])
        members.append(number)
        sizes[kind] = sizes.get(kind, 0) + tensors[number].nbytes
        if sizes[kind] >= (BUCKET_BYTES if full else FIRST_BYTES):
            full.append(open_.pop(kind))
            sizes[kind] = 0
    return sorted([*full, *open_.values()], key=lambda members: places[members[-1]])


def cut(row: torch.Tensor, examples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cut a row into views, one for each example, with the strides of the tensor's gradient."""
    ends = [0]
    for like in examples:
        ends.append(ends[-1] + like.numel())
    return [
        row[start:end].as_strided(like.shape, torch.empty_like(like, device="meta").stride())
        for like, (start, end) in zip(examples, pairwise(ends), strict=True)
    ]


_Way = tuple[torch.Tensor, int]  # a tensor, and the rank to send it to or receive it from


def _start(sends: Sequence[_Way], receives: Sequence[_Way]) -> list[dist.Work]:
    if not sends and not receives:
        return []
    if (sends or receives)[0][0].is_cpu:
        group = dist.group.WORLD
        assert group is not None
        return [
            *(group.recv([tensor], peer, 0) for tensor, peer in receives),
            *(group.send([tensor], peer, 0) for tensor, peer in sends),
        ]
    together = [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in receives]
    together += [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in sends]
    return list(dist.batch_isend_irecv(together))  # in one batch: NCCL would wait for each call in turn
