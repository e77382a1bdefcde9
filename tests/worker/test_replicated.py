"""Gradients of parameters that a sharded model keeps whole are averaged in each backward pass."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from elasticd.worker.gradients.replicated import ReplicatedGradients
from tests.worker.worlds import in_world

Gradient = list[float] | None


def in_two_passes() -> list[Gradient]:
    """Return the gradients after two passes. In the first, both workers use the first parameter. In the
    second, worker 1 uses the first and the second parameter, and worker 0 the first. The third is not used,
    and the fourth is frozen until the second pass."""
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    parameters[3].requires_grad_(False)
    gradients = ReplicatedGradients(parameters)
    (parameters[0] * (1 + rank)).sum().backward()
    parameters[3].requires_grad_(True)
    used = [parameters[0], parameters[3], *parameters[1 : 1 + rank]]
    torch.stack([p * (10 + 10 * rank) for p in used]).sum().backward()
    gradients.close()
    parameters[2].sum().backward()  # not averaged any more
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_each_pass_adds_the_average_over_the_workers(tmp_path):
    outcome: list[Gradient] = [[1.5 + 15] * 2, [10.0] * 2, [1.0] * 2, [15.0] * 2]
    assert in_world(2, tmp_path, in_two_passes) == [outcome, outcome]


def after_a_failed_pass() -> Gradient:
    """Return the gradient after three passes, of which the second fails."""
    [parameter] = parameters = [nn.Parameter(torch.ones(2))]
    ReplicatedGradients(parameters)
    (parameter * (1 + dist.get_rank())).sum().backward()

    def fail(_: torch.Tensor) -> None:
        raise ValueError("of the test")

    other = nn.Parameter(torch.ones(2))
    other.register_hook(fail)
    with pytest.raises(ValueError, match="of the test"):
        (other * 1 + parameter * 100).sum().backward()  # the gradient of the last product comes first
    kept = parameter.grad.tolist()
    parameter.grad = None
    (parameter * (1 + dist.get_rank())).sum().backward()
    return [*kept, *parameter.grad.tolist()]


def test_a_failed_pass_loses_no_earlier_gradient_and_the_next_one_is_averaged(tmp_path):
    for kept_and_next in in_world(2, tmp_path, after_a_failed_pass):
        assert kept_and_next[:2] == [101.5, 101.5], "as torch does"
        assert kept_and_next[2:] == [1.5, 1.5]


def computed_again() -> Gradient:
    """Return the gradient of a parameter that is used in a pass within a pass."""
    [parameter] = parameters = [nn.Parameter(torch.ones(2))]
    ReplicatedGradients(parameters)
    scale = 1.0 + dist.get_rank()

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * parameter

    x = torch.ones(2, requires_grad=True)
    (checkpoint(inner, parameter * x, use_reentrant=True) * scale).sum().backward()
    return parameter.grad.tolist()


def test_activations_that_are_computed_again_in_a_pass_of_their_own_count_once(tmp_path):
    assert in_world(2, tmp_path, computed_again) == [[3.0, 3.0]] * 2


def of_channels_last() -> tuple[bool, list[float]]:
    """Return whether the averaged gradient has its parameter's strides, and the gradient."""
    ordered = torch.arange(16.0).view(2, 2, 2, 2).contiguous(memory_format=torch.channels_last)
    [parameter] = parameters = [nn.Parameter(ordered)]
    gradients = ReplicatedGradients(parameters)
    (parameter * torch.arange(16.0).view(2, 2, 2, 2) * (1 + dist.get_rank())).sum().backward()
    gradients.close()
    return parameter.grad.stride() == parameter.stride(), parameter.grad.flatten().tolist()


def test_an_average_has_the_strides_of_its_parameter(tmp_path):
    outcome = True, [1.5 * value for value in range(16)]
    assert in_world(2, tmp_path, of_channels_last) == [outcome, outcome]


def sparse() -> str:
    embedding = nn.Embedding(3, 2, sparse=True)
    gradients = ReplicatedGradients([embedding.weight])
    try:
        embedding(torch.tensor([1])).sum().backward()
    except TypeError as error:
        return str(error)
    finally:
        gradients.close()
    return "nothing"


def test_a_sparse_gradient_is_refused_in_a_sentence(tmp_path):
    assert "has a sparse gradient" in in_world(1, tmp_path, sparse)[0]
