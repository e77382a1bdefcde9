"""Collectives that the ranks of a world use for checkpoints. Nothing is pickled.

A rank that gets bytes from all others is connected to all of them. So in a large world the ranks of each node
are a group, and the nodes' first ranks are one or, if they are many, are grouped again. See ``levels``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist

from elasticd.checkpoint.client import levels
from elasticd.checkpoint.client.packs import packed, unpacked


class RankGroup(ABC):
    """The ranks of the world that is present when this object is made. All ranks call a method together.

    ``rank``: of this process; ``size``: the number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._world = _world()

    @property
    def over(self) -> bool:
        """Whether the world has changed since this object was made."""
        return self._world is not _world()

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return the minimum of each value over all ranks."""
        return self.begin_minimum(values)()

    @abstractmethod
    def begin_minimum(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begin ``minimum``. Return a function that waits for the result. The caller can do other work
        meanwhile, and must then call the function, since other ranks may wait for the call."""

    @abstractmethod
    def from_first(self, mine: bytes) -> bytes:
        """Return the bytes of rank 0."""

    @abstractmethod
    def to_first(self, mine: bytes) -> list[bytes]:
        """Return the bytes of each rank, by rank, to rank 0, and an empty list to other ranks."""

    @abstractmethod
    def hand_out(self, each: Sequence[bytes]) -> bytes:
        """Return this rank's item of ``each``, which rank 0 has, by rank. Other ranks give nothing."""

    def gather(self, mine: bytes) -> list[bytes]:
        """Return the bytes of each rank, by rank."""
        return unpacked(self.from_first(packed(self.collect(mine))))

    def collect(self, mine: bytes) -> list[bytes]:
        """Return the same as ``to_first``. Equal bytes are one object, and travel once; if all ranks have the
        same, none travel."""
        digest = blake2b(mine, digest_size=14).digest()
        own = [int.from_bytes(digest[:7]), int.from_bytes(digest[7:])]
        least = self.minimum([*own, *(-n for n in own)])
        if least[:2] == [-n for n in least[2:]]:
            return [mine] * self.size if self.rank == 0 else []
        kinds = self.to_first(digest)
        first = {kind: rank for rank, kind in reversed([*enumerate(kinds)])}
        # Rank 0 asks the first other rank of each kind for its bytes.
        asked = self.hand_out(
            [b"asked" if rank and first[kind] == rank else b"" for rank, kind in enumerate(kinds)]
        )
        sent = self.to_first(mine if asked else b"")
        content = {kind: sent[rank] if rank else mine for kind, rank in first.items()}
        return [content[kind] for kind in kinds]


