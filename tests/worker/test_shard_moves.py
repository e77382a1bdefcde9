"""The plan after a change of world: the commit from which workers continue, and which rank sends which part
to which rank."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.channel.worker_messages import Source
from elasticd.worker.sharding.moves import Passing, guardians, heirs, plan_moves, plan_passing, replicas
from elasticd.worker.sharding.spans import (
    INITIAL,
    CommitPoint,
    HeldShard,
    Span,
    Spans,
    all_missing,
    missing,
    newest_whole_point,
    nothing,
    source_of,
    whole,
)

AT = CommitPoint(1, 4, 0)
LATER = CommitPoint(1, 5, 0)


def chunks(rows: int, row: int, world: int) -> list[Span]:
    """Return the rows of each rank, as FSDP2 cuts them: 5 rows on 3 ranks are 2, 2 and 1."""
    each = -(-rows // world)
    return [Span(min(r * each, rows) * row, min((r + 1) * each, rows) * row) for r in range(world)]


def laid_out(shapes: list[tuple[int, int]], world: int) -> list[Spans]:
    """Return the spans of each rank. ``shapes``: for each parameter, its rows and the elements of a row."""
    by_parameter = [chunks(rows, row, world) for rows, row in shapes]
    return [tuple(spans[rank] for spans in by_parameter) for rank in range(world)]


def cut(size: int, part: int, parts: int) -> Spans:
    """Return one of several equal parts of one parameter."""
    return (Span(size * part // parts, size * (part + 1) // parts),)


def sizes_of(shapes: list[tuple[int, int]]) -> list[int]:
    return [rows * row for rows, row in shapes]


@pytest.mark.parametrize(
    ("size", "spans", "absent"),
    [
        (5, [], 5),
        (0, [], 0),
        (5, [Span(0, 5)], 0),
        (5, [Span(2, 5), Span(0, 2)], 0),
        (5, [Span(0, 2), Span(4, 5)], 2),
        (5, [Span(0, 4), Span(1, 3)], 1),
        (5, [Span(5, 5), Span(0, 0)], 5),
    ],
)
def test_elements_that_no_span_has_are_counted(size: int, spans: list[Span], absent: int) -> None:
    assert missing(size, spans) == absent


def test_five_rows_on_three_ranks_are_moved_to_two() -> None:
    """Rank 1 of three has ended. The next rank guards its rows."""
    before, after = laid_out([(5, 3)], 3), laid_out([(5, 3)], 2)
    held = [[HeldShard(AT, before[0])], [HeldShard(AT, before[2]), HeldShard(AT, before[1])]]
    moves = [(move.span, move.sender, move.shard, move.receiver) for move in plan_moves(held, AT, after)]
    assert moves == [
        (Span(0, 6), 0, 0, 0),
        (Span(6, 9), 1, 1, 0),
        (Span(9, 12), 1, 1, 1),
        (Span(12, 15), 1, 0, 1),
    ]


def test_a_newcomer_is_sent_its_part_and_holders_share_the_work() -> None:
    held = [[HeldShard(AT, whole([8]))], [HeldShard(AT, whole([8]))], [], []]
    moves = plan_moves(held, AT, [nothing([8]), nothing([8]), *laid_out([(8, 1)], 2)])
    assert [(move.sender, move.receiver) for move in moves] == [(0, 2), (1, 3)]


def test_an_element_that_no_worker_holds_is_an_error_of_the_caller() -> None:
    held = [[HeldShard(AT, cut(4, 0, 2)), HeldShard(LATER, whole([4]))]]
    with pytest.raises(ValueError, match="element 2 is held nowhere"):
        plan_moves(held, AT, [whole([4])])


ONE, TWO = (cut(4, part, 2) for part in range(2))


@pytest.mark.parametrize(
    ("held", "point"),
    [
        ([], None),
        ([[], [HeldShard(INITIAL, whole([4]))]], None),
        ([[HeldShard(AT, ONE)], [HeldShard(AT, TWO)]], AT),
        ([[HeldShard(AT, ONE), HeldShard(LATER, ONE)], [HeldShard(AT, TWO)]], AT),
        ([[HeldShard(AT, ONE), HeldShard(LATER, ONE)], [HeldShard(LATER, TWO)]], LATER),
        ([[HeldShard(AT, ONE)], [HeldShard(LATER, TWO)]], None),
        ([[HeldShard(CommitPoint(1, 6, 0), whole([4]))], [HeldShard(CommitPoint(2, 5, 0), whole([4]))]],
         CommitPoint(2, 5, 0)),
        ([[HeldShard(AT, whole([4])), HeldShard(CommitPoint(1, 4, 1), whole([4]))]], CommitPoint(1, 4, 1)),
    ],
)  # fmt: skip
def test_the_newest_commit_is_gone_on_from_of_which_all_parts_are_there(
    held: list[list[HeldShard]], point: CommitPoint | None
) -> None:
    assert newest_whole_point([4], held) == point


shapes = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), min_size=1, max_size=4)


@given(shapes, st.lists(st.integers(1, 7), min_size=2, max_size=5), st.data())
def test_through_any_sequence_of_worlds_each_rank_gets_exactly_its_elements_of_one_step(
    shapes: list[tuple[int, int]], worlds: list[int], data: st.DataObject
) -> None:
    """Each world loses at most as many workers as there are copies of a shard. Workers may be one commit
    apart."""
    sizes = sizes_of(shapes)
    redundancy = data.draw(st.integers(0, 2))
    # The content of each element: its step, and its place.
    contents = {AT: 4, LATER: 5}
    for before, after in pairwise(worlds):
        spans = laid_out(shapes, before)
        guards = guardians(["one"] * before, redundancy)
        lost = data.draw(st.sets(st.integers(0, before - 1), max_size=min(redundancy, before - 1)))
        behind = data.draw(st.sets(st.integers(0, before - 1)))
        held: list[list[HeldShard]] = []
        for rank in range(before):
            if rank not in lost:
                mine = [spans[rank], *(spans[r] for r in range(before) if rank in guards[r])]
                points = (AT,) if rank in behind else (AT, LATER)
                held.append([HeldShard(point, its) for point in points for its in mine])
        held += [[]] * max(0, after - len(held))  # newcomers
        point = newest_whole_point(sizes, held)
        assert point is not None
        assert point == LATER or behind - lost
        wanted = laid_out(shapes, after)
        got: list[list[Counter[int]]] = [[Counter() for _ in sizes] for _ in range(max(after, len(held)))]
        wanted += [nothing(sizes)] * (len(held) - after)
        for parameter, span, sender, shard, receiver in plan_moves(held, point, wanted):
            source = held[sender][shard]
            assert contents[source.point] == point.step
            its = source.spans[parameter]
            assert its.first <= span.first < span.end <= its.end
            got[receiver][parameter].update(range(*span))
        for rank, each in enumerate(wanted):
            assert got[rank] == [Counter(range(*span)) for span in each]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), st.integers(0, 3))
def test_copies_are_on_other_nodes_where_there_are_any_and_evenly_spread(
    nodes: list[str], redundancy: int
) -> None:
    guards = guardians(nodes, redundancy)
    load = Counter(guard for its in guards for guard in its)
    for rank, its in enumerate(guards):
        assert rank not in its
        assert len(set(its)) == len(its) == min(redundancy, len(nodes) - 1)
        others = {node for node in nodes if node != nodes[rank]}
        assert len({nodes[guard] for guard in its} - {nodes[rank]}) == min(len(others), len(its))
    if len(set(nodes)) in (1, len(nodes)):
        assert max(load.values(), default=0) - min((load[r] for r in range(len(nodes))), default=0) <= 1


def test_on_two_equal_nodes_each_rank_guards_one_rank_of_the_other() -> None:
    assert guardians(["a", "a", "b", "b"], 1) == [(2,), (3,), (0,), (1,)]


@pytest.mark.parametrize(
    ("going", "redundancy", "found"),
    [
        ([False, True, False], 0, {1: 0}),
        ([True, True, False], 0, {0: 2, 1: 2}),
        ([True, True, False, False], 0, {0: 2, 1: 3}),
        ([False, True, False], 1, {}),
        ([False, True, True], 1, {1: 0}),
        ([True, True], 0, {}),
        ([False, False], 0, {}),
    ],
)
def test_a_leaving_worker_hands_over_what_no_staying_guardian_has(
    going: list[bool], redundancy: int, found: dict[int, int]
) -> None:
    assert heirs(going, guardians([""] * len(going), redundancy)) == found


def hybrid(replicate: int, unit: int) -> list[Spans]:
    """Return the spans of each rank where each shard of four rows has ``replicate`` replicas."""
    return laid_out([(4, 2)], unit) * replicate


def test_ranks_with_the_same_spans_are_replicas() -> None:
    assert replicas(hybrid(2, 2)) == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert replicas(hybrid(1, 3)) == [(0,), (1,), (2,)]


@pytest.mark.parametrize(
    ("nodes", "redundancy", "found"),
    [
        ("abcd", 1, [(), (), (), ()]),
        ("aabb", 1, [(), (), (), ()]),
        ("aaaa", 1, [(), (), (), ()]),
        ("abab", 1, [(1,), (2,), (), ()]),
        ("aabb", 2, [(1,), (2,), (), ()]),
        ("aabb", 3, [(1, 3), (2, 0), (), ()]),
        ("aabb", 9, [(1, 3), (2, 0), (), ()]),
    ],
    ids=lambda value: str(value) if not isinstance(value, list) else "",
)
def test_replicas_elsewhere_count_as_copies_and_only_one_of_them_sends_more(
    nodes: str, redundancy: int, found: list[tuple[int, ...]]
) -> None:
    assert guardians(nodes, redundancy, replicas(hybrid(2, 2))) == found


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.data())
def test_of_hybrid_sharding_too_any_loss_up_to_the_redundancy_leaves_all_parts(
    replicate: int, unit: int, redundancy: int, data: st.DataObject
) -> None:
    size, spans = replicate * unit, hybrid(replicate, unit)
    nodes = data.draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size))
    guards = guardians(nodes, redundancy, replicas(spans))
    lost = data.draw(st.sets(st.integers(0, size - 1), max_size=min(redundancy, size - 1)))
    held = [
        [spans[rank], *(spans[owner] for owner in range(size) if rank in guards[owner])]
        for rank in range(size)
        if rank not in lost
    ]
    assert all_missing([8], [shard for its in held for shard in its]) == 0


@pytest.mark.parametrize(
    ("going", "found"),
    [
        ([True, True, False, False], {}),
        ([True, False, True, False], {0: 1}),
        ([True, True, True, False], {0: 3}),
        ([True, True, True, True], {}),
    ],
)
def test_a_leaving_worker_hands_over_what_no_staying_replica_has(
    going: list[bool], found: dict[int, int]
) -> None:
    groups = replicas(hybrid(2, 2))
    assert heirs(going, guardians("aaaa", 0, groups), groups) == found


A, B, C = (cut(12, part, 3) for part in range(3))
WHOLE, NONE = (Span(0, 5),), (Span(0, 0),)


@pytest.mark.parametrize(
    ("held", "going", "passed"),
    [
        ([[A], [B]], [False, True], [Passing(1, 0, 0)]),
        ([[A, B], [B]], [False, True], []),
        ([[A], [B, C], [C]], [True, True, False], [Passing(0, 0, 2), Passing(1, 0, 2)]),
        ([[], [], [A, B]], [False, False, True], [Passing(2, 0, 0), Passing(2, 1, 1)]),
        ([[A], [B]], [True, True], []),
        ([[A + WHOLE, B + NONE], [B + WHOLE]], [False, True], []),
        ([[B + NONE], [B + WHOLE]], [False, True], [Passing(1, 0, 0)]),
    ],
    ids=[
        "one stays",
        "there is a copy",
        "two leave",
        "all are new",
        "nobody stays",
        "there is a copy without a replicated parameter",
        "a replicated parameter leaves",
    ],
)
def test_workers_outside_a_later_round_give_each_shard_once_to_a_staying_worker_that_lacks_it(
    held: list[list[Spans]], going: list[bool], passed: list[Passing]
) -> None:
    shards = [[HeldShard(LATER, A), *(HeldShard(AT, spans) for spans in its)] for its in held]
    behind = [Passing(sender, shard + 1, receiver) for sender, shard, receiver in passed]
    assert plan_passing(shards, AT, going) == behind


@pytest.mark.parametrize(
    ("held", "source"),
    [
        ([[(A, False)], [(B, False)], [(C, False)]], Source.SURVIVOR),
        ([[(A, False), (C, False)], [(B, False)]], Source.SURVIVOR),
        ([[(A, False), (C, True)], [(B, False), (A, True)]], Source.COPY),
    ],
    ids=["its own workers", "handed over", "a lost worker's copy"],
)
def test_whether_parts_come_from_their_workers_or_from_copies_is_told(
    held: list[list[tuple[Spans, bool]]], source: Source
) -> None:
    shards = [[HeldShard(AT, spans, guarded, 3) for spans, guarded in its] for its in held]
    assert source_of([12], shards, AT) is source


def test_a_lost_workers_part_that_another_has_as_its_own_comes_from_a_replica() -> None:
    halves = [cut(12, part, 2) for part in (0, 1, 0)]
    assert source_of([12], [[HeldShard(AT, half, ranks=4)] for half in halves], AT) is Source.REPLICA
