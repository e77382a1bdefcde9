from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.core import facts
from elasticd.core.age import Age
from elasticd.core.checkpoint_names import WORLD_MAX, folder_name
from elasticd.core.state_memory import StateMemory
from elasticd.etcd import records
from elasticd.etcd.errors import BadRecord, NewerRecord


@cache
def drawn(kind: Any) -> st.SearchStrategy[Any]:
    """Draw a value of a type. Fields with defaults are drawn, too."""
    if kind is facts.Limits:
        return st.builds(
            lambda low, more: facts.Limits(low, low + more), st.integers(1, 999), st.integers(0, 999)
        )
    if kind is facts.Saved:
        counts = st.integers(0, 2**53)
        return st.builds(
            lambda step, round, world, at, size: facts.Saved(
                folder_name(step, round, "0123abcd", 1), step, round, world, at, size, "d"
            ),
            counts,
            counts,
            st.integers(1, WORLD_MAX),
            drawn(float),
            counts,
        )
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return st.builds(kind, **{field.name: drawn(hints[field.name]) for field in fields(kind)})
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return st.sampled_from(kind)
    if get_origin(kind) is tuple:
        return st.lists(drawn(get_args(kind)[0]), max_size=2).map(tuple)
    if get_origin(kind) is Mapping:
        key, value = get_args(kind)
        return st.dictionaries(drawn(key), drawn(value), max_size=2)
    if get_origin(kind) is UnionType:
        return st.one_of([drawn(option) for option in get_args(kind)])
    return {
        str: st.text(max_size=10),
        int: st.integers(-(2**53), 2**53),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        NoneType: st.none(),
    }[kind]


KEYS: dict[type, str] = {
    facts.Spec: "spec",
    facts.Leadership: "leader",
    facts.Round: "round",
    facts.MemberPart: "members/0000000007.0123456789abcdef.0",
    facts.Budget: "budget",
    facts.Node: "nodes/a",
    facts.Report: "reports/a",
    facts.Checkpoint: "checkpoint",
    facts.Stall: "stalls/a",
    facts.Hang: "hang",
    facts.Stragglers: "stragglers",
    facts.Summary: "summary",
    facts.ForgottenNodes: "forgotten",
    facts.RoomProbe: "room",
    facts.SaverAddress: "savers/a",
    facts.DebugTails: "debug/a",
}


@pytest.mark.parametrize("kind", get_args(facts.Fact), ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_a_fact_comes_back_as_it_went(kind: type, data: st.DataObject) -> None:
    key, fact = KEYS[kind], data.draw(drawn(kind))
    value = records.encode(key, fact)
    assert json.loads(value)["v"] == 1
    assert records._decoded(key, value) == fact  # tests the codec alone: some drawn values are not valid


def test_the_names_and_slots_of_several_records_are_one_object() -> None:
    """The leader of a large job has several records of each node."""
    node = facts.Node("a", "1", "10.0.0.1", (0, 1), 6, 29500, 4711, "h:1", ready=(0, 1), holders=(0, 1))
    part = facts.MemberPart((facts.Member("a", "1", (0, 1), 0), facts.Member("b", "2", (0, 1), 2)))
    report = facts.Report("a", "1", 7)
    known = {"nodes/a": node, "reports/a": report, "members/0000000007.d.0": part}
    here, told, there = (records.decode(key, records.encode(key, fact)) for key, fact in known.items())
    assert isinstance(here, facts.Node) and isinstance(told, facts.Report)
    assert isinstance(there, facts.MemberPart)
    first, second = there.members
    assert here.slots is here.ready is here.holders is first.slots is second.slots
    assert here.name is first.node is told.node and here.incarnation is first.incarnation
    assert (here, told, there) == (node, report, part)


def test_the_age_and_the_state_of_nodes_that_say_the_same_are_one_object() -> None:
    node = facts.Node("a", "1", "10.0.0.1", (0, 1), 6, 29500, 4711, "h:1", age=Age(7, 40), sharded=True)
    nodes = [replace(node, name=name, state=StateMemory(10**9, redundancy=1)) for name in "ab"]
    first, second = (
        records.decode(key, records.encode(key, n)) for n in nodes for key in [f"nodes/{n.name}"]
    )
    assert isinstance(first, facts.Node) and isinstance(second, facts.Node)
    assert first.age is second.age and first.state is second.state
    assert [first, second] == nodes


def test_a_spec_without_a_version_of_elasticd_is_read() -> None:
    spec = facts.Spec(facts.Limits(1, 2), facts.Limits(1, 2), "job.py", "f", version="0.1.0")
    value = json.loads(records.encode("spec", spec))
    assert value.pop("version") == "0.1.0"
    assert records.decode("spec", json.dumps(value).encode()) == replace(spec, version="")


def test_output_that_is_no_text_is_written_as_far_as_it_is() -> None:
    message = b"caf\xe9 \xf0\x9f\x99\x82".decode(errors="surrogateescape")
    fact = facts.Report("n", "i", 1, (facts.Exit(0, 0, 1, 1.0, message=message),))
    decoded = records.decode("reports/n", records.encode("reports/n", fact))
    assert isinstance(decoded, facts.Report)
    assert decoded.exits[0].message == "caf\ufffd \U0001f642"


def test_unknown_fields_of_the_same_version_are_ignored() -> None:
    value = json.loads(records.encode("leader", facts.Leadership("a", "i")))
    value["later"] = {"more": 1}
    assert records.decode("leader", json.dumps(value).encode()) == facts.Leadership("a", "i")


def test_missing_fields_with_a_default_take_it() -> None:
    assert records.decode("budget", b'{"v":1}') == facts.Budget()


def test_a_record_of_a_newer_elasticd_is_refused_in_one_sentence() -> None:
    with pytest.raises(NewerRecord, match=r"spec .*version 2.*newer elasticd, so upgrade this one$") as error:
        records.decode("spec", b'{"v":2,"whatever":[]}')
    assert error.value.key == "spec"


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"hello",
        b"\xff\xfe\x00",
        b"\x80\x04\x95.",  # a pickle
        b"[]",
        b"null",
        b"{}",
        b'{"v":"1"}',
        b'{"v":1}',
        b'{"v":1,"asked":{"min":0,"max":1}}',
        b'{"v":1,"asked":{"min":3,"max":1},"limits":{"min":1,"max":1},"script":"a","fingerprint":"b"}',
        b'{"v":1,"asked":7}',
        b'{"v":1,"asked":' + b"[" * 100_000,
        b'{"v":99999999999999999999999}',
    ],
)
def test_garbage_is_an_error_that_names_the_key(value: bytes) -> None:
    with pytest.raises(BadRecord, match=r"^the value of spec in etcd is not usable: ") as error:
        records.decode("spec", value)
    assert error.value.key == "spec"


@given(st.binary())
def test_no_bytes_raise_anything_but_a_bad_record(value: bytes) -> None:
    for key in ("spec", "round", "nodes/a", "budget"):
        try:
            records.decode(key, value)
        except BadRecord:
            pass


@pytest.mark.parametrize("key", ["", "ledger", "nodes", "nodes/", "nodes/a/b", "other/a", "spec/a"])
def test_keys_that_are_not_ours_are_left_alone(key: str) -> None:
    assert records.fact_type(key) is None
    assert records.decode(key, b"whatever") is None


def test_a_fact_under_the_wrong_key_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold a Budget"):
        records.encode("leader", facts.Budget())
