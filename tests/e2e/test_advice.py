"""A real run in which the agent gives each of its warnings about a script."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.harness import Cluster

FORGETFUL = str(Path(__file__).parent / "programs" / "forgetful.py")


def test_a_run_tells_once_each_what_its_script_does_not_do(cluster: Cluster) -> None:
    cluster.limits = (1, 2)
    cluster.policy |= {"quarantine_after": 1, "quarantine_s": 600}
    options = ["--audit", "--checkpoint-every=10"]
    (a,) = cluster.start("a", slots=2, options=options, program=[FORGETFUL, "60"])
    assert a.end() == 0, cluster.state()
    assert [e["option"] for e in a.find("option.without_effect")] == ["--checkpoint-every", "--audit"]
    assert [(e["before"], e["now"]) for e in a.find("data.batches_changed")] == [(2, 1)]
    (again,) = a.find("training.began_again")
    assert again["furthest"] >= 20
    assert "repeating lost steps" in a.screen
