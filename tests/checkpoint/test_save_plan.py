"""Each byte is written by one rank, and each rank writes about as much."""

from __future__ import annotations

from copy import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.checkpoint.client import save_plan
from elasticd.checkpoint.client.save_plan import (
    PART_MAX,
    SHARE_MIN,
    WHOLE_BELOW,
    WRITERS,
    RankContent,
    TensorPart,
    deal,
    index_of,
    share_out,
    writers,
)


def whole(key: str, *shape: int) -> TensorPart:
    return TensorPart(key, "float32", 4, shape, (0,) * len(shape), shape)


def rows(part: TensorPart) -> set[tuple[str, int]]:
    first = part.offsets[0] if part.offsets else 0
    count = part.sizes[0] if part.sizes else 1
    return {(part.key, first + n) for n in range(count)}


SHAPES = st.lists(st.lists(st.integers(1, 700), max_size=2).map(tuple), max_size=12)


@given(SHAPES, st.integers(1, 9))
def test_every_row_of_what_all_hold_is_written_once(shapes, world):
    parts = [whole(f"t{n}", *shape) for n, shape in enumerate(shapes)]
    dealt = [part for its in deal([parts] * world) for part in its]
    written = [row for part in dealt for row in sorted(rows(part))]
    assert sorted(written) == sorted(row for part in parts for row in rows(part))


@given(SHAPES, st.integers(2, 9))
def test_no_rank_writes_much_more_than_its_share(shapes, world):
    parts = [whole(f"t{n}", *shape) for n, shape in enumerate(shapes)]
    total = sum(p.size for p in parts)
    grain = max((p.size // p.sizes[0] if p.size >= WHOLE_BELOW else p.size for p in parts), default=0)
    for its in deal([parts] * world):
        assert sum(p.size for p in its) <= total / world + 2 * max(grain, WHOLE_BELOW)


def test_one_big_table_is_cut_between_rows():
    table = whole("wte", 50_000, 256)
    sizes = [sum(p.size for p in its) for its in deal([[table]] * 4)]
    assert max(sizes) - min(sizes) <= 2 * 256 * 4


def test_each_rank_writes_the_shard_that_it_holds():
    held = [[TensorPart("w", "float32", 4, (8, 2), (4 * r, 0), (4, 2))] for r in range(2)]
    assert [its[0].offsets for its in deal(held)] == [(0, 0), (4, 0)]


def test_a_shard_that_two_of_four_have_is_written_by_one_of_them():
    def shard(n: int) -> TensorPart:
        return TensorPart("w", "float32", 4, (8, 2), (4 * n, 0), (4, 2))

    dealt = deal([[shard(0)], [shard(1)], [shard(0)], [shard(1)]])
    assert sorted(p.offsets for its in dealt for p in its) == [(0, 0), (4, 0)]
    assert all(p.offsets[0] == 4 * (rank % 2) for rank, its in enumerate(dealt) for p in its)


def test_a_part_larger_than_a_frame_is_cut(monkeypatch):
    part = whole("w", 3000, PART_MAX // 4000)
    [its] = deal([[part]])
    assert sum(p.size for p in its) == part.size and all(p.size <= save_plan.PART_MAX for p in its)


@given(SHAPES, SHAPES, st.integers(1, 9))
def test_what_may_differ_is_written_by_the_first_rank_and_the_rest_evenly_by_all(shapes, buffers, world):
    parts = [whole(f"t{n}", *shape) for n, shape in enumerate(shapes)]
    together = [whole(f"b{n}", *shape) for n, shape in enumerate(buffers)]
    dealt = deal([[*together, *parts]] * world, {part.key for part in together})
    written = [row for its in dealt for part in its for row in sorted(rows(part))]
    assert sorted(written) == sorted(row for part in (*parts, *together) for row in rows(part))
    assert [part for part in dealt[0] if part.key.startswith("b")] == together
    begun, total = (sum(part.size for part in some) for some in (together, [*parts, *together]))
    grain = max((p.size // p.sizes[0] if p.size >= WHOLE_BELOW else p.size for p in parts), default=0)
    for its in dealt:
        assert sum(p.size for p in its) <= max(begun, total / world) + 2 * max(grain, WHOLE_BELOW)


def part(key: str, first: int, count: int) -> TensorPart:
    return TensorPart(key, "float32", 4, (9, 7000), (first, 0), (count, 7000))


PARTS = st.lists(st.builds(part, st.sampled_from("abc"), st.integers(0, 4), st.integers(0, 4)), unique=True)
CONTENTS = st.builds(
    lambda parts, rooms, buffers: RankContent(
        tuple(parts), rooms, {key: (key,) for key in rooms}, tuple(buffers)
    ),
    PARTS,
    st.dictionaries(st.sampled_from("xyz"), st.integers(1, 99)),
    st.sets(st.sampled_from("abc"), max_size=1),
)


@settings(max_examples=200)
@given(st.lists(CONTENTS, min_size=1, max_size=3), st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_the_plan_is_the_same_without_the_shortcut_for_equal_ranks(kinds, ranks):
    held = [kinds[n % len(kinds)] for n in ranks]
    apart = [copy(content) for content in held]
    assert share_out(held) == share_out(apart)
    assert index_of(held, share_out(held)) == index_of(apart, share_out(apart))


@given(st.integers(1, 3 * WRITERS), st.data())
def test_a_large_world_has_few_writers_unless_each_has_enough_to_write(world, data):
    ranks = sorted(data.draw(st.sets(st.integers(0, world - 1), min_size=1)))
    for size in (0, WRITERS * SHARE_MIN, 2 * WRITERS * SHARE_MIN, 10 * WRITERS * SHARE_MIN):
        chosen = writers(ranks, world, size)
        assert set(chosen) <= set(ranks) and len(set(chosen)) == len(chosen) >= 1
        assert world > WRITERS or chosen == ranks
        assert len(chosen) <= max(WRITERS, size // SHARE_MIN)


@given(SHAPES, st.integers(1, 30), st.integers(0, 3_000_000))
def test_each_rank_gets_the_rows_up_to_its_share_of_all_bytes(shapes, world, begun):
    parts = [whole(f"t{n}", *shape) for n, shape in enumerate(shapes)]
    assert list(save_plan._sliced(parts, world, begun)) == list(rank_by_rank(parts, world, begun))


def rank_by_rank(parts, world, begun):
    total, at = begun + sum(part.size for part in parts), begun
    for its in parts:
        if its.size < WHOLE_BELOW or not its.sizes or its.sizes[0] == 1:
            yield min(world - 1, (2 * at + its.size) * world // (2 * total) if total else 0), its
        else:
            first = 0
            for rank in range(world):
                share = round((total * (rank + 1) // world - at) / (its.size // its.sizes[0]))
                until = its.sizes[0] if rank == world - 1 else min(its.sizes[0], max(first, share))
                if until > first:
                    yield rank, its.rows(first, until - first)
                    first = until
        at += its.size
