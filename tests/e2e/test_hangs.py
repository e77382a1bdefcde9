"""Workers that hang are found, named with the line where they are, and replaced. Workers that only need long
are not."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Cluster
from tests.e2e.test_scrape import fetch, url_of

PROGRAM = Path(__file__).parent / "programs" / "hang.py"
STUCK = PROGRAM.with_name("stuck.py")
# Limits are learned from steps of some ten milliseconds. With these settings they are seconds, not half
# minutes.
RESTARTS = ("--max-restarts=20",)
HASTY = {"hang_floor_s": 0.03}


def _line(word: str) -> str:
    lines = PROGRAM.read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# {word}"))
    return f"hang.py:{number}"


def _files(ranks: int, recorders: Iterable[int]) -> set[str]:
    """Return the files with the evidence of a hang, of all nodes together. ``recorders``: the ranks whose
    flight recorder was written."""
    kept = {f"rank-{rank}.txt" for rank in range(ranks)}
    return {"conclusion.txt"} | kept | {f"flight-recorder-{rank}.json" for rank in recorders}


def _in_flight(cluster: Cluster, hung: dict[str, Any], rank: int) -> str:
    """Return the collective that the worker was in, according to torch's flight recorder."""
    folder = cluster.folder / hung["evidence"]
    assert json.loads((folder / f"flight-recorder-{rank}.json").read_text())["entries"]
    *_, last = (folder / f"rank-{rank}.txt").read_text().rstrip().splitlines()
    assert last.endswith(": not over"), last
    return last.split()[1]


def _hung(cluster: Cluster) -> list[dict[str, Any]]:
    found = {e["round"]: e for agent in cluster.agents for e in agent.find("workers.hung")}
    return [found[round] for round in sorted(found)]


def test_hung_workers_are_named_and_replaced_but_slow_ones_are_not(cluster: Cluster) -> None:
    cluster.limits = (3, 3)
    cluster.policy |= HASTY
    faults = ["loading", "stopped", "missing", "mismatched", "deadlock"]
    # In the last round nothing hangs. One worker computes for long, and then sleeps until a program has
    # ended.
    program = [str(PROGRAM), ",".join([*faults, "evaluation"])]
    (a,) = cluster.start("a", slots=3, options=RESTARTS, program=program, env={"EVALUATION_S": "4"})
    for times in range(1, 1 + len(faults)):  # every fault is found after some time
        cluster.until_said(a, "workers.hung", times=times)
        if times == 3:  # by then the failure before has been charged
            shown = json.loads(fetch(f"{url_of(a)}status"))["last_failure"]["message"]
            page = html.unescape(fetch(url_of(a)))
    assert a.end() == 0, a.said()
    hung = _hung(cluster)
    assert [e["ranks"] for e in hung] == [[1]] * 5
    said = dict(zip(faults, (e["conclusion"] for e in hung), strict=True))
    assert said["loading"] == (
        f"rank 1 on node a is in {_line('loading')}, data loading; the other 2 wait for it in all_reduce"
    )
    assert said["stopped"].startswith("rank 1 on node a is stopped (SIGSTOP)")
    assert "; the other 2 wait for it" in said["stopped"]
    assert f"the other 2 wait in barrier at {_line('barrier')}" in said["missing"]
    assert f"rank 1 on node a waits in all_gather at {_line('mismatched')}" in said["mismatched"]
    assert f"rank 1 on node a is in {_line('deadlock')}" in said["deadlock"]
    assert said["stopped"] in shown or said["missing"] in shown, shown
    assert said["stopped"] in page or said["missing"] in page, page
    assert said["deadlock"] in cluster.command("status", cluster.job).out
    for fault, event in zip(faults, hung, strict=True):
        folder = cluster.folder / event["evidence"]
        told = {0, 2} if fault == "stopped" else {0, 1, 2}
        assert {f.name for f in folder.iterdir()} == _files(3, told)
        assert (folder / "conclusion.txt").read_text() == event["conclusion"] + "\n"
        assert "hang.py" in (folder / "rank-0.txt").read_text()
    assert _in_flight(cluster, hung[0], 0) == "gloo:all_reduce"
    for event, wrong in ((hung[2], "gloo:all_reduce"), (hung[3], "gloo:all_gather")):
        assert [_in_flight(cluster, event, rank) for rank in range(3)] == [
            "gloo:barrier",
            wrong,
            "gloo:barrier",
        ]
    assert {e["cause"] for e in a.find("round.formed")} == {"start", "worker_hung"}
    (ended, *_) = a.find("worker.ended", rank=1)
    assert ended["message"].startswith("hung: rank 1 on node a") and "see" in ended["message"]


