"""Which changes before a commit are undone, and what is copied for that."""

from __future__ import annotations

import pytest

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
