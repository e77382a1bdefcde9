"""``elasticd run --debug``: what it prints and keeps about ranks that disagree."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Agent, Cluster
from tests.e2e.test_in_place import Residents

PROGRAM = Path(__file__).parent / "programs" / "mistaken.py"


@pytest.fixture
def alone(clusters: Callable[[str | None], Cluster]) -> Cluster:
    made = clusters(None)
    made.limits = (2, 2)
    return made


def start(cluster: Cluster, *mistakes: str, options: tuple[str, ...] = ()) -> Agent:
    given = ("--debug", "--max-restarts=0", *options)
    [agent] = cluster.start("a", slots=2, options=given, program=(str(PROGRAM), *mistakes))
    return agent


def records(cluster: Cluster) -> Path:
    [folder] = (cluster.folder / "state").glob("elasticd/logs/*/debug")
    return folder


def test_disagreements_of_ranks_are_shown_at_a_failure_and_at_the_end_and_are_kept(alone: Cluster) -> None:
    agent = start(alone, "weights", "fails")
    assert agent.end() == 1, agent.said()
    first, second = [event["text"] for event in agent.find("debug.disagreement", round=1)]
    assert first.startswith("The weights of rank 0 and of rank 1 differ after step 1, first in bias")
    assert "rank 1 raised ValueError: no such file at " in second
    closing = [line for line in agent.text if line.startswith("Debug: ")]
    folder = records(alone)
    assert closing == [
        f"Debug: {first}",
        f"Debug: {second}",
        f"Debug: The records of the ranks are in {folder}.",
    ]
    summary = (folder / "round-1" / "summary.txt").read_text()
    assert f"* {first}\n* {second}\n" in summary
    assert "rank 1: raised ValueError: no such file at " in summary
    for run in (alone.job, str(folder), str(folder.parent)):
        again = alone.command("debug", run, etcd=False)
        assert (again.code, again.out) == (1, summary), again


@pytest.mark.slow
def test_ranks_that_hang_in_different_collectives_are_named_before_the_hang_is_judged(alone: Cluster) -> None:
    agent = start(alone, "order", options=("--hang-after=4",))
    assert agent.end() == 1, agent.said()
    names = [event["event"] for event in agent.events]
    assert names.index("debug.disagreement") < names.index("workers.hung")
    stacks = records(alone) / "round-1" / "stacks"
    assert "called broadcast (root 0)" in (stacks / "conclusion.txt").read_text()
    for rank in range(2):
        assert "mistaken.py" in (stacks / f"rank-{rank}.txt").read_text()
        assert "gloo:" in (stacks / f"flight-recorder-{rank}.json").read_text()


@pytest.mark.slow
def test_a_barrier_that_a_rank_never_reaches_is_named_once_the_round_hangs(alone: Cluster) -> None:
    agent = start(alone, "sleeps", options=("--hang-after=4",))
    assert agent.end() == 1, agent.said()
    [said] = [event["text"] for event in agent.find("debug.disagreement")]
    assert said.startswith("As collective 12, rank 0 called barrier at ")
    assert "; rank 1 did not: its last one was all_reduce" in said


@pytest.mark.slow
def test_debug_says_that_the_ranks_of_a_correct_script_agree(alone: Cluster) -> None:
    agent = start(alone)
    assert agent.end() == 0, agent.said()
    assert not agent.find("debug.disagreement")
    [agreed] = agent.find("debug.agreed")
    assert agreed["text"].endswith("agree, as far as they are compared: each called 12 collectives.")


@pytest.mark.slow
def test_workers_that_keep_their_process_agree_through_a_kill(alone: Cluster) -> None:
    """Each round has records of its own. No rank is blamed for a collective that a lost peer interrupted."""
    alone.limits = (1, 3)
    residents = Residents(alone)
    [agent] = residents.start("a", slots=3, options=("--debug",))
    number, players = residents.world(3)
    os.kill(players[1].pid, signal.SIGKILL)
    residents.world(3, after=number)
    residents.finish(agent)
    found = [event["text"] for event in agent.find("debug.disagreement")]
    assert [text for text in found if "seeds" not in text] == []
    rounds = sorted(folder.name for folder in records(alone).iterdir())
    assert len(rounds) >= 2


@pytest.mark.slow
def test_ranks_of_two_nodes_are_compared_while_the_job_runs(
    clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    cluster = clusters(shared_etcd)
    cluster.limits = (2, 2)
    nodes = cluster.start("a", "b", options=("--debug",), program=(str(PROGRAM), "weights", "sleeps"))
    said = cluster.until(
        lambda: [event for node in nodes for event in node.find("debug.disagreement")],
        "one agent says where the ranks of both nodes disagree",
    )
    assert [event["text"].partition(" (")[0] for event in said] == [
        "The weights of rank 0 and of rank 1 differ after step 1, first in bias"
    ]
