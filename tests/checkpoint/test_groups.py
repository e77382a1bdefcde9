"""In a large world each rank is connected to the ranks of its node, and a node's first rank to other first
ranks. All answers are those of a flat group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch

from elasticd.checkpoint.client import levels
from elasticd.checkpoint.client.collectives import OneRank
from elasticd.core.thread_activity import ActivityKind, Frame, activity_of
from elasticd.worker.checkpoints import Checkpoints

PROGRAM = Path(__file__).parent / "programs" / "groups.py"
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_uneven_nodes_agree_on_the_same_by_few_connections(tmp_path: Path, debug: str) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch compares the calls of all ranks of a group."""
    world = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": debug},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = world.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(world.pid, signal.SIGKILL)
        world.wait()
    assert world.returncode == 0, said
    assert said.endswith("done\n"), said


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("AABB", [((0, 1), (2, 3)), ((0, 2),)]),
        ("BAABBC", [((0, 3, 4), (1, 2), (5,)), ((0, 1, 5),)]),
        ("AABCCDE", [((0, 1), (2,), (3, 4), (5,), (6,)), ((0, 2, 3), (5, 6)), ((0, 5),)]),
        ("AAAA", [((0, 1, 2, 3),)]),
    ],
)
def test_each_level_has_the_first_ranks_of_the_groups_below(
    nodes: str, expected: list[levels.Groups]
) -> None:
    assert [*levels.levels_of(nodes, flat_max=4)] == expected


@pytest.mark.parametrize(
    ("nodes", "pay"), [("AABB", True), ("AAAB", False), ("AAAA", False), ("ABCD", False), ("ABCDE", True)]
)
def test_levels_pay_if_each_rank_has_fewer_connections(nodes: str, pay: bool) -> None:
    assert levels.pay(levels.levels_of(nodes, flat_max=4)) is pay


def test_a_rank_of_ten_thousand_nodes_has_few_connections_and_reads_little() -> None:
    large = levels.levels_of([str(rank // 8) for rank in range(80_000)], levels.FLAT_MAX)
    places = levels.places_of(large)
    counts = [sum(len(place.group) - 1 for place in its) for its in places.values()]
    assert len(counts) == 80_000
    assert max(counts) < 300 and sorted(counts)[60_000] == 7
    assert len(msgspec.json.encode(places)) < 200 * 80_000
    assert [[place.number, place.size] for place in places[16]] == [[16, 80_000], [2, 10_000]]


def test_one_rank_is_answered_what_it_gives() -> None:
    alone = OneRank()
    assert alone.minimum([3, -1]) == [3, -1]
    assert alone.gather(b"x") == alone.collect(b"x") == alone.to_first(b"x") == [b"x"]
    assert alone.from_first(b"x") == alone.hand_out([b"x"]) == b"x"


def test_ranks_that_wait_for_each_other_before_they_make_groups_are_not_asleep() -> None:
    waits = levels.wait_for_ranks.__code__
    stack = [
        Frame(waits.co_filename, waits.co_firstlineno, waits.co_name),
        Frame(waits.co_filename, levels.agree.__code__.co_firstlineno, "agree"),
        Frame("/home/me/job.py", 40, "<module>"),
    ]
    activity = activity_of(stack)
    assert activity is not None
    assert (activity.kind, activity.place) == (ActivityKind.COLLECTIVE, "job.py:40")


def test_a_rank_whose_copy_fails_answers_the_others_first(
    opened: Callable[..., Checkpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[Sequence[int]] = []

    class Noting(OneRank):
        def begin_minimum(self, values: Sequence[int]) -> Callable[[], list[int]]:
            def answer() -> list[int]:
                answered.append(values)
                return [*values]

            return answer

    def fail(*_: object) -> str:
        raise ValueError("no copy")

    checkpoints = opened()
    checkpoints._ranks = Noting()
    assert checkpoints.save({"w": torch.zeros(5)}, 1)
    monkeypatch.setattr(checkpoints, "_fill", fail)
    with pytest.raises(ValueError, match="no copy"):
        checkpoints.save({"w": torch.zeros(5)}, 2)
    assert [values[3] for values in answered][-1] == 2
