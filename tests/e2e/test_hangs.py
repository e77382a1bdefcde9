"""Workers that hang are found, named with the place, and replaced; those that only take long are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.harness import Cluster

PROGRAM = Path(__file__).parent / "programs" / "hang.py"
# So that the limits that are learned from steps of some ten milliseconds are seconds, not half minutes.
OPTIONS = ("--hang-floor=0.03", "--max-restarts=20")


def _line(word: str) -> str:
    lines = PROGRAM.read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# {word}"))
    return f"hang.py:{number}"


def _hung(cluster: Cluster) -> list[dict[str, Any]]:
    found = {e["round"]: e for agent in cluster.agents for e in agent.find("workers.hung")}
    return [found[round] for round in sorted(found)]


def test_whatever_hangs_is_named_and_replaced_but_not_what_only_takes_long(cluster: Cluster) -> None:
    cluster.limits = (3, 3)
    faults = ["loading", "stopped", "missing", "mismatched", "deadlock"]
    # At last nothing is wrong, but one computes for long, and then sleeps until a program has ended.
    program = [str(PROGRAM), ",".join([*faults, "evaluation"])]
    (a,) = cluster.start("a", slots=3, options=OPTIONS, program=program, env={"EVALUATION_S": "4"})
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
    for event in hung:
        folder = cluster.folder / event["evidence"]
        assert {f.name for f in folder.iterdir()} == {
            "conclusion.txt", "rank-0.txt", "rank-1.txt", "rank-2.txt",
        }  # fmt: skip
        assert (folder / "conclusion.txt").read_text() == event["conclusion"] + "\n"
        assert "hang.py" in (folder / "rank-0.txt").read_text()
    assert {e["cause"] for e in a.find("round.formed")} == {"start", "worker_hung"}
    (ended, *_) = a.find("worker.ended", rank=1)
    assert ended["message"].startswith("hung: rank 1 on node a") and "see" in ended["message"]


def test_nodes_find_out_together_whose_worker_hangs(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    agents = cluster.start("a", "b", options=OPTIONS, program=[str(PROGRAM), "loading"])
    assert [agent.end() for agent in agents] == [0, 0], cluster.state()
    (hung,) = _hung(cluster)
    (guilty,) = hung["nodes"]
    assert hung["conclusion"] == (
        f"rank 1 on node {guilty} is in {_line('loading')}, data loading; "
        "the other one waits for it in all_reduce"
    )
    assert len({e["evidence"] for a in agents for e in a.find("workers.hung")}) == 2, "each keeps what it saw"
