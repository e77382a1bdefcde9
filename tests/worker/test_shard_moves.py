"""The plan after a change of world: the commit from which workers continue, and which rank sends which part
to which rank."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticd.channel.worker_messages import Source
from elasticd.worker.sharding.held import INITIAL, CommitPoint, HeldShard, newest_whole_point, source_of
from elasticd.worker.sharding.moves import MovePlan, Passing, guardians, heirs, plan_passing, replicas
from elasticd.worker.sharding.parts import (
    NOTHING,
    WHOLE,
    Cut,
    Part,
    Shapes,
    Span,
    complete_cut,
    missing,
    parts_of_ranks,
)
from tests.bench.scale import counted

AT = CommitPoint(1, 4, 0)
LATER = CommitPoint(1, 5, 0)


def shaped(*shapes: tuple[int, int]) -> Shapes:
    """Return the shapes of parameters with so many rows, and so many elements in a row."""
    return Shapes(tuple(rows for rows, _ in shapes), tuple(row for _, row in shapes))


def part(place: int, parts: int, *uncut: int, copy: bool = False) -> Part:
    return Part(Cut(parts, uncut), place, copy)


@pytest.mark.parametrize(
    ("rows", "row", "parts", "spans"),
    [
        (5, 3, 3, [(0, 6), (6, 12), (12, 15)]),
        (2, 1, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        (0, 4, 2, [(0, 0), (0, 0)]),
        (4, 0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_rows_are_cut_as_fully_shard_cuts_them(
    rows: int, row: int, parts: int, spans: list[tuple[int, int]]
) -> None:
    shapes = shaped((rows, row))
    assert [shapes.spans(part(place, parts)) for place in range(parts)] == [(Span(*its),) for its in spans]
    chunks = [len(chunk.flatten()) for chunk in torch.empty(rows, row).chunk(parts)]
    assert [size for size in chunks if size] == [end - first for first, end in spans if end > first]


def test_a_copy_lacks_what_is_not_cut() -> None:
    shapes = shaped((4, 2), (3, 1))
    assert shapes.spans(part(1, 2, 1)) == (Span(4, 8), Span(0, 3))
    assert shapes.spans(part(1, 2, 1, copy=True)) == (Span(4, 8), Span(0, 0))
    assert shapes.spans(NOTHING) == (Span(0, 0), Span(0, 0))
    assert shapes.spans(WHOLE) == (Span(0, 8), Span(0, 3))


def test_models_with_other_shapes_are_told_apart() -> None:
    assert shaped((4, 2)).digest == shaped((4, 2)).digest
    assert len({shaped(*its).digest for its in (((4, 2),), ((2, 4),), ((4, 2), (1, 1)))}) == 3
    assert Shapes.of([torch.empty(5, 2, 3), torch.empty(()), torch.empty(0, 3)]) == shaped(
        (5, 6), (1, 1), (0, 0)
    )


@pytest.mark.parametrize(
    ("parts", "lost"),
    [
        ([], 14),
        ([part(0, 3, 1)], 4 + 4),
        ([part(0, 3, 1, copy=True)], 4 + 4 + 2),
        ([part(0, 3, 1), part(2, 3, 1, copy=True)], 4),
        ([part(place, 3, 1, copy=True) for place in range(3)], 2),
        ([part(place, 3, 1, copy=place > 0) for place in range(3)], 0),
        ([part(place, 9) for place in range(6)], 0),
        ([part(place, 9) for place in range(5)], 2),
        ([WHOLE], 0),
        ([NOTHING], 14),
    ],
)
def test_elements_that_no_part_has_are_counted(parts: list[Part], lost: int) -> None:
    """The model has a parameter of six rows, and one of two rows."""
    shapes = shaped((6, 2), (2, 1))
    assert missing(shapes, parts) == lost
    assert (complete_cut(shapes, parts) is None) is (lost > 0)


def test_what_is_not_cut_and_has_no_elements_is_not_missed() -> None:
    copies = [part(place, 2, 1, copy=True) for place in range(2)]
    assert complete_cut(shaped((4, 1), (0, 3)), copies) == Cut(2, (1,))
    assert complete_cut(shaped((4, 1), (1, 3)), copies) is None


def test_five_rows_on_three_ranks_are_moved_to_two() -> None:
    """Rank 1 of three has ended. The next rank guards its rows."""
    held = [[HeldShard(AT, part(0, 3))], [HeldShard(AT, part(2, 3)), HeldShard(AT, part(1, 3, copy=True))]]
    plan = MovePlan(shaped((5, 3)), held, AT, parts_of_ranks(Cut(2), 2))
    moves = [[(m.span, m.sender, m.shard, m.receiver) for m in plan.of_rank(rank)] for rank in range(2)]
    assert moves[0] == [(Span(0, 6), 0, 0, 0), (Span(6, 9), 1, 1, 0)]
    assert moves[1] == [(Span(6, 9), 1, 1, 0), (Span(9, 12), 1, 1, 1), (Span(12, 15), 1, 0, 1)]


def test_a_newcomer_is_sent_its_part_and_holders_share_the_work() -> None:
    held = [[HeldShard(AT, WHOLE)], [HeldShard(AT, WHOLE)], [], []]
    plan = MovePlan(shaped((8, 1)), held, AT, [NOTHING, NOTHING, *parts_of_ranks(Cut(2), 2)])
    assert [(move.sender, move.receiver) for rank in (2, 3) for move in plan.of_rank(rank)] == [
        (0, 2),
        (1, 3),
    ]


def test_replicas_take_turns_to_give_newcomers_the_same_part() -> None:
    held = [[HeldShard(AT, its)] for its in parts_of_ranks(Cut(2), 4)] + [[]] * 4
    plan = MovePlan(shaped((8, 1)), held, AT, parts_of_ranks(Cut(2), 8))
    assert [[move.sender for move in plan.of_rank(rank)] for rank in range(4, 8)] == [[0], [3], [2], [1]]


def test_a_commit_that_lacks_a_part_is_an_error_of_the_caller() -> None:
    held = [[HeldShard(AT, part(0, 2)), HeldShard(LATER, WHOLE)]]
    with pytest.raises(ValueError, match="parts of step 4 are held nowhere"):
        MovePlan(shaped((4, 1)), held, AT, [WHOLE])


ONE, TWO = part(0, 2), part(1, 2)


@pytest.mark.parametrize(
    ("held", "point"),
    [
        ([], None),
        ([[], [HeldShard(INITIAL, WHOLE)]], None),
        ([[HeldShard(AT, ONE)], [HeldShard(AT, TWO)]], AT),
        ([[HeldShard(AT, ONE), HeldShard(LATER, ONE)], [HeldShard(AT, TWO)]], AT),
        ([[HeldShard(AT, ONE), HeldShard(LATER, ONE)], [HeldShard(LATER, TWO)]], LATER),
        ([[HeldShard(AT, ONE)], [HeldShard(LATER, TWO)]], None),
        ([[HeldShard(AT, ONE)], [HeldShard(AT, NOTHING), HeldShard(AT, TWO)]], AT),
        ([[HeldShard(CommitPoint(1, 6, 0), WHOLE)], [HeldShard(CommitPoint(2, 5, 0), WHOLE)]],
         CommitPoint(2, 5, 0)),
        ([[HeldShard(AT, WHOLE), HeldShard(CommitPoint(1, 4, 1), WHOLE)]], CommitPoint(1, 4, 1)),
    ],
)  # fmt: skip
def test_the_newest_commit_is_gone_on_from_of_which_all_parts_are_there(
    held: list[list[HeldShard]], point: CommitPoint | None
) -> None:
    assert newest_whole_point(shaped((4, 1)), held) == point


shapes_of_models = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)), min_size=1, max_size=4)


@given(shapes_of_models, st.lists(st.integers(1, 9), min_size=2, max_size=5), st.data())
def test_through_any_sequence_of_worlds_each_rank_gets_exactly_its_elements_of_one_step(
    of_model: list[tuple[int, int]], worlds: list[int], data: st.DataObject
) -> None:
    """Each world loses at most as many workers as there are copies of a shard. Workers may be one commit
    apart. Each world may shard the parameters in units, and leave out others."""
    shapes = shaped(*of_model)
    redundancy = data.draw(st.integers(0, 2))
    cuts = []
    for size in worlds:
        unit = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        cuts.append(Cut(unit, tuple(sorted(data.draw(st.sets(st.integers(0, len(of_model) - 1)))))))
    for (before, cut), (after, next_cut) in pairwise(zip(worlds, cuts, strict=True)):
        parts = parts_of_ranks(cut, before)
        guards = guardians(["one"] * before, redundancy, replicas(parts))
        lost = data.draw(st.sets(st.integers(0, before - 1), max_size=min(redundancy, before - 1)))
        behind = data.draw(st.sets(st.integers(0, before - 1)))
        held: list[list[HeldShard]] = []
        for rank in range(before):
            if rank not in lost:
                guarded = [parts[r]._replace(copy=True) for r in range(before) if rank in guards[r]]
                points = (AT,) if rank in behind else (AT, LATER)
                held.append([HeldShard(point, its) for point in points for its in (parts[rank], *guarded)])
        held += [[]] * max(0, after - len(held))  # newcomers
        point = newest_whole_point(shapes, held)
        if not sum(shapes.sizes):
            continue
        assert point is not None
        assert point == LATER or behind - lost
        wanted = [*parts_of_ranks(next_cut, after), *[NOTHING] * (len(held) - after)]
        plan = MovePlan(shapes, held, point, wanted)
        moves = [plan.of_rank(rank) for rank in range(len(held))]
        for rank, its in enumerate(moves):
            got = [Counter[int]() for _ in shapes.sizes]
            for move in its:
                if move.receiver == rank:
                    got[move.parameter].update(range(*move.span))
                shard = held[move.sender][move.shard]
                there = shapes.spans(shard.part)[move.parameter]
                assert shard.point == point and there.first <= move.span.first < move.span.end <= there.end
                assert rank in (move.sender, move.receiver) and move in moves[move.sender], "both sides know"
                assert move in moves[move.receiver]
            assert got == [Counter(range(*span)) for span in shapes.spans(wanted[rank])]
            assert its == sorted(its), "all ranks have the same order"


def test_a_plan_costs_a_rank_a_few_operations_for_each_other_rank() -> None:
    """In particular, a rank does not go through the parameters of the others: this model has 100."""

    def cost(ranks: int) -> int:
        shapes, before = shaped(*[(64_000, 3)] * 100), parts_of_ranks(Cut(ranks), ranks)
        nodes = [str(rank // 8) for rank in range(ranks)]
        guards = guardians(nodes, 1)
        owners = {guard: owner for owner, [guard] in enumerate(guards)}
        held = [
            [HeldShard(AT, its), HeldShard(AT, before[owners[rank]]._replace(copy=True), guarded=True)]
            for rank, its in enumerate(before)
        ]
        with counted() as count:
            left = held[8:]
            point = newest_whole_point(shapes, left)
            assert point == AT
            guardians(nodes[8:], 1, replicas(parts_of_ranks(Cut(len(left)), len(left))))
            plan = MovePlan(shapes, left, point, parts_of_ranks(Cut(len(left)), len(left)))
            assert plan.of_rank(3)
        return count()

    assert cost(4000) - cost(800) < 85 * 3200


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


def chosen_one_after_another(
    nodes: list[str], redundancy: int, groups: list[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Return the guardians as their rule says them, with a comparison of all ranks for each of them."""
    chosen: list[list[int]] = [[] for _ in nodes]
    load = [0] * len(nodes)
    for turn in range(redundancy):
        for rank, its in enumerate(chosen):
            group = groups[rank]
            there = {nodes[other] for other in group}
            copies = len(group) if there == {*nodes} else len(there)
            lacks = min(redundancy + 1 - copies, len(nodes) - len(group)) if rank == group[0] else 0
            if turn < lacks:
                have = {*group, *its}
                near = {nodes[other] for other in have}
                guardian = min(
                    (r for r in range(len(nodes)) if r not in have),
                    key=lambda r: (nodes[r] in near, load[r], (r - rank) % len(nodes)),
                )
                its.append(guardian)
                load[guardian] += 1
    return [tuple(its) for its in chosen]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 4), st.data())
