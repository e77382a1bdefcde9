"""Which changes before a commit are undone, and what is copied for that."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elasticd.worker.commit.changes import ChangeDetector
from elasticd.worker.commit.uncommitted import Owners

# The model has parameters 0, 1 and a frozen 6. A critic has 2 and 3. Averages of the model are 4 and 5.
OWNERS = Owners({"optimizer": {0, 1}, "second": {2, 3}}, [{0, 1, 6}, {2, 3}, {4, 5}])


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


@pytest.mark.parametrize(
    ("outside", "frozen", "swapped"),
    [
        (set(), {0, 1, 2, 3, 4, 5, 6}, []),
        ({0, 1}, set(), []),
        ({0, 1}, {6}, [{0, 1, 6}]),
        ({0}, {1, 6}, [{0, 1, 6}]),
        ({0, 1, 2, 3, 6}, set(), [{0, 1, 6}, {2, 3}]),
    ],
)
def test_a_module_is_swapped_if_all_its_parameters_change_but_frozen_ones(outside, frozen, swapped):
    assert OWNERS.swapped(outside, frozen) == swapped


def test_a_change_through_data_is_seen_in_each_of_many_parameters() -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(200)]
    trace = ChangeDetector(parameters)
    trace.note()
    for parameter in parameters[::7]:
        parameter.data.fill_(1.0)
    assert trace.changed(contents=False) == set()
    assert trace.changed(contents=True) == {*range(0, 200, 7)}