def _evidence(cluster: Cluster, round: int) -> set[str]:
    """Return the files with the evidence of hangs that all nodes together have kept."""
    told = [e for agent in cluster.agents for e in agent.find("workers.hung", round=round)]
    assert len({e["conclusion"] for e in told}) == 1, "all say the same"
    return {file.name for e in told for file in (cluster.folder / e["evidence"]).iterdir()}


@pytest.mark.slow
def test_nodes_find_out_together_whose_worker_hangs(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    cluster.policy |= HASTY
    agents = cluster.start("a", "b", options=RESTARTS, program=[str(PROGRAM), "loading,stopped"])
    for agent in agents:
        for times in (1, 2):
            cluster.until_said(agent, "workers.hung", times=times)
    assert [agent.end() for agent in agents] == [0, 0], cluster.state()
    loading, stopped = _hung(cluster)
    (guilty,) = loading["nodes"]
    assert loading["conclusion"] == (
        f"rank 1 on node {guilty} is in {_line('loading')}, data loading; "
        "the other one waits for it in all_reduce"
    )
    (guilty,) = stopped["nodes"]
    assert stopped["ranks"] == [1] and stopped["why"] == "stopped"
    assert stopped["conclusion"].startswith(f"rank 1 on node {guilty} is stopped (SIGSTOP)")
    assert stopped["conclusion"].endswith("; the other one waits for it in barrier")
    for hung in (loading, stopped):
        assert _evidence(cluster, hung["round"]) == _files(2, {0} if hung is stopped else {0, 1})
    assert len({e["evidence"] for a in agents for e in a.find("workers.hung")}) == 4, "each keeps what it saw"


@pytest.mark.slow
def test_a_hang_on_several_nodes_is_named_with_evidence_from_all_ranks(cluster: Cluster) -> None:
    cluster.limits = (4, 4)
    cluster.policy |= HASTY
    faults = ["stopped", "missing", "mismatched", "deadlock"]
    agents = cluster.start("a", "b", slots=2, options=RESTARTS, program=[str(PROGRAM), ",".join(faults)])
    for agent in agents:
        for times in range(1, 1 + len(faults)):
            cluster.until_said(agent, "workers.hung", times=times)
    assert [agent.end() for agent in agents] == [0, 0], cluster.state()
    hung = _hung(cluster)
    assert [e["ranks"] for e in hung] == [[1]] * 4
    stopped, missing, mismatched, deadlock = (e["conclusion"] for e in hung)
    (guilty,) = {node for e in hung[-1:] for node in e["nodes"]}
    assert stopped.endswith("; the other 3 wait for it in barrier") and "(SIGSTOP)" in stopped
    assert f"but the other 3 wait in barrier at {_line('barrier')}" in missing
    assert f"waits in all_gather at {_line('mismatched')}" in mismatched
    assert f"rank 1 on node {guilty} is in {_line('deadlock')}" in deadlock
    for one in hung:
        assert _evidence(cluster, one["round"]) == _files(4, {0, 2, 3} if one is hung[0] else range(4))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [{"a": 3}, {"a": 2, "b": 1}], ids=["one node", "two nodes"])
def test_a_survivor_that_is_stuck_before_its_first_step_in_a_world_is_replaced(
    cluster: Cluster, nodes: dict[str, int]
) -> None:
    cluster.limits = (2, 3)
    cluster.policy |= HASTY
    program = (str(STUCK), str(cluster.folder / "dead"))
    agents = [
        agent
        for name, slots in nodes.items()
        for agent in cluster.start(name, slots=slots, options=RESTARTS, program=program)
    ]
    hung = cluster.until_said(agents[0], "workers.hung")
    (number,) = (n for n, line in enumerate(STUCK.read_text().splitlines(), 1) if line.endswith("# stuck"))
    assert f"is in stuck.py:{number}" in hung["conclusion"]
    assert [agent.end() for agent in agents] == [0] * len(agents), [agent.said() for agent in agents]
