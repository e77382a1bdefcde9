"""A model on the meta device gets its initial values module by module."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from elasticd.worker.sharding.initial_values import InitialValues, Sums, is_bare
from elasticd.worker.values import randomness


class Norm(nn.Module):
    """A module with a parameter and buffers of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("mean", torch.empty(3))
        self.register_buffer("counts", torch.empty(2, dtype=torch.long), persistent=False)
        self.register_buffer("mask", torch.empty(2, 2, dtype=torch.bool))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        nn.init.zeros_(self.mean)
        self.counts = torch.arange(2)
        self.mask = torch.zeros(2, 2, dtype=torch.bool)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), Norm(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def bare(make: Any = net) -> Any:
    with torch.device("meta"):
        return make()


def values(model: nn.Module, init: Any = None) -> dict[str, torch.Tensor]:
    initial = InitialValues(model, init)
    initial.make_buffers()
    made = dict(initial.parameters(randomness.note()))
    return {name: made[number] for number, (name, _) in enumerate(model.named_parameters())}


def test_the_values_have_the_bits_of_a_model_that_is_built_at_once_and_nothing_is_drawn():
    torch.manual_seed(5)
    built = net()
    torch.manual_seed(5)
    before, draws = torch.get_rng_state(), random.getstate()
    model = bare()
    made = values(model)
    assert made.keys() == dict(built.named_parameters()).keys()
    for name, parameter in built.named_parameters():
        assert torch.equal(made[name], parameter), name
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == draws
    for name, buffer in built.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert is_bare(model), "the parameters took memory"


def test_a_parameter_that_modules_share_is_made_once_by_the_last_of_them():
    def pair() -> nn.Sequential:
        both = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
        both[1].weight = both[0].weight
        return both

    seen: list[tuple[str, float]] = []

    def init(name: str, module: nn.Module) -> None:
        if not name:
            return
        first = module.weight.flatten()[0].item()
        seen.append((name, 0.0 if first != first else first))
        for parameter in module.parameters(recurse=False):
            parameter.fill_(int(name) + 1)

    made = values(bare(pair), init)
    assert seen == [("0", 0.0), ("1", 1.0)]
    assert {name: value.unique().tolist() for name, value in made.items()} == {
        "0.weight": [2.0],
        "0.bias": [1.0],
    }


def without(key: str) -> Any:
    def init(name: str, module: nn.Module) -> None:
        for own, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if f"{name}.{own}" != key:
                tensor.zero_()

    return init


def test_buffers_that_have_values_keep_them():
    model = bare()
    model[1].mean = torch.arange(3.0)
    InitialValues(model, without("1.mean")).make_buffers()
    assert model[1].mean.tolist() == [0.0, 1.0, 2.0]
    assert model[1].counts.tolist() == [0, 0]


def in_one_call(name: str, module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.zero_()


def through_data(name: str, module: nn.Module) -> None:
    """As some models scale the weights of layers within."""
    for key, parameter in module.named_parameters():
        if key.endswith("out_proj.weight"):
            parameter.data.normal_()


def of_another_shape(name: str, module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.zeros(1))


def eight_bits() -> nn.Linear:
    layer = nn.Linear(2, 3)
    layer.weight = nn.Parameter(torch.empty(3, 2, dtype=torch.uint8), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    "write",
    [
        lambda mask: mask.fill_(False),
        lambda mask: mask.data.zero_(),
        lambda mask: mask[0].logical_and_(mask[1]),
        lambda mask: torch.zeros(2, 2, dtype=torch.bool, out=mask),
        lambda mask: mask.numpy().fill(True),
    ],
)
def test_a_tensor_whose_type_has_no_mark_may_be_given_its_values_in_any_way(write):
    def init(name: str, module: nn.Module) -> None:
        without("1.mask")(name, module)
        if name == "1":
            write(module.mask)

    values(bare(), init)


@pytest.mark.parametrize(
    ("make", "init", "sentence"),
    [
        (net, without("2.0.bias"), "2.0.bias has got no values, or NaN"),
        (net, without("1.mean"), "1.mean has got no values, or NaN"),
        (net, without("1.counts"), "1.counts has got no values, or -9223372036854775808"),
        (net, without("1.mask"), "1.mask has got no values: have init= write to all"),
        (eight_bits, without(".weight"), "weight has got no values: have init= write to all"),
        (lambda: nn.TransformerEncoderLayer(4, 2, 4), in_one_call, "writes to modules within the model"),
        (lambda: nn.TransformerEncoderLayer(4, 2, 4), through_data, "writes to modules within the model"),
        (lambda: nn.Linear(2, 3), of_another_shape, "gives weight another shape or type"),
    ],
)
def test_values_that_are_lost_or_missing_are_refused_in_a_sentence(make, init, sentence):
    with pytest.raises(TypeError, match=sentence):
        values(bare(make), init)


NUMBERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.complex64]


@pytest.mark.parametrize("dtype", TYPES)
def test_the_sums_of_values_of_any_type_tell_them_from_others_and_from_another_order(dtype):
    first = (torch.arange(600) % 7).to(dtype)
    changed = first.clone()
    changed[:100] = 6
    sums = Sums.of(first)
    assert Sums.of(first.reshape(6, 100)) == sums
    for other in (changed, first[(torch.arange(600) % 7).argsort()]):
        assert abs(Sums.of(other).values - sums.values) > max(sums.slack, Sums.of(other).slack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 50, 3_000_000])
def test_the_sums_of_values_that_differ_by_rounding_are_the_same_and_those_of_another_seed_are_not(
    dtype, size
):
    first = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    steps = torch.randint(-1, 2, (size,), generator=torch.Generator().manual_seed(2))
    rounded = (first.view(NUMBERS[dtype]) + steps.to(NUMBERS[dtype])).view(dtype)
    other = torch.randn(size, generator=torch.Generator().manual_seed(3)).to(dtype)
    sums = Sums.of(first)
    assert abs(Sums.of(rounded).values - sums.values) <= sums.slack
    assert abs(Sums.of(other).values - sums.values) > sums.slack


def test_infinite_values_have_no_sums():
    assert Sums.of(torch.tensor([1.0, -torch.inf])) == Sums(0.0, 0.0)
    assert Sums.of(torch.empty(0)) == Sums(0.0, 0.0)
