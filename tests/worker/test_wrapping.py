"""Whether the sums of a step have arrived, whichever outputs of the model the loss is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elasticd.channel.worker_messages import Enter
from elasticd.worker.gradients.wrapping import count_sums
from elasticd.worker.world.group import World


@dataclass
class Pair:
    one: torch.Tensor
    other: torch.Tensor


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tuple": lambda one, other: (one.detach(), [one, other]),
    "mapping": lambda one, other: {"one": one, "other": other},
    "dataclass": Pair,
}


class TwoHeads(nn.Module):
    def __init__(self, kind: str, shared: bool) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(1 if shared else 2))
        self.kind = KINDS[kind]

    def forward(self, x: torch.Tensor) -> Any:
        x = self.body(x)
        return self.kind(self.heads[0](x), self.heads[-1](x + 1))


def outputs(said: Any) -> tuple[torch.Tensor, torch.Tensor]:
    match said:
        case (_, [one, other]) | {"one": one, "other": other} | Pair(one, other):
            return one, other
    raise AssertionError(said)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# torch does not find unused parameters behind a dataclass.
@pytest.mark.parametrize(
    ("kind", "shared"),
    [("tuple", True), ("tuple", False), ("mapping", True), ("mapping", False), ("dataclass", True)],
)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_a_backward_pass_counts_once_whichever_outputs_it_begins_at(
    group: None, kind: str, shared: bool, used: tuple[int, ...]
) -> None:
    """Otherwise one rank would ask the others whether the sums have arrived, and they would not answer."""
    model = DistributedDataParallel(TwoHeads(kind, shared), find_unused_parameters=not shared)
    world = World(Enter(1, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": "0"}))
    count_sums(model, world)
    for step in (1, 2):
        said = outputs(model(torch.ones(4, 3)))
        sum(said[i].sum() for i in used).backward()  # type: ignore[union-attr]
        assert (world.sums_begun, world.sums) == (step, step)
    with model.no_sync():
        outputs(model(torch.ones(4, 3)))[used[0]].sum().backward()
    with torch.no_grad():
        model(torch.ones(4, 3))
    assert (world.sums_begun, world.sums) == (2, 2)
