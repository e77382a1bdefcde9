"""Records that no agent writes are refused where they are read, in one sentence that names the key."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from elasticd.core import facts
from elasticd.core.facts import Cause, Exit, Limits, Member, Phase, Report, Round, Spec
from elasticd.etcd import records
from elasticd.etcd.errors import BadRecord
from tests.core.build import node

A, B = Member("a", "a#1", (0, 1), 0), Member("b", "b#1", (0,), 2)
ROUND = Round(3, Phase.LIVE, (A, B), "10.0.0.1:29500", Cause.START, 1.0)
REPORT = Report("a", "a#1", 3, (Exit(0, 0, 1, 1.0, message="ok"),))
NODE = node("a")
SPEC = Spec(Limits(1, 2), Limits(1, 2), "job.py", "f")
SAVER = facts.SaverAddress("a", "10.0.0.1", 1234, "secret")


def read(key: str, fact: facts.Fact) -> facts.Fact | None:
    return records.decode(key, records.encode(key, fact))


@pytest.mark.parametrize(
    ("key", "fact"),
    [
        ("spec", SPEC),
        ("savers/a", SAVER),
        ("nodes/node 1 in K\xf6ln", replace(NODE, name="node 1 in K\xf6ln")),
        ("round", ROUND),
        ("round", replace(ROUND, members=(), store="")),
        ("round", replace(ROUND, store="fd00::1:29500")),
        ("round", replace(ROUND, store="[fe80::1%eth0]:29500")),
        ("reports/a", replace(REPORT, exits=(Exit(0, 0, -9, 0.0, message="\x1b[31mred\nlines"),))),
    ],
)
def test_what_agents_write_is_read(key: str, fact: Any) -> None:
    assert read(key, fact) == fact


@pytest.mark.parametrize(
    ("key", "fact", "fields", "says"),
    [
        ("nodes/a", NODE, {"name": "b"}, "it names the node 'b'"),
        ("nodes/a", NODE, {"name": "../../b"}, "it names the node '../../b'"),
        ("nodes/a", NODE, {"address": "10.0.0.1\x1b]0;x\x07"}, "address: .* is not an address"),
        ("nodes/a", NODE, {"address": ""}, "address: '' is not an address"),
        ("nodes/a", NODE, {"slots": [0, 0]}, "slots: a slot is named twice"),
        ("nodes/a", NODE, {"slots": [-1]}, "slots: -1 is not between"),
        ("nodes/a", NODE, {"slots": [2**40]}, "slots: 1099511627776 is not between"),
        ("nodes/a", NODE, {"pid": 2**62}, "pid: .* is not between"),
        ("nodes/a", NODE, {"pid": -1}, "pid: -1 is not between"),
        ("nodes/a", NODE, {"store_port": 65536}, "store_port: 65536 is not between"),
        ("nodes/a", NODE, {"released": 10**30}, "released: .* is not between"),
        ("nodes/a", NODE, {"incarnation": "a\x1b[2J"}, "incarnation: .* is not a word"),
        ("round", ROUND, {"number": -1}, "number: -1 is not between"),
        ("round", ROUND, {"since": 1e300}, "since: 1e.300 is not between"),
        ("round", ROUND, {"store": "a b:1"}, "store: 'a b:1' is not HOST:PORT"),
        ("round", ROUND, {"store": "a:99999"}, "store: 'a:99999' is not HOST:PORT"),
        ("round", ROUND, {"leaving": ["\n"]}, "leaving: the node name"),
        ("round", ROUND, {"members": (A, replace(A, base_rank=2))}, "a node occurs twice"),
        ("round", ROUND, {"members": (A, replace(B, base_rank=0))}, "b begins at rank 0 in place of 2"),
        ("round", ROUND, {"members": (replace(A, slots=(1, 1)), B)}, "a slot is named twice"),
        ("round", ROUND, {"members": (replace(A, node="../x"), B)}, "has a slash"),
        ("reports/a", REPORT, {"node": "b"}, "it names the node 'b'"),
        ("reports/a", REPORT, {"exits": (Exit(0, 0, -9999, 0.0),)}, "code: -9999 is not between"),
        ("reports/a", REPORT, {"exits": (Exit(0, -1, 1, 0.0),)}, "rank: -1 is not between"),
        ("reports/ a", REPORT, {"node": " a"}, "blanks at its ends"),
        ("reports/a\x1b[2J", REPORT, {"node": "a\x1b[2J"}, "cannot be seen"),
        ("savers/a", SAVER, {"port": 0}, "port: 0 is not between"),
        ("savers/a", SAVER, {"host": "/etc"}, "is not an address"),
        ("spec", SPEC, {"limits": Limits(1, 10**20)}, "max: 100000000000000000000 is not between"),
        ("spec", SPEC, {"drain": (facts.Drained("a/b", "i"),)}, "has a slash"),
        ("leader", facts.Leadership("a", "b"), {"incarnation": "\x1b]0;gone\x07"}, "is not a word"),
    ],
)
def test_what_no_agent_writes_is_refused(key: str, fact: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRecord, match=says) as error:
        read(key, replace(fact, **fields))
    assert error.value.key == key
    assert str(error.value).isprintable()


def test_a_member_of_another_shape_is_refused_by_its_type() -> None:
    value = {**json.loads(records.encode("round", ROUND)), "members": [{"node": "a"}]}
    with pytest.raises(BadRecord, match="missing required field"):
        records.decode("round", json.dumps(value).encode())