def test_guardians_are_the_next_ranks_on_other_nodes_that_guard_the_fewest_shards(
    replicate: int, unit: int, redundancy: int, data: st.DataObject
) -> None:
    size, groups = replicate * unit, replicas(hybrid(replicate, unit))
    nodes = data.draw(st.lists(st.sampled_from("abcd"), min_size=size, max_size=size))
    assert guardians(nodes, redundancy, groups) == chosen_one_after_another(nodes, redundancy, groups)


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


def hybrid(replicate: int, unit: int) -> list[Part]:
    """Return the part of each rank where each part has ``replicate`` replicas."""
    return parts_of_ranks(Cut(unit), replicate * unit)


def test_ranks_with_the_same_part_are_replicas() -> None:
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
    size, parts = replicate * unit, hybrid(replicate, unit)
    nodes = data.draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size))
    guards = guardians(nodes, redundancy, replicas(parts))
    lost = data.draw(st.sets(st.integers(0, size - 1), max_size=min(redundancy, size - 1)))
    held = [
        [parts[rank], *(parts[owner] for owner in range(size) if rank in guards[owner])]
        for rank in range(size)
        if rank not in lost
    ]
    assert missing(shaped((4, 2)), [its for each in held for its in each]) == 0


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


A, B, C = (part(place, 3) for place in range(3))
# With a parameter that is not cut.
D, E = (part(place, 2, 1) for place in range(2))
COPY = part(1, 2, 1, copy=True)


