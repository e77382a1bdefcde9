"""How the members of a large round are stored in parts, and read from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.core import round_parts
from elasticd.core.facts import Cause, Extent, MemberPart, Outcome, Phase, Round
from elasticd.core.leader import Plan, View, decide
from elasticd.core.leader.plan import end
from elasticd.core.ports import Delete, Put, Write
from elasticd.core.round_parts import PartSizes
from elasticd.etcd import records
from tests.core.build import NOW, node, round, spec, view

SIZES = PartSizes(members=3, at_once=2)


def of(nodes: int, number: int = 5, phase: Phase = Phase.LIVE, **more: int) -> Round:
    return round(number, {f"n{i}": 1 + i % 3 for i in range(nodes)}, phase, closing=Cause.GREW)


def _split(round: Round, sizes: PartSizes) -> tuple[Round, tuple[Put, ...]]:
    """Return the record of the round, and its parts."""
    record = round_parts.record_of(round, sizes)
    return record, round_parts.parts_of(round, record)


def facts(puts: tuple[Put, ...]) -> dict[str, object]:
    return {put.key: put.fact for put in puts}


@given(st.integers(1, 40), st.integers(1, 8), st.sets(st.integers(0, 39), max_size=3))
def test_a_round_is_the_same_once_its_parts_are_read(nodes: int, size: int, leaving: set[int]) -> None:
    whole = replace(of(nodes), leaving=tuple(f"n{i}" for i in leaving))
    record, parts = _split(whole, PartSizes(members=size))
    assert (record.world_size, record.nodes) == (whole.world_size, whole.nodes)
    assert record.leaving_workers == whole.leaving_workers
    read = round_parts.whole(record, dict(facts(parts)))  # type: ignore[arg-type]
    assert replace(read, extent=None) == whole
    if record.extent is not None:
        assert not record.members and round_parts.fits(read)
        assert _split(read, PartSizes(members=size)) == (record, parts)


@given(st.integers(4, 40))
def test_each_member_finds_itself_in_the_part_of_its_name_and_knows_its_place_in_the_whole(
    nodes: int,
) -> None:
    whole = of(nodes)
    record, parts = _split(whole, SIZES)
    assert record.extent is not None
    for member in whole.members:
        own = parts[round_parts.part_of(member.node, record.extent.parts)].fact
        assert isinstance(own, MemberPart)
        seen = round_parts.join(record, [own])
        assert seen.member(member.node, member.incarnation) == member
        assert whole.members.index(member) == member.place


def test_a_round_of_one_part_has_its_members_in_its_own_record() -> None:
    small = of(3)
    assert _split(small, SIZES) == (small, ())


@pytest.mark.parametrize("change", ["a part is missing", "a part comes twice", "a part is of another round"])
def test_parts_that_do_not_make_up_the_round_are_not_taken_for_it(change: str) -> None:
    record, parts = _split(of(12), SIZES)
    there = [put.fact for put in parts if isinstance(put.fact, MemberPart)]
    there = {
        "a part is missing": there[1:],
        "a part comes twice": [*there, there[0]],
        "a part is of another round": [
            *there[1:],
            MemberPart(tuple(replace(m, slots=(0, 1, 2, 3)) for m in there[0].members)),
        ],
    }[change]
    assert not round_parts.fits(round_parts.join(record, there))


def test_other_members_of_a_round_of_the_same_number_are_under_other_keys() -> None:
    one, other = of(12), replace(of(12), members=of(13).members[:12])
    moved = replace(other, members=(replace(other.members[0], incarnation="later"), *other.members[1:]))
    assert facts(_split(one, SIZES)[1]).keys() == facts(_split(other, SIZES)[1]).keys()
    assert not facts(_split(one, SIZES)[1]).keys() & facts(_split(moved, SIZES)[1]).keys()


def test_the_record_of_a_round_of_ten_thousand_nodes_is_small_and_its_transactions_fit_into_etcd() -> None:
    size = 8
    names = [f"gpu-pool-a-{i:05}.train.svc.cluster.local" for i in range(10_000)]
    whole = round(5, dict.fromkeys(names, size))
    record, parts = _split(whole, round_parts.PART_SIZES)
    assert len(records.encode("round", record)) < 1000
    at_once = round_parts.PART_SIZES.at_once
    largest = max(
        sum(len(records.encode(put.key, put.fact)) for put in parts[i : i + at_once])
        for i in range(0, len(parts), at_once)
    )
    assert at_once < 120 and largest < 1_000_000
    assert all(records.decode(put.key, records.encode(put.key, put.fact)) == put.fact for put in parts)


# ---------------------------------------------------------------- what the leader writes


def leaders(before: Round, nodes: int) -> View:
    """Return the view of a leader that has read the parts of the round before."""
    known = [node(f"n{i}", 1 + i % 3, released=before.number) for i in range(nodes)]
    return replace(view(spec(1, 1000), before, known), part_sizes=SIZES)


def stored(before: Round) -> Round:
    record, parts = _split(before, SIZES)
    return round_parts.whole(record, dict(facts(parts)))  # type: ignore[arg-type]


def puts(writes: tuple[Write, ...]) -> list[str]:
    return [write.key for write in writes if isinstance(write, Put)]


def applied(plan: Plan) -> Round:
    """Return the round that is in etcd after the plan."""
    known = {w.key: w.fact for batch in (*plan.ahead, plan.writes) for w in batch if isinstance(w, Put)}
    record = known["round"]
    assert isinstance(record, Round)
    return round_parts.whole(record, known)


def test_parts_that_have_no_room_beside_the_round_are_written_before_it() -> None:
    plan = decide(leaders(stored(of(12, phase=Phase.CLOSING)), 14), NOW)
    new = applied(plan)
    assert (new.number, new.phase, new.nodes) == (6, Phase.LIVE, 14) and round_parts.fits(new)
    assert [len(puts(batch)) for batch in plan.ahead] == [2, 2]
    assert len([key for key in puts(plan.writes) if key.startswith("members/")]) == 1
    assert Delete("members/0000000005.", prefix=True) in plan.writes


def test_a_round_that_only_changes_its_phase_leaves_its_parts_as_they_are() -> None:
    one = leaders(stored(of(12)), 12)  # a round whose members have released it
    plan = decide(one, NOW)
    assert applied(plan).phase is Phase.CLOSING
    assert (puts(plan.writes), plan.ahead) == (["round"], ())
    assert not [w for w in plan.writes if isinstance(w, Delete)]


def test_a_leader_that_stores_rounds_otherwise_than_the_last_one_writes_the_parts_again() -> None:
    whole = of(12)
    inline = replace(leaders(whole, 12), part_sizes=SIZES)
    plan = decide(inline, NOW)
    assert round_parts.fits(applied(plan))


def test_the_parts_go_when_the_world_is_small_again() -> None:
    plan = decide(leaders(stored(of(12, phase=Phase.CLOSING)), 2), NOW)
    assert applied(plan).nodes == 2 and applied(plan).extent is None
    assert Delete("members/0000000005.", prefix=True) in plan.writes


def test_a_job_that_ends_leaves_no_parts_and_its_round_still_tells_its_size() -> None:
    before = stored(of(12))
    plan = end(leaders(before, 12), before, NOW, Outcome.SUCCEEDED, "every worker finished")
    ended = applied(plan)
    assert Delete("members/", prefix=True) in plan.writes
    assert (ended.members, ended.nodes, ended.world_size) == ((), 12, before.world_size)
    assert ended.extent is not None and not round_parts.has_parts(ended)


def test_a_record_with_members_here_and_in_parts_is_not_believed() -> None:
    both = replace(of(3), extent=Extent(6, 3, 0, 1, "0123456789abcdef"))
    with pytest.raises(records.BadRecord, match="here and in parts"):
        records.decode("round", records.encode("round", both))
