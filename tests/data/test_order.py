"""Orders are pure functions; a shuffled order is a permutation without a visible pattern."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.data.order import BadOrder, Sequential, Shuffled, Weighted, order_from, transform_seed

seeds = st.integers(-(2**70), 2**70)


@given(st.integers(1, 1000), seeds, st.integers(0, 10**6))
def test_a_shuffled_epoch_has_each_sample_once(length, seed, epoch):
    assert sorted(Shuffled(length, seed).at(epoch, range(length))) == list(range(length))


@given(st.integers(1, 10**15), seeds, st.integers(0, 100), st.data())
def test_the_sample_at_a_position_does_not_depend_on_the_worker_or_on_earlier_calls(
    length, seed, epoch, data
):
    first = data.draw(st.integers(0, length - 1))
    positions = range(first, min(length, first + 20))
    together = Shuffled(length, seed).at(epoch, positions)
    apart = [Shuffled(length, seed).at(epoch, range(p, p + 1))[0] for p in reversed(positions)]
    assert apart == together[::-1]
    assert len(set(together)) == len(together) and all(0 <= i < length for i in together)


def test_an_order_stays_what_it_was_in_earlier_versions():
    """Checkpoints are kept on disks, and may continue in the middle of an epoch."""
    assert Shuffled(10, seed=0).at(0, range(10)) == [1, 6, 9, 7, 2, 3, 5, 8, 4, 0]
    assert Shuffled(10**12, seed=7).at(3, range(2)) == [616356389492, 475572983630]
    assert Weighted([1, 0, 2], seed=1).at(0, range(8)) == [0, 2, 0, 2, 2, 2, 0, 0]
    assert transform_seed(1, 2, 3) == 5118018693630721033


def test_seeds_and_epochs_are_mixed_differently():
    orders = {tuple(Shuffled(50, seed).at(epoch, range(50))) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


@pytest.mark.parametrize("length", [2, 3, 5, 14])
def test_every_sample_comes_to_every_position_as_often(length):
    trials = 200 * length
    seen = Counter(
        (position, sample)
        for seed in range(trials)
        for position, sample in enumerate(Shuffled(length, seed).at(0, range(length)))
    )
    expected = trials / length
    squares = sum((seen[p, s] - expected) ** 2 / expected for p in range(length) for s in range(length))
    freedom = (length - 1) ** 2
    assert squares < freedom + 6 * (2 * freedom) ** 0.5 + 6


def test_neighbours_are_torn_apart():
    order = Shuffled(10_000, seed=5).at(1, range(10_000))
    close = sum(abs(a - b) <= 10 for a, b in pairwise(order))
    assert close < 60, "about 20 of 10,000 pairs are close by chance"


def test_weighted_samples_are_drawn_by_their_weights_and_those_of_none_never():
    weights = [1.0, 0.0, 3.0, 6.0, 0.0]
    drawn = Counter(Weighted(weights, seed=2, draws=100_000).at(0, range(100_000)))
    assert set(drawn) == {0, 2, 3}
    for sample, weight in enumerate(weights):
        assert drawn[sample] == pytest.approx(weight * 10_000, rel=0.05)


def test_each_draw_is_a_position_of_its_own():
    order = Weighted([1] * 100, seed=3)
    whole = order.at(4, range(100))
    assert [order.at(4, range(p, p + 1))[0] for p in range(100)] == whole
    assert order.at(5, range(100)) != whole


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ([], "there are no samples"),
        ([0.0, 0.0], "the weights add up to 0.0"),
        ([1.0, -1.0], "the weight of sample 1 is -1.0"),
        ([float("nan")], "the weight of sample 0 is nan"),
        ([1e308, 1e308], "the weights add up to inf"),
    ],
)
def test_weights_that_nothing_can_be_drawn_by_are_refused(weights, why):
    with pytest.raises(BadOrder, match=why):
        Weighted(weights, seed=0)


def test_an_empty_dataset_is_refused():
    with pytest.raises(BadOrder, match="the dataset is empty"):
        Shuffled(0, seed=0)


def test_orders_are_made_again_from_their_facts():
    for order in (Sequential(9), Shuffled(9, 4)):
        again = order_from(order.facts)
        assert again is not None and again.at(2, range(9)) == order.at(2, range(9))
    assert order_from(Weighted([1], 0).facts) is None
    assert order_from({"kind": "shuffled", "length": -1, "seed": 0}) is None