@pytest.mark.parametrize(
    ("held", "going", "passed"),
    [
        ([[A], [B]], [False, True], [Passing(1, 0, 0)]),
        ([[A, B], [B]], [False, True], []),
        ([[A], [B, C], [C]], [True, True, False], [Passing(0, 0, 2), Passing(1, 0, 2)]),
        ([[], [], [A, B]], [False, False, True], [Passing(2, 0, 0), Passing(2, 1, 1)]),
        ([[A], [B]], [True, True], []),
        ([[D, COPY], [E]], [False, True], []),
        ([[COPY], [E]], [False, True], [Passing(1, 0, 0)]),
        ([[NOTHING, A], [NOTHING, B]], [False, True], [Passing(1, 1, 0)]),
    ],
    ids=[
        "one stays",
        "there is a copy",
        "two leave",
        "all are new",
        "nobody stays",
        "there is a copy without a replicated parameter",
        "a replicated parameter leaves",
        "nothing is no shard",
    ],
)
def test_workers_outside_a_later_round_give_each_shard_once_to_a_staying_worker_that_lacks_it(
    held: list[list[Part]], going: list[bool], passed: list[Passing]
) -> None:
    shards = [[HeldShard(LATER, A), *(HeldShard(AT, its) for its in each)] for each in held]
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
    held: list[list[tuple[Part, bool]]], source: Source
) -> None:
    shards = [[HeldShard(AT, its, guarded, 3) for its, guarded in each] for each in held]
    assert source_of(shaped((12, 1)), shards, AT) is source


def test_a_lost_workers_part_that_another_has_as_its_own_comes_from_a_replica() -> None:
    held = [[HeldShard(AT, its, ranks=4)] for its in (ONE, TWO, ONE)]
    assert source_of(shaped((12, 1)), held, AT) is Source.REPLICA
