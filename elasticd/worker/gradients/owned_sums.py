"""Sums of the gradients of a sharded model in consistent mode.

Each worker owns a piece of each parameter. In a turn, worker r of w has virtual rank ``turn * w + r``. It
sends each owner the pieces of the gradient of its virtual rank, and adds what arrives to its own sums, in the
order of elasticd.data.summing. So a worker keeps its pieces of up to log2(n) sums for n virtual ranks, and
never a sum of whole gradients. A turn takes as many bytes as a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from elasticd.data.dealing import cut
from elasticd.data.summing import plan_sums
from elasticd.worker.gradients.running_sums import RunningSums, put
from elasticd.worker.sharding.moves import replicas
from elasticd.worker.sharding.parts import Span, Spans


def owned(spans: Sequence[Spans]) -> list[Spans]:
    """Return the piece of each parameter that each rank owns. ``spans``: the part of each parameter that each
    rank has. Ranks that have the same parts share them out, in the order of their ranks."""
    pieces = []
    for rank, group in enumerate(replicas(spans)):
        number = group.index(rank)
        shared = [cut(span.size, len(group))[number] for span in spans[rank]]
        firsts = [span.first for span in spans[rank]]
        pieces.append(tuple(Span(f + s.start, f + s.stop) for f, s in zip(firsts, shared, strict=True)))
    return pieces


def turns_of(virtual_ranks: int, world: int) -> int:
    return -(-virtual_ranks // world)


class OwnedSums:
    """Adds up this worker's pieces of the gradients of some parameters over all virtual ranks.

    ``members``: the parameters' numbers. ``pieces``: the piece of each member that each rank owns. All
    tensors have one dtype and one device.

    A step calls ``hand_in`` and ``add`` for each turn, or ``add_zeros``; then ``gather``.
    """

    def __init__(
        self,
        members: Sequence[int],
        pieces: Sequence[Spans],
        rank: int,
        virtual_ranks: int,
        like: torch.Tensor,
    ) -> None:
        self.members, self._pieces, self._rank, self._size = members, pieces, rank, len(pieces)
        self._virtual_ranks = virtual_ranks
        self._lengths = [sum(piece.size for piece in its) for its in pieces]
        plan = plan_sums((range(v, v + 1) for v in range(virtual_ranks)), virtual_ranks)
        self._running = RunningSums(plan, self._lengths[rank], like)
        self.dtype = like.dtype
        self.sent_elements = sum(self._lengths)
        self.arriving_elements = self._size * self._lengths[rank]

    # ------------------------------------------------------------ turns

    def hand_in(
        self, turn: int, gradients: Sequence[torch.Tensor | None], sent: torch.Tensor, room: torch.Tensor
    ) -> tuple[list[torch.Tensor], dist.Work | None]:
        """Begin to send each owner its pieces of the gradients of this worker's virtual rank.

        Return what will have arrived of each virtual rank of the turn, for ``add``, once the work is done.
        ``gradients``: of the members; None stands for zeros. ``sent`` and ``room``: tensors for the data that
        is sent and that arrives, which are in use until ``add`` has returned.
        """
        present = min(self._size, self._virtual_ranks - turn * self._size)
        sent, room = sent[: self.sent_elements], room[: present * self._lengths[self._rank]]
        takes_part = self._rank < present
        if takes_part:
            self._copy(gradients, sent)
        if self._size == 1:
            return [sent], None
        ours = [self._lengths[self._rank] if rank < present else 0 for rank in range(self._size)]
        theirs = self._lengths if takes_part else [0] * self._size
        work = dist.all_to_all_single(room, sent if takes_part else sent[:0], ours, theirs, async_op=True)
        return list(room.view(present, -1)) if len(room) else [room] * present, work

    def add(self, arrived: Sequence[torch.Tensor]) -> None:
        """Add the gradients of the turn's virtual ranks, in their order."""
        for gradient in arrived:
            self._add(gradient)

    def add_zeros(self, turn: int) -> None:
        """Add zeros for the virtual ranks of a turn in which no virtual rank has samples."""
        for _ in range(min(self._size, self._virtual_ranks - turn * self._size)):
            self._add(None)

    def _copy(self, gradients: Sequence[torch.Tensor | None], into: torch.Tensor) -> None:
        targets = iter(torch.split(into, [piece.size for its in self._pieces for piece in its]))
        there, values = [], []
        for its in self._pieces:
            for gradient, piece in zip(gradients, its, strict=True):
                target = next(targets)
                if gradient is None:
                    target.zero_()
                else:
                    there.append(target)
                    values.append(gradient.reshape(-1)[piece.first : piece.end])
        if there:
            torch._foreach_copy_(there, values)

    def _add(self, gradient: torch.Tensor | None) -> None:
        row, adds = self._running.begin()
        put(gradient, self._running.rows[row], adds)
        self._running.end()

    # ------------------------------------------------------------ the end of a step

    def gather(self, group: Sequence[int]) -> list[torch.Tensor]:
        """Return the sums of this worker's parts of the members, flat. They are valid until the next step.

        ``group``: the ranks that have the same parts. All ranks call the function together.
        """
        own = self._running.rows[0]
        sizes = {rank: [piece.size for piece in self._pieces[rank]] for rank in group}
        if len(group) == 1:
            return list(torch.split(own, sizes[self._rank]))
        theirs = [self._lengths[rank] if rank in group else 0 for rank in range(self._size)]
        ours = [len(own) if rank in group else 0 for rank in range(self._size)]
        room = own.new_empty(sum(theirs))
        dist.all_to_all_single(room, own.repeat(len(group)), theirs, ours)
        ends = [0, *accumulate(self._lengths[rank] for rank in group)]
        parts = [
            torch.split(room[first:end], sizes[rank])
            for rank, (first, end) in zip(group, pairwise(ends), strict=True)
        ]
        return [torch.cat(of_member) for of_member in zip(*parts, strict=True)]