class OneRank(RankGroup):
    """This process alone."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def begin_minimum(self, values: Sequence[int]) -> Callable[[], list[int]]:
        return lambda: [*values]

    def from_first(self, mine: bytes) -> bytes:
        return mine

    def to_first(self, mine: bytes) -> list[bytes]:
        return [mine]

    def hand_out(self, each: Sequence[bytes]) -> bytes:
        return each[0]


class FlatGroup(RankGroup):
    """The ranks of one process group. ``rank`` and ``size`` are those in the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    def begin_minimum(self, values: Sequence[int]) -> Callable[[], list[int]]:
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        work = dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group, async_op=True)

        def result() -> list[int]:
            if work is not None:  # torch returns None if this rank is not in the group
                work.wait()
            return [int(v) for v in tensor]

        return result

    def gather(self, mine: bytes) -> list[bytes]:
        sizes = [_number(0) for _ in range(self.size)]
        dist.all_gather(sizes, _number(len(mine)), group=self._group)
        most = max(int(s) for s in sizes)
        padded = torch.frombuffer(bytearray(mine.ljust(max(most, 1), b"\0")), dtype=torch.uint8)
        gathered = [_room(max(most, 1)) for _ in range(self.size)]
        dist.all_gather(gathered, padded, group=self._group)
        return [s.numpy().tobytes()[: int(n)] for s, n in zip(gathered, sizes, strict=True)]

    def from_first(self, mine: bytes) -> bytes:
        size = _number(len(mine))
        dist.broadcast(size, group=self._group, group_src=0)
        if not size:
            return b""
        content = _tensor_of(mine) if self.rank == 0 else _room(int(size))
        dist.broadcast(content, group=self._group, group_src=0)
        return content.numpy().tobytes()

    def to_first(self, mine: bytes) -> list[bytes]:
        sizes = [_number(0) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(_number(len(mine)), sizes, group=self._group, group_dst=0)
        if sizes is None:
            self._send(mine, 0)
            return []
        return [mine, *(self._receive(int(size), rank) for rank, size in enumerate(sizes) if rank)]

    def hand_out(self, each: Sequence[bytes]) -> bytes:
        size = _number(0)
        sizes = [_number(len(item)) for item in each] if self.rank == 0 else None
        dist.scatter(size, sizes, group=self._group, group_src=0)
        if sizes is None:
            return self._receive(int(size), 0)
        for rank, item in enumerate(each[1:], start=1):
            self._send(item, rank)
        return each[0]

    def _send(self, content: bytes, rank: int) -> None:
        """Send the bytes to the rank of the group, if there are any."""
        if content:
            dist.send(_tensor_of(content), group=self._group, group_dst=rank)

    def _receive(self, size: int, rank: int) -> bytes:
        """Return ``size`` bytes that the rank of the group sends, if any."""
        content = _room(size)
        if size:
            dist.recv(content, group=self._group, group_src=rank)
        return content.numpy().tobytes()


class TwoLevelGroup(RankGroup):
    """Ranks in groups, each of which has its first rank speak for it.

    ``lower``: the group of this rank. ``upper``: the first rank of each group; None if this rank is not one
    of them. ``parts``: the ranks of each group, in the order of ``upper``; only rank 0 needs them.
    """

    def __init__(
        self, rank: int, size: int, lower: RankGroup, upper: RankGroup | None, parts: levels.Groups
    ) -> None:
        super().__init__(rank, size)
        self._lower, self._upper, self._parts = lower, upper, parts

    def begin_minimum(self, values: Sequence[int]) -> Callable[[], list[int]]:
        of_lower = self._lower.begin_minimum(values)

        def result() -> list[int]:
            least = of_lower()
            if self._upper is not None:
                least = self._upper.minimum(least)
            return self._lower.minimum(least)  # the first rank's values are the least of all now

        return result

    def from_first(self, mine: bytes) -> bytes:
        if self._upper is not None:
            mine = self._upper.from_first(mine)
        return self._lower.from_first(mine)

    def to_first(self, mine: bytes) -> list[bytes]:
        of_lower = self._lower.to_first(mine)
        if self._upper is None:
            return []
        of_parts = map(unpacked, self._upper.to_first(packed(of_lower)))
        by_rank: dict[int, bytes] = {}
        for ranks, of_part in zip(self._parts, of_parts, strict=True):  # none, but on rank 0
            by_rank |= zip(ranks, of_part, strict=True)
        return [by_rank[rank] for rank in sorted(by_rank)]

    def hand_out(self, each: Sequence[bytes]) -> bytes:
        of_lower: Sequence[bytes] = ()
        if self._upper is not None:
            of_parts = [packed([each[rank] for rank in ranks]) for ranks in self._parts]
            of_lower = unpacked(self._upper.hand_out(of_parts))
        return self._lower.hand_out(of_lower)


def world_group() -> RankGroup:
    """Return the ranks of the present world, or this process alone. They use the world's own process group,
    so no rank may use other collectives at the same time."""
    world = _world()
    return OneRank() if world is None or world.size() == 1 else FlatGroup(world)


def rank_group(*, in_step: bool = False) -> RankGroup:
    """Return the ranks of the present world, or this process alone. All ranks call this together.

    The ranks get groups of their own on the CPU, since their messages must not mix with the training's. The
    groups are destroyed with the world's own. ``in_step``: no rank uses other collectives at the same time.
    So the world's own group serves, except in a large world, where rank 0 would talk to all others.
    """
    world = _world()
    if world is None or world.size() == 1:
        return OneRank()
    found = levels.agree(world.rank(), world.size()) if world.size() > levels.FLAT_MAX else None
    if found is not None:
        return _leveled(found)
    if in_step:
        return FlatGroup(world)
    with levels.unchecked():
        group = dist.new_group(backend="gloo")
    assert group is not None
    return FlatGroup(group)


def _leveled(found: levels.Levels, level: int = 0) -> RankGroup:
    """Return the ranks of the level, which has this rank."""
    number, size, ranks = found.places[level]
    lower = FlatGroup(levels.group_of(ranks, f"{found.name}-{level}")) if len(ranks) > 1 else OneRank()
    if len(ranks) == size:
        return lower
    upper = _leveled(found, level + 1) if level + 1 < len(found.places) else None
    return TwoLevelGroup(number, size, lower, upper, found.parts[level] if found.parts else ())


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def _number(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device="cpu")


def _room(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _tensor_of(content: bytes) -> torch.Tensor:
    """Return a tensor of the bytes, of which there is at least one."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
