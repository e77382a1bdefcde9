"""What the nodes of a job with ``--debug`` write to etcd: few bytes, and nothing that etcd refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from elasticd.core import agent
from elasticd.core.facts import DebugTails, Limits, Spec
from elasticd.core.ports import Answer, Applied, Entry, Guard, Put, Write
from elasticd.daemon import debug_exchange
from elasticd.daemon.debug_exchange import DebugExchange, Tails, every_s
from elasticd.etcd.records import encode
from elasticd.procs import debugfiles
from tests.core.build import life, node, round

REQUEST_MAX = 1536 << 10  # of etcd


class Etcd:
    def __init__(self) -> None:
        self.written: list[Tails] = []

    def transact(
        self, guards: tuple[Guard, ...], writes: tuple[Write, ...], answer: Callable[[Answer], None]
    ) -> None:
        (put,) = writes
        assert isinstance(put, Put) and isinstance(put.fact, DebugTails)
        self.written.append(put.fact.ranks)
        answer(Applied(10))


def state() -> agent.AgentState:
    me = agent.Identity("b", life("b"), "127.0.0.1", (0, 1), "host", 1)
    known = round(3, {"a": 2, "b": 2, "c": 2})
    spec = Spec(Limits(2, 8), Limits(2, 8), "job.py", "f")
    empty = agent.AgentState(me, spec, agent.AgentConfig(600.0), 0)
    joined = replace(empty.registration, joined=True, own=Entry("nodes/b", node("b"), 2, 2))
    return replace(empty, crew=agent.Crew(known, known.members[1], {}, cast(Any, None)), registration=joined)


def test_a_node_that_has_written_much_waits_until_it_writes_again() -> None:
    etcd, its = Etcd(), state()
    exchange = DebugExchange(cast(Any, etcd))
    size = 10 * debug_exchange.BYTES_S
    first, second = (("x" * size,),), (("y" * size,),)
    exchange.offer(3, first)
    exchange.follow(its, 1000.0)
    exchange.offer(3, second)
    exchange.follow(its, 1019.9)
    assert etcd.written == [first]
    exchange.follow(its, 1020.1)  # two nodes write
    assert etcd.written == [first, second]


@pytest.mark.parametrize(
    ("size", "nodes", "seconds"), [(100, 2, 2.0), (500_000, 2, 61.0), (20_000, 64, 153.8)]
)
def test_the_more_the_nodes_write_the_rarer_they_write(size: int, nodes: int, seconds: float) -> None:
    assert every_s((("x" * size,),), nodes) == pytest.approx(seconds, abs=0.1)


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_etcd_takes_the_tails_of_a_node_with_many_workers(tmp_path: Path, ranks: int) -> None:
    record_of(tmp_path, ranks, groups=4)
    tails = debugfiles.tails(tmp_path)
    assert len(tails) == ranks
    assert len(encode("debug/b", DebugTails("b", 1, tails))) < REQUEST_MAX
    newest = [group.calls[-1].number for one in debugfiles.read_tails(tails) for group in one.groups]
    assert newest == [20] * 4 * ranks


def test_the_tails_are_those_of_the_newest_groups(tmp_path: Path) -> None:
    record_of(tmp_path, 1, groups=12)
    (records,) = debugfiles.read_tails(debugfiles.tails(tmp_path))
    assert [group.name for group in records.groups] == [f"group {number}" for number in range(4, 12)]


@pytest.mark.parametrize(
    ("tails", "read"),
    [
        (('{"v":1,"rank":1e400,"world":2,"unit":1}',), 0),
        (('{"v":1,"rank":1,"world":2,"unit":1}', '{"group":"g","ranks":[[0,9000000000]]}'), 1),
    ],
)
def test_tails_with_impossible_numbers_are_left_out(tails: tuple[str, ...], read: int) -> None:
    found = debugfiles.read_tails([tails])
    assert len(found) == read
    assert not any(one.groups for one in found)


def record_of(folder: Path, ranks: int, groups: int) -> None:
    """Write files with long lines, as workers do."""
    for rank in range(ranks):
        head = {"v": 1, "rank": rank, "world": ranks, "unit": 1}
        first = [["layer.weight", 12345678]] * 40
        notes = [
            {"n": n, "is": "weights", "t": 1.0, "model": 1, "step": n, "digest": 1, "first": first}
            for n in range(1, 61)
        ]
        write(folder / f"rank-{rank}.notes", [head, *notes])
        for number in range(groups):
            its = {**head, "group": f"group {number}", "ranks": [[0, ranks - 1]]}
            call = {"t": 1.0, "same": ["all_reduce", "sum", [10], "float32"], "of": "x" * 160, "at": "a:1"}
            calls = [{"n": n, **call, "chain": n} for n in range(1, 21)]
            write(folder / f"rank-{rank}.group-{number}", [its, *calls])


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(map(json.dumps, lines)))
