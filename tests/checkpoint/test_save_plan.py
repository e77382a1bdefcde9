"""Each byte is written by one rank, and each rank writes about as much."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import chain

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.checkpoint.client import save_plan
from elasticd.checkpoint.client.save_plan import (
    SHARE_MIN,
    WHOLE_BELOW,
    WRITERS,
    RankContent,
    share_out,
    writers,
)
from elasticd.checkpoint.format.layout import (
    PART_MAX,
    Box,
    Holding,
    Layout,
    RankShare,
    StateForm,
    TensorForm,
    TensorPart,
    box_of,
    encode_shares,
    index_of,
    lay_out,
)
from elasticd.checkpoint.format.manifest import BadCheckpoint, Blob


def whole(key: str, *shape: int) -> TensorPart:
    return TensorPart(key, "float32", 4, shape, (0,) * len(shape), shape)


def form(part: TensorPart) -> TensorForm:
    return TensorForm(part.key, (part.key,), part.dtype, part.itemsize, part.shape)


def content(parts: Sequence[TensorPart], buffers: Sequence[str] = ()) -> RankContent:
    boxes = tuple(box_of(part.offsets, part.sizes) for part in parts)
    return RankContent(StateForm(tuple(map(form, parts)), tuple(buffers)), Holding(boxes, {}))


def planned(held: Sequence[RankContent]) -> list[list[TensorPart]]:
    """Return the parts that each rank writes."""
    laid_out = (
        lay_out(0, its.form, its.holding, share) for its, share in zip(held, share_out(held), strict=True)
    )
    return [[part for part, _ in shard.parts] for shard in laid_out]


def deal(held: Sequence[Sequence[TensorPart]], buffers: Sequence[str] = ()) -> list[list[TensorPart]]:
    return planned([content(parts, buffers) for parts in held])


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


def test_replicas_of_a_shard_write_half_of_its_tensors_each():
    def shard(n: int) -> list[TensorPart]:
        return [TensorPart(f"w{k}", "float32", 4, (8, 2), (4 * n, 0), (4, 2)) for k in range(6)]

    kinds = [content(shard(0)), content(shard(1))]
    kinds[1] = RankContent(kinds[0].form, kinds[1].holding)
    dealt = planned([kinds[0], kinds[1], kinds[0], kinds[1]])
    assert [[p.key for p in its] for its in dealt] == [["w0", "w2", "w4"]] * 2 + [["w1", "w3", "w5"]] * 2
    assert all(p.offsets[0] == 4 * (rank % 2) for rank, its in enumerate(dealt) for p in its)


def test_a_part_larger_than_a_frame_is_cut(monkeypatch):
    part = whole("w", 3000, PART_MAX // 4000)
    [its] = deal([[part]])
    assert sum(p.size for p in its) == part.size and all(p.size <= PART_MAX for p in its)


@given(SHAPES, SHAPES, st.integers(1, 9))
def test_what_may_differ_is_written_by_the_first_rank_and_the_rest_evenly_by_all(shapes, buffers, world):
    parts = [whole(f"t{n}", *shape) for n, shape in enumerate(shapes)]
    together = [whole(f"b{n}", *shape) for n, shape in enumerate(buffers)]
    dealt = deal([[*together, *parts]] * world, [part.key for part in together])
    written = [row for its in dealt for part in its for row in sorted(rows(part))]
    assert sorted(written) == sorted(row for part in (*parts, *together) for row in rows(part))
    assert [part for part in dealt[0] if part.key.startswith("b")] == together
    begun, total = (sum(part.size for part in some) for some in (together, [*parts, *together]))
    grain = max((p.size // p.sizes[0] if p.size >= WHOLE_BELOW else p.size for p in parts), default=0)
    for its in dealt:
        assert sum(p.size for p in its) <= max(begun, total / world) + 2 * max(grain, WHOLE_BELOW)


FORMS = {key: TensorForm(key, (key,), "float32", 4, (9, 7000)) for key in "abc"}
BOXES: st.SearchStrategy[Box | None] = st.none() | st.builds(
    lambda first, count: box_of((first, 0), (count, 7000)), st.integers(0, 4), st.integers(0, 4)
)


@st.composite
def contents(draw: st.DrawFn) -> RankContent:
    boxes = draw(st.dictionaries(st.sampled_from("abc"), BOXES))
    rooms = draw(st.dictionaries(st.sampled_from("xyz"), st.integers(1, 99)))
    buffers = draw(st.sets(st.sampled_from("abc"), max_size=1))
    tensors = tuple(FORMS[key] for key in boxes)
    objects: dict[str, tuple[int, tuple[str | int, ...]]] = {key: (n, (key,)) for key, n in rooms.items()}
    return RankContent(StateForm(tensors, tuple(buffers)), Holding(tuple(boxes.values()), objects))


@settings(max_examples=200)
@given(
    st.lists(contents(), min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
    st.booleans(),
)
def test_each_part_is_written_once_by_a_rank_that_holds_the_part(kinds, ranks, known):
    held = [kinds[n % len(kinds)] for n in ranks]
    if not known:  # which ranks have all alike
        held = [RankContent(copy(its.form), copy(its.holding)) for its in held]
    has = [
        {
            row
            for tensor, box in zip(its.form.tensors, its.holding.boxes, strict=True)
            if box is not None
            for row in rows_of(tensor.part(box))
        }
        for its in held
    ]
    boxes = {
        (tensor.key, box)
        for its in held
        for tensor, box in zip(its.form.tensors, its.holding.boxes, strict=True)
        if box is not None
    }
    written = [rows_of(part) for its in planned(held) for part in its]
    expected = [rows_of(FORMS[key].part(box)) for key, box in boxes]
    assert sorted(chain.from_iterable(written)) == sorted(chain.from_iterable(expected))
    for its, had in zip(planned(held), has, strict=True):
        assert all(set(rows_of(part)) <= had for part in its)


def rows_of(part: TensorPart) -> list[tuple[str, int]]:
    return [(part.key, part.offsets[0] + n) for n in range(part.sizes[0])]


def test_the_index_that_the_saver_makes_has_each_part_where_its_rank_lays_it_out():
    forms = StateForm(tuple(FORMS.values()))
    held = [
        RankContent(
            forms,
            Holding(
                (box_of((3 * rank, 0), (3, 7000)), box_of((0, 0), (9, 7000)), None),
                {f"seen{rank}": (99, (f"seen{rank}",))},
            ),
        )
        for rank in range(3)
    ]
    shares = share_out(held)
    index = index_of(encoded(held, shares))
    assert [chunk.offsets for chunk in index.tensors["a"].chunks] == [(0, 0), (3, 0), (6, 0)]
    assert sorted(index.paths) == ["a", "b", "c", "seen0", "seen1", "seen2"]
    for rank, (its, share) in enumerate(zip(held, shares, strict=True)):
        shard = lay_out(rank, its.form, its.holding, share)
        places = [
            (key, chunk.offsets, chunk.sizes, chunk.at)
            for key, tensor in index.tensors.items()
            for chunk in tensor.chunks
            if chunk.file == rank
        ]
        assert places == [(part.key, part.offsets, part.sizes, at) for part, at in shard.parts]
        assert index.blobs[f"seen{rank}"] == Blob(rank, *shard.blobs[0][1:])


def encoded(held: Sequence[RankContent], shares: Sequence[RankShare]) -> bytes:
    forms, holdings = (
        [msgspec.json.encode(getattr(its, name)) for its in held] for name in ("form", "holding")
    )
    return encode_shares(forms, holdings, [msgspec.json.encode(its) if its else b"" for its in shares])


TWO = RankContent(StateForm((form(whole("w", 2)),)), Holding(("0,2",), {}))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        encoded([TWO, TWO], [RankShare((0,))] * 2),  # twice
        encoded([TWO], [RankShare((1,))]),
        encoded([TWO], [RankShare(parts=(TensorPart("w", "float32", 4, (2,), (0,), (-2,)),))]),
        encoded([TWO], [RankShare(parts=(TensorPart("w", "float32", 4, (2,), (1,), (2,)),))]),
        *(
            encoded([RankContent(TWO.form, Holding((box,), {}))], [RankShare((0,))])
            for box in ("", "0", "0,1,2", "0,x", "1,2", "-1,2")
        ),
        encoded([TWO], [RankShare((0,))]).replace(b"[[0,0,0]]", b"[[0,0,1]]"),
        encoded([TWO], [RankShare((0,))]).replace(b'"path"', b'"other"').replace(b'["w"]', b"[]"),
    ],
)
def test_shares_of_which_nothing_could_be_loaded_are_refused(raw: bytes):
    layout = Layout(raw)
    with pytest.raises(BadCheckpoint, match="^the index of its shards cannot be made: "):
        _ = layout.metadata


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


def test_a_box_of_no_memory_s_size_is_refused_and_not_cut_into_pieces():
    huge = TensorForm("w", ("w",), "float32", 4, (1 << 60,))
    held = RankContent(StateForm((huge,)), Holding((box_of((0,), (1 << 60,)),), {}))
    with pytest.raises(ValueError, match="a part of w has 4611686018427387904 bytes"):
        index_of(encoded([held], [RankShare((0,))]))
