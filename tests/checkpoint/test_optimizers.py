"""Optimizers with lists and mappings of tensors for each parameter, and optimizers of several modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

KRONECKER_STEPS = 3


class Kronecker(torch.optim.Optimizer):
    """Keeps the same kinds of state as Shampoo and SOAP: a list with a matrix for each dimension, an empty
    list for a long dimension, and mappings. The tensors exist only after the first step."""

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
    """The optimizer's state of all parameters, as text."""
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
    stepped({"model": other}, fresh["optimizer"])  # all tensors are there to continue with


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


def grouped(swapped: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    decayed = {"params": [model[0].weight], "weight_decay": 0.1, "lr": 0.5}
    free = {"params": [model[0].bias, *model[1].parameters()], "weight_decay": 0.0, "lr": 0.25}
    groups = [free, decayed] if swapped else [decayed, free]
    return model, torch.optim.AdamW(groups)


def settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: (g["weight_decay"], g["lr"]) for g in optimizer.param_groups for p in g["params"]}


def test_groups_in_any_order_get_their_settings_back(opened):
    checkpoints = opened()
    model, optimizer = grouped(swapped=False)
    assert checkpoints.save(stepped({"model": model}, optimizer), 1) and checkpoints.wait()
    expected = settings(model, optimizer)
    model, optimizer = grouped(swapped=True)
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 9.0
    assert checkpoints.load({"model": model, "optimizer": optimizer}) == 1
    assert settings(model, optimizer) == expected


def test_groups_that_a_scheduler_knows_by_their_order_are_refused_in_another(opened):
    checkpoints = opened()
    model, optimizer = grouped(swapped=False)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert checkpoints.save({**stepped({"model": model}, optimizer), "schedule": schedule}, 1)
    assert checkpoints.wait()
    model, optimizer = grouped(swapped=True)
    state = {"model": model, "optimizer": optimizer}
    state["schedule"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(ValueError, match="groups are in another order than when they were saved"):
        checkpoints.load(state)


def test_parameters_of_one_group_that_had_settings_of_their_own_are_refused(opened):
    checkpoints = opened()
    model, optimizer = grouped(swapped=False)
    assert checkpoints.save(stepped({"model": model}, optimizer), 1) and checkpoints.wait()
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(ValueError, match=r"in one group \(0\.weight and others\) were in several"):
        checkpoints.load(state)


def test_a_checkpoint_of_before_a_parameter_was_stepped_takes_its_state_away(opened, tmp_path):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    checkpoints = opened()
    assert checkpoints.save(state, 1) and checkpoints.wait()
    stepped({"model": model}, optimizer)
    before = kept(optimizer)
    assert checkpoints.save(state, 2) and checkpoints.wait()
    model[1].requires_grad_(True)
    stepped({"model": model}, optimizer)
    assert len(optimizer.state) == 4
    assert checkpoints.load(state) == 2
    assert kept(optimizer) == before
    stepped({"model": model}, optimizer)  # the optimizer starts from nothing
    [second] = (tmp_path / "run").glob("step-0000000002-*")
    (second / "elasticd.json").unlink()
    assert checkpoints.load(state) == 1
    assert not optimizer.state_dict()["state"]
    stepped({"model": model}, optimizer)


def test_a_checkpoint_without_the_optimizer_is_refused_by_one_that_has_stepped(opened):
    model = nn.Linear(3, 3)
    checkpoints = opened()
    assert checkpoints.save({"model": model}, 1) and checkpoints.wait()
    state = stepped({"model": model}, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"the checkpoint has no optimizer\.state\.weight"):
        checkpoints.load(state)
    assert len(state["optimizer"].state) == 2
