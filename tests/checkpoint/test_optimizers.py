"""Optimizers that keep more than a tensor or two of each parameter, and those of several modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

KRONECKER_STEPS = 3


class Kronecker(torch.optim.Optimizer):
    """Keeps what Shampoo, SOAP and their like do: a list with a matrix for each dimension, or nothing for one
    that is too long, and mappings; the tensors in them are only there after the first step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            have = self.state[p]
            if not have:
                have["step"] = 0
                have["factors"] = [torch.zeros(n, n) if n < 4 else [] for n in p.shape]
                have["by"] = {"mean": torch.zeros_like(p), "dim": {0: torch.ones(2), 7: torch.zeros(1)}}
            have["step"] += 1
            for factor in have["factors"]:
                if len(factor):
                    factor.add_(torch.randn_like(factor))
            have["by"]["mean"] += p.grad
            have["by"]["dim"][7] += 1
            p.sub_(0.1 * p.grad)


def stepped(modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    for _ in range(KRONECKER_STEPS):
        sum(p.square().sum() for m in modules.values() for p in m.parameters()).backward()
        optimizer.step()
    return {**modules, "optimizer": optimizer}


def kept(optimizer: torch.optim.Optimizer) -> str:
    """All it has of its parameters, as text."""
    state = optimizer.state_dict()["state"]
    return str({i: dict(sorted(state[i].items())) for i in sorted(state)})


@pytest.mark.parametrize("kind", [Kronecker, torch.optim.Adafactor])
def test_lists_and_mappings_of_tensors_come_back_into_an_optimizer_that_has_none_yet(opened, kind):
    torch.manual_seed(3)
    model = nn.Linear(5, 3)
    checkpoints = opened()
    state = stepped({"model": model}, kind(model.parameters()))
    assert checkpoints.save(state, 1) and checkpoints.wait()

    other = nn.Linear(5, 3)
    fresh = {"model": other, "optimizer": kind(other.parameters())}
    assert checkpoints.load(fresh) == 1
    assert kept(fresh["optimizer"]) == kept(state["optimizer"])
    assert torch.equal(other.weight, model.weight)
    stepped({"model": other}, fresh["optimizer"])  # it is all there to go on with


def test_one_optimizer_may_have_the_parameters_of_several_modules(opened):
    def made(seed: int) -> tuple[dict[str, nn.Module], torch.optim.Optimizer]:
        torch.manual_seed(seed)
        modules: dict[str, nn.Module] = {"encoder": nn.Linear(4, 2), "decoder": nn.Linear(4, 2)}
        return modules, torch.optim.AdamW([p for m in modules.values() for p in m.parameters()])

    checkpoints = opened()
    state = stepped(*made(1))
    assert checkpoints.save(state, 1) and checkpoints.wait()
    modules, optimizer = made(2)
    assert checkpoints.load({**modules, "optimizer": optimizer}) == 1
    assert kept(optimizer) == kept(state["optimizer"])
    assert torch.equal(modules["decoder"].weight, state["decoder"].weight)


def test_parameters_of_modules_that_are_not_there_are_refused(opened):
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], momentum=0.9)
    with pytest.raises(ValueError, match="not all modules whose parameters it has"):
        opened().save({"one": one, "optimizer": optimizer}, 1)
