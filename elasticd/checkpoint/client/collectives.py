"""Collectives that the ranks of a world use for checkpoints. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist


class RankGroup:
    """The ranks of the present world, or this process alone.

    ``in_step``: no rank uses other collectives at the same time, so this class uses the world's own group,
    which is aborted when the world ends.
    """

    def __init__(self, *, in_step: bool = False) -> None:
        self.world = dist.group.WORLD if dist.is_initialized() else None
        self.rank = dist.get_rank() if self.world is not None else 0
        self.size = dist.get_world_size() if self.world is not None else 1
        # A separate group on the CPU: its messages must not mix with the training's.
        own = None if self.size == 1 or in_step else dist.new_group(backend="gloo")
        self.group = self.world if self.size > 1 and in_step else own

    @property
    def over(self) -> bool:
        """Whether the world has changed since this object was made."""
        return self.world is not (dist.group.WORLD if dist.is_initialized() else None)

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return the minimum of each value over all ranks."""
        return self.begin_minimum(values)()

    def begin_minimum(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begin ``minimum``. Return a function that waits for the result: the caller can do other work
        meanwhile."""
        if self.group is None:
            return lambda: list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        work = dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self.group, async_op=True)

        def result() -> list[int]:
            if work is not None:  # torch returns None if this rank is not in the group
                work.wait()
            return [int(v) for v in tensor]

        return result

    def gather(self, mine: bytes) -> list[bytes]:
        """Return the bytes of each rank, by rank."""
        if self.group is None:
            return [mine]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self.group)
        most = max(int(s) for s in sizes)
        padded = torch.frombuffer(bytearray(mine.ljust(max(most, 1), b"\0")), dtype=torch.uint8)
        gathered = [torch.empty(max(most, 1), dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(gathered, padded, group=self.group)
        return [s.numpy().tobytes()[: int(n)] for s, n in zip(gathered, sizes, strict=True)]

    def from_first(self, mine: bytes) -> bytes:
        """Return the bytes of rank 0."""
        if self.group is None:
            return mine
        size = torch.tensor([len(mine)])
        dist.broadcast(size, 0, group=self.group)
        if not size:
            return b""
        content = _tensor_of(mine) if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, 0, group=self.group)
        return content.numpy().tobytes()

    def collect(self, mine: bytes) -> list[bytes]:
        """Return the bytes of each rank, by rank, to rank 0, and an empty list to other ranks. Equal bytes
        are one object, and travel once; if all ranks have the same, none travel."""
        digest = blake2b(mine, digest_size=14).digest()
        own = [int.from_bytes(digest[:7]), int.from_bytes(digest[7:])]
        least = self.minimum([*own, *(-n for n in own)])
        if self.group is None or least[:2] == [-n for n in least[2:]]:
            return [mine] * self.size if self.rank == 0 else []
        each = [torch.empty(3, dtype=torch.int64) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(torch.tensor([*own, len(mine)]), each, dst=0, group=self.group)
        kinds = [(int(a), int(b), int(n)) for a, b, n in each or ()]
        first = {kind: rank for rank, kind in reversed([*enumerate(kinds)])}
        # Rank 0 asks the first rank of each kind for its bytes.
        asked = self._scatter([kind[2] if first[kind] == rank else 0 for rank, kind in enumerate(kinds)])
        if self.rank:
            if asked:
                dist.send(_tensor_of(mine), 0, group=self.group)
            return []
        content = {kinds[0]: mine}
        content |= {kind: self._receive(kind[2], rank) for kind, rank in first.items() if rank}
        return [content[kind] for kind in kinds]

    def hand_out(self, each: Sequence[bytes]) -> bytes:
        """Return this rank's item of ``each``, which rank 0 has, by rank. Other ranks give nothing."""
        if self.group is None:
            return each[0]
        size = self._scatter([*map(len, each)])
        if self.rank:
            return self._receive(size, 0)
        for rank, item in enumerate(each):
            if item and rank:
                dist.send(_tensor_of(item), rank, group=self.group)
        return each[0]

    def _scatter(self, each: Sequence[int]) -> int:
        """Return this rank's number of ``each``, which rank 0 has, by rank."""
        mine = torch.zeros(1, dtype=torch.int64)
        numbers = [torch.tensor([number]) for number in each] if self.rank == 0 else None
        dist.scatter(mine, numbers, src=0, group=self.group)
        return int(mine)

    def _receive(self, size: int, rank: int) -> bytes:
        """Return ``size`` bytes that the rank sends, if any."""
        content = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.recv(content, rank, group=self.group)
        return content.numpy().tobytes()


def _tensor_of(content: bytes) -> torch.Tensor:
    """Return a tensor of the bytes, of which there is at least one."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
