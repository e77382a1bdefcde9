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

    def gather_alike(self, mine: bytes) -> list[bytes]:
        """Return the bytes of each rank, by rank. Equal bytes are one object, and travel once; if all ranks
        have the same, none travel. With many ranks of few kinds, ``gather`` would take much longer."""
        digest = blake2b(mine, digest_size=14).digest()
        own = [int.from_bytes(digest[:7]), int.from_bytes(digest[7:])]
        least = self.minimum([*own, *(-n for n in own)])
        if least[:2] == [-n for n in least[2:]]:
            return [mine] * self.size
        said = self.gather(digest + len(mine).to_bytes(8))
        tensors: dict[bytes, torch.Tensor] = {}
        sent = []
        for rank, told in enumerate(said):
            if told not in tensors:
                content = mine if rank == self.rank else bytes(int.from_bytes(told[14:]))
                tensors[told] = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
                sent.append(dist.broadcast(tensors[told], rank, group=self.group, async_op=True))
        for work in sent:
            if work is not None:
                work.wait()
        kinds = {
            told: tensor.numpy().tobytes()[: int.from_bytes(told[14:])] for told, tensor in tensors.items()
        }
        return [kinds[told] for told in said]
