"""Which changes before a commit are undone, and what is copied for that."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elasticd.worker.commit.changes import MOST, Trace
from elasticd.worker.commit.uncommitted import Owners

# The model has parameters 0, 1 and a frozen 6, a critic 2 and 3, and averages of the model are 4 and 5.
OWNERS = Owners({"optimizer": {0, 1}, "second": {2, 3}}, [{6}, set(), {4, 5}])


@pytest.mark.parametrize(
    ("changed", "stepped", "outside"),
    [
        (set(), (), set()),
        ({0, 1}, ("optimizer",), set()),
        ({0, 1}, ("second",), {0, 1}),
        ({0, 2, 4}, ("optimizer",), {2, 4}),
        ({0, 2, 4}, ("optimizer", "second"), {4}),
        ({0, 1}, (), {0, 1}),
    ],
)
def test_a_parameter_changes_outside_of_the_optimizers_that_have_not_begun_a_step_on_it(
    changed, stepped, outside
):
    assert OWNERS.outside(changed, stepped) == outside


@pytest.mark.parametrize(
    ("outside", "stepped", "copied"),
    [
        (set(), ("optimizer",), {0, 1}),
        ({2}, ("optimizer",), {0, 1, 2}),
        ({4}, (), {4, 5}),
        ({6}, (), {6}),
        ({0}, (), {0}),
        (set(), (), set()),
    ],
)
def test_with_a_parameter_that_changes_early_those_are_copied_that_follow_in_the_same_module(
    outside, stepped, copied
):
    assert OWNERS.to_copy(outside, stepped) == copied


MANY = 2 * MOST + 10


def _trace(*, all: bool) -> tuple[Trace, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(MANY)]
    trace = Trace(parameters)
    trace.note(all=all)
    return trace, parameters


@pytest.mark.parametrize("number", range(0, MANY, 9))
def test_a_change_through_data_is_seen_in_any_parameter_if_elements_of_all_were_noted(number: int) -> None:
    trace, parameters = _trace(all=True)
    parameters[number].data.fill_(1.0)
    assert trace.changed(contents=False) == set()
    assert trace.changed(contents=True) == {number}


def test_a_change_of_all_parameters_through_data_is_seen_in_some_if_elements_of_some_were_noted() -> None:
    trace, parameters = _trace(all=False)
    for parameter in parameters:
        parameter.data.fill_(1.0)
    assert trace.changed(contents=True) == {*range(0, MANY, 3)}
    trace.note(all=True)
    assert trace.changed(contents=True) == set()


@pytest.mark.parametrize("all", [True, False])
def test_a_new_version_and_a_new_address_are_seen_in_any_parameter(all: bool) -> None:
    trace, parameters = _trace(all=all)
    with torch.no_grad():
        parameters[1].add_(1.0)
    parameters[2].data = torch.zeros(3)
    for contents in (True, False):
        assert trace.changed(contents=contents) == {1, 2}


def test_a_model_without_parameters_does_not_change() -> None:
    trace = Trace([])
    for all in (True, False):
        trace.note(all=all)
        assert trace.changed(contents=True) == set()
