"""Every sample of a global batch is some worker's, once, in any world; how they are put together is not
the world's affair."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.data.dealing import Portion, cut, deal, parts_of

counts = st.integers(1, 40)


@given(st.integers(0, 200), counts)
def test_pieces_follow_each_other_and_differ_by_at_most_one(count, parts):
    pieces = cut(count, parts)
    assert [i for piece in pieces for i in piece] == list(range(count))
    assert len(pieces) == parts
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_virtual_ranks_are_dealt_by_rank_in_blocks():
    assert deal(8, 3) == (range(2), range(2, 5), range(5, 8))
    assert deal(2, 3) == (range(0), range(1), range(1, 2)), "a world that is larger leaves some idle"


@given(counts, counts, st.integers(1, 60), st.integers(1, 4))
def test_any_world_computes_the_same_parts_of_a_batch(virtual_ranks, world, samples, accumulate):
    def computed(world: int) -> list[Portion]:
        return [
            part
            for rank in range(world)
            for part in parts_of(
                rank, world, samples=samples, virtual_ranks=virtual_ranks, accumulate=accumulate
            )
        ]

    def seen(parts: list[Portion]) -> list[tuple[object, ...]]:
        return [(p.virtual_rank, p.samples, p.weight, p.opens, p.closes) for p in parts]

    parts = computed(world)
    assert seen(parts) == seen(computed(1))
    assert [i for part in parts for i in part.samples] == list(range(samples))
    assert all(part.samples for part in parts)
    assert sum(Fraction(len(p.samples), samples) for p in parts) == 1
    assert sum(p.weight for p in parts) == pytest.approx(1)


@given(counts, counts, st.integers(1, 60), st.integers(1, 4))
def test_a_worker_knows_its_last_part_and_where_a_virtual_rank_begins_and_ends(
    virtual_ranks, world, samples, accumulate
):
    for rank in range(world):
        parts = parts_of(rank, world, samples=samples, virtual_ranks=virtual_ranks, accumulate=accumulate)
        assert [p.last for p in parts] == [False] * (len(parts) - 1) + [True] * bool(parts)
        of_whom = [p.virtual_rank for p in parts]
        assert [p.opens for p in parts] == [i == 0 or of_whom[i - 1] != v for i, v in enumerate(of_whom)]
        assert [p.closes for p in parts] == [
            i == len(parts) - 1 or of_whom[i + 1] != v for i, v in enumerate(of_whom)
        ]
