"""In a world of any size, every sample of an epoch is in one batch, and every sample of a batch is given to
one worker."""

from dataclasses import replace
from itertools import cycle

from hypothesis import given
from hypothesis import strategies as st

from elasticd.data.dealing import Portion, cut, deal, next_batch, parts_in_turns, parts_of

counts = st.integers(1, 40)


@given(st.integers(0, 200), counts)
def test_pieces_follow_each_other_and_differ_by_at_most_one(count, parts):
    pieces = cut(count, parts)
    assert [i for piece in pieces for i in piece] == list(range(count))
    assert len(pieces) == parts
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@given(st.integers(1, 60), st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_batches_use_each_sample_of_an_epoch_once_also_when_their_size_changes(length, sizes):
    epoch = position = 0
    used = []
    for size in cycle(sizes):
        batch = next_batch(epoch, position, length=length, size=size)
        if batch.epoch == 2:
            break
        assert batch.samples == min(size, length - batch.first)
        used += [(batch.epoch, i) for i in range(batch.first, batch.end)]
        epoch, position = batch.epoch, batch.end
    assert used == [(epoch, i) for epoch in range(2) for i in range(length)]


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
    assert all(p.weight == len(p.samples) / samples for p in parts), "each sample weighs the same"


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


@given(counts, counts, st.integers(1, 60), st.integers(1, 4))
def test_in_turns_all_workers_have_as_many_parts_and_end_each_turn_together(
    virtual_ranks, world, samples, accumulate
):
    cutting = {"samples": samples, "virtual_ranks": virtual_ranks, "accumulate": accumulate}
    dealt = [parts_in_turns(rank, world, **cutting) for rank in range(world)]
    computed = sorted((p for parts in dealt for p in parts if p.counts), key=lambda p: p.samples.start)
    assert [replace(p, last=False) for p in computed] == [
        replace(p, last=False) for p in parts_of(0, 1, **cutting)
    ]
    for together in zip(*dealt, strict=True):
        assert [p.virtual_rank % world for p in together] == list(range(world))
        assert len({p.virtual_rank // world for p in together}) == 1
        assert len({p.closes for p in together}) == 1
        assert all(p.samples and (p.weight > 0) == p.counts for p in together)
    for parts in dealt:
        assert [p.last for p in parts] == [False] * (len(parts) - 1) + [True]
        opened = [p.virtual_rank for p in parts if p.opens]
        assert opened == [p.virtual_rank for p in parts if p.closes] == sorted(set(opened))


def test_a_worker_with_fewer_parts_repeats_some_that_do_not_count():
    def seen(rank):
        return [
            (p.virtual_rank, p.samples, p.weight) for p in parts_in_turns(rank, 2, samples=6, virtual_ranks=3)
        ]

    assert seen(0) == [(0, range(2), 1 / 3), (2, range(4, 6), 1 / 3)]
    assert seen(1) == [(1, range(2, 4), 1 / 3), (3, range(4, 6), 0.0)]
