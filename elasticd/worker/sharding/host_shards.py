"""Copies of shards in the host's memory, by commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from elasticd.worker.sharding.held import CommitPoint, HeldShard
from elasticd.worker.sharding.parts import Part, Shapes, Span, Spans

_ALIGNED = 16


class TensorKind(NamedTuple):
    """A tensor of the shape of a parameter: the parameter itself, or a tensor of an optimizer's state.
    ``parameter``: the parameter's number. ``optimizer`` and ``slot``: empty for the parameter itself."""

    parameter: int
    optimizer: str
    slot: str
    dtype: torch.dtype


Kinds = tuple[TensorKind, ...]


def size_of(kinds: Kinds, spans: Spans) -> int:
    """Return the bytes of a copy of these spans of all tensors."""
    return sum(_aligned(spans[kind.parameter].size * kind.dtype.itemsize) for kind in kinds)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class HostShard:
    """A copy of one rank's part of all tensors, in one block of memory. ``kinds``: the tensors. ``shapes``:
    of the model's parameters."""

    def __init__(self, kinds: Kinds, part: Part, shapes: Shapes) -> None:
        self.kinds, self.part, self.spans = kinds, part, shapes.spans(part)
        spans = self.spans
        self._starts: list[int] = []
        size = 0
        for kind in kinds:
            self._starts.append(size)
            size += _aligned(spans[kind.parameter].size * kind.dtype.itemsize)
        self.memory = torch.empty(size, dtype=torch.uint8, device="cpu")

    def suits(self, kinds: Kinds, part: Part) -> bool:
        return self.kinds == kinds and self.part == part

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, flat, as views. Each commit writes them, so the views are made once."""
        return [self.tensor(number) for number in range(len(self.kinds))]

    @cached_property
    def numbers(self) -> dict[TensorKind, int]:
        """The number of each tensor."""
        return {kind: number for number, kind in enumerate(self.kinds)}

    def tensor(self, number: int, span: Span | None = None) -> torch.Tensor:
        """Return the elements of tensor ``number``, flat, as a view. ``span``: only these elements of the
        whole tensor, which this shard must have."""
        kind = self.kinds[number]
        its = self.spans[kind.parameter]
        span = its if span is None else span
        first = self._starts[number] + (span.first - its.first) * kind.dtype.itemsize
        return self.memory[first : first + span.size * kind.dtype.itemsize].view(kind.dtype)

    @cached_property
    def of_parameter(self) -> Mapping[int, Sequence[int]]:
        """The numbers of the tensors of each parameter."""
        found: dict[int, list[int]] = {}
        for number, kind in enumerate(self.kinds):
            found.setdefault(kind.parameter, []).append(number)
        return found


@dataclass(frozen=True, slots=True)
class SmallState:
    """The part of a commit that is not sharded. ``kept``: see ``LastCommit``; empty before the first world.
    ``slots`` and ``trainable``: see ``ShardedModel``."""

    kept: dict[str, Any]
    slots: dict[str, dict[int, dict[str, Any]]]
    trainable: list[bool]


@dataclass(slots=True)
class Generation:
    """What a worker keeps of one commit. ``own``: its own shard; ``guarded``: shards of other ranks, by
    rank. Below 0 are shards that workers which left have handed over. ``ranks``: how many ranks made the
    commit; 0 if unknown."""

    point: CommitPoint
    small: SmallState
    own: HostShard
    guarded: dict[int, HostShard] = field(default_factory=dict)
    ranks: int = 0

    @property
    def shards(self) -> list[tuple[HeldShard, HostShard]]:
        others = sorted(self.guarded.items())
        all_of = [(self.own, False), *((shard, rank >= 0) for rank, shard in others)]
        return [(HeldShard(self.point, shard.part, guarded, self.ranks), shard) for shard, guarded in all_of]

    def take_over(self, shards: Iterable[HostShard]) -> None:
        """Keep shards of workers that leave the job."""
        first = min([0, *self.guarded])
        self.guarded |= {first - number: shard for number, shard in enumerate(shards, 1)}


def held_shards(generations: Sequence[Generation]) -> list[tuple[HeldShard, HostShard]]:
    """Return all shards, in the order in which other ranks number them."""
    return [pair for generation in generations for pair in generation.shards]
