"""Where ranks disagree: a table of records, and the sentence for each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from elasticd.data.debugrecords import (
    Call,
    EpochNote,
    GroupCalls,
    LoadedNote,
    LoaderEndNote,
    RankRecords,
    ScriptEnd,
    WeightsNote,
    rank_records,
)
from elasticd.data.disagreement import (
    ForgottenCalls,
    NoCall,
    OtherBatches,
    OtherCall,
    OtherSampler,
    OtherWeights,
    SameData,
    compared,
    disagreements,
)


def call(number: int, op: str = "all_reduce", **fields: Any) -> Call:
    return Call(number, float(number), op, chain=fields.pop("chain", number), **fields)


def rank(
    number: int, *calls: Call, world: int = 4, group: tuple[int, ...] = (), notes: Any = ()
) -> RankRecords:
    groups = (GroupCalls(str(group), group or tuple(range(world)), calls),) if calls else ()
    return RankRecords(number, world, 1, groups, tuple(notes))


def test_ranks_that_do_the_same_agree() -> None:
    records = [rank(number, call(1), call(2)) for number in range(4)]
    assert disagreements(records) == disagreements(records, hung=True) == ()
    assert compared(records) == 2


def test_the_first_call_that_differs_is_found_with_the_odd_rank_first() -> None:
    others = [rank(number, call(1), call(2, shape="[3]"), call(3)) for number in (0, 2, 3)]
    odd = call(2, "broadcast", shape="[3]")
    [found] = disagreements([*others, rank(1, call(1), odd, call(3, "barrier"))])
    assert found == OtherCall(2.0, (), 2, (((1,), odd), ((0, 2, 3), call(2, shape="[3]"))))


@pytest.mark.parametrize("field", ["how", "shape", "dtype"])
def test_the_same_collective_of_something_else_differs(field: str) -> None:
    [found] = disagreements([rank(0, call(1)), rank(1, replace(call(1), **{field: "other"}))])
    assert isinstance(found, OtherCall)


def test_what_need_not_be_the_same_is_not_compared() -> None:
    assert (
        disagreements([rank(0, call(1)), rank(1, call(1, place="train.py:1", tensors="5 x 3 float32"))]) == ()
    )


def test_a_rank_that_is_behind_may_still_follow() -> None:
    assert disagreements([rank(0, call(1), call(2)), rank(1, call(1))]) == ()


@pytest.mark.parametrize("end", [ScriptEnd(9.0), ScriptEnd(9.0, "ValueError: no", "train.py:8")])
def test_a_rank_whose_script_has_ended_will_not_follow(end: ScriptEnd) -> None:
    records = [rank(n, call(1), call(2), call(3)) for n in (0, 2, 3)]
    [found] = disagreements([*records, rank(1, call(1), notes=[end])])
    assert found == NoCall(2.0, (), 2, (0, 2, 3), call(2), ((1, call(1), end),))


def test_a_rank_whose_collective_failed_is_not_to_blame() -> None:
    end = ScriptEnd(9.0, "RuntimeError: connection closed", in_collective=True)
    assert disagreements([rank(0, call(1), call(2)), rank(1, call(1), notes=[end])]) == ()


def test_in_a_round_that_hangs_a_rank_that_is_behind_counts() -> None:
    records = [rank(0, call(1)), rank(1)]
    assert disagreements(records) == ()
    assert disagreements(records, hung=True) == (NoCall(1.0, (), 1, (0,), call(1), ((1, None, None),)),)


def test_groups_are_compared_each_for_itself() -> None:
    """A rank outside a group is not behind that group."""
    pair = [rank(n, call(1), group=(0, 2)) for n in (0, 2)]
    rest = [rank(n, call(1, "barrier"), group=(1, 3)) for n in (1, 3)]
    assert disagreements([*pair, *rest], hung=True) == ()
    [found] = disagreements([pair[0], rank(2, call(1, "barrier"), group=(0, 2))])
    assert isinstance(found, OtherCall) and found.group == (0, 2)


def test_calls_that_differed_before_the_records_begin_are_noticed() -> None:
    records = [rank(0, call(7, chain=1)), rank(1, call(6, chain=5), call(7, chain=2))]
    assert disagreements(records) == (ForgottenCalls(7.0, (), 7),)


def weights(step: int, digest: int, bias: int = 0, *, ranks: tuple[int, ...] = (0, 1, 2)) -> WeightsNote:
    return WeightsNote(float(step), 0, step, ranks, digest, (("weight", 1), ("bias", bias)))


def test_the_first_step_with_other_weights_is_found() -> None:
    same = [weights(0, 5), weights(1, 6), weights(2, 7), weights(3, 8)]
    other = [weights(0, 5), weights(1, 6), weights(2, 9, bias=1), weights(3, 10)]
    [found] = disagreements([rank(0, notes=same), rank(1, notes=other), rank(2, notes=same)])
    assert found == OtherWeights(2.0, 0, 2, 1, "bias", ((1,), (0, 2)))


def test_models_of_different_groups_may_differ() -> None:
    two = [rank(0, notes=[weights(1, 5, ranks=(0, 0, 1))]), rank(1, notes=[weights(1, 6, ranks=(1, 1, 1))])]
    assert disagreements(two) == ()


def epoch(batches: int, samples: int = -1, **sampler: int) -> EpochNote:
    return EpochNote(1.0, "train.py:5", 0, samples, batches, sampler)


def loaded(*digests: int) -> list[LoadedNote]:
    return [LoadedNote(2.0, "train.py:5", 0, digest) for digest in digests]


def test_loaders_of_different_lengths_are_found_where_the_script_trains_with_them() -> None:
    records = [rank(0, notes=[epoch(6, 48), *loaded(1, 2)]), rank(1, notes=[epoch(5, 40), *loaded(3, 4)])]
    found = disagreements(records)
    assert found == (OtherBatches(1.0, "train.py:5", 0, (((0,), 6, 48), ((1,), 5, 40))),)
    assert disagreements([rank(0, notes=[epoch(6)]), rank(1, notes=[epoch(5)])]) == ()


def test_a_loader_that_knows_its_length_only_at_its_end_is_compared_then() -> None:
    def records(*lengths: int) -> list[RankRecords]:
        return [
            rank(n, notes=[epoch(-1), *loaded(n, n + 10), LoaderEndNote(3.0, "train.py:5", 0, length)])
            for n, length in enumerate(lengths)
        ]

    assert disagreements(records(5, 5)) == ()
    [found] = disagreements(records(6, 5))
    assert isinstance(found, OtherBatches) and found.sides == (((0,), 6, -1), ((1,), 5, -1))


@pytest.mark.parametrize("setting", ["seed", "epoch", "shuffle", "num_replicas"])
def test_samplers_must_deal_alike(setting: str) -> None:
    records = [rank(n, notes=[epoch(6, 48, **{setting: n, "rank": n})]) for n in range(2)]
    assert disagreements(records) == (OtherSampler(1.0, "train.py:5", setting, (((0,), 0), ((1,), 1))),)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [((1, 2), (1, 2), True), ((1, 2), (3, 4), False), ((1, 1), (1, 1), False), ((1, 2), (1, 3), False)],
)
def test_ranks_with_the_same_batches_are_found(
    first: tuple[int, ...], second: tuple[int, ...], same: bool
) -> None:
    found = disagreements([rank(0, notes=loaded(*first)), rank(1, notes=loaded(*second))])
    assert found == ((SameData(2.0, "train.py:5", 0, (0, 1)),) if same else ())


def test_stages_of_one_replica_may_read_the_same_data() -> None:
    records = [replace(rank(n, notes=loaded(1, 2)), unit=2) for n in range(2)]
    assert disagreements(records) == ()


def lines(*said: object) -> bytes:
    return b"".join(json.dumps(one).encode().ljust(200) + b"\n" for one in said)


HEAD = {"v": 1, "rank": 1, "world": 2, "unit": 1, "pid": 7}


def test_lines_are_read_in_the_order_of_their_numbers_and_damaged_ones_are_left_out() -> None:
    def made(number: int) -> dict[str, Any]:
        same = ["all_reduce", "SUM", [3], "float32"]
        return {"n": number, "t": 1.0, "same": same, "of": "3 float32", "at": "a.py:1", "chain": 4}

    group = lines({**HEAD, "group": "0", "ranks": [[0, 1]]}, made(4), made(2), {"n": 3}, [], 7)
    read = rank_records(lines(HEAD, {"n": 1, "is": "end", "t": 2.0}, {"n": 2, "is": "odd", "t": 1}), [
        group + b'{"n":5,"t"',
        b"",
        b"no line of JSON\n",
    ])  # fmt: skip
    assert read is not None
    assert (read.rank, read.end) == (1, ScriptEnd(2.0))
    [only] = read.groups
    assert only.ranks == (0, 1)
    assert [one.number for one in only.calls] == [2, 4]
    assert only.calls[0] == Call(2, 1.0, "all_reduce", "SUM", "[3]", "float32", "3 float32", "a.py:1", 4)


@pytest.mark.parametrize("head", [b"", b"{}", b"[]\n", lines({**HEAD, "v": 2}), lines({"v": 1})])
def test_a_file_of_another_kind_is_no_record(head: bytes) -> None:
    assert rank_records(head, []) is None
