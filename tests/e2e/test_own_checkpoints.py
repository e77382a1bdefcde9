"""Scripts that write checkpoints of their own and report them: a resize loses no work."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest

from tests.e2e.harness import Cluster

SNAPSHOTS = str(Path(__file__).parent / "programs" / "snapshots.py")


@pytest.mark.slow
def test_a_script_that_tells_of_its_checkpoints_is_resized_right_after_one_and_makes_no_step_twice(
    cluster: Cluster,
) -> None:
    folder = cluster.folder / "out"
    folder.mkdir()
    cluster.limits = (1, 2)
    cluster.pace["--shutdown-timeout"] = "100"  # a node that leaves may wait for half of this time
    (a,) = cluster.start("a", program=(SNAPSHOTS, str(folder)))
    cluster.until_said(a, "checkpoint.told", times=2)
    (b,) = cluster.start("b", program=(SNAPSHOTS, str(folder)))
    grown = cluster.until_said(a, "workers.started", world_size=2)
    told = len(a.find("checkpoint.told"))
    cluster.until_said(a, "checkpoint.told", times=told + 1)
    b.signal(signal.SIGTERM)
    assert b.end() == 128 + signal.SIGTERM
    cluster.until(
        lambda: [e for e in a.find("workers.started", world_size=1) if e["round"] > grown["round"]],
        "it goes on alone",
    )
    told = len(a.find("checkpoint.told"))
    cluster.until_said(a, "checkpoint.told", times=told + 1)
    (folder / "stop").touch()
    assert a.end() == 0, a.said()

    made = [tuple(map(int, line.split())) for line in (folder / "steps").read_text().splitlines()]
    assert [step for _, step in made] == list(range(1, len(made) + 1)), "each once"
    assert [world for world, _ in itertools.groupby(made, key=lambda one: one[0])] == [1, 2, 1]
    assert a.find("round.awaiting_checkpoint") or b.find("round.awaiting_checkpoint")
    assert not a.find("failure.charged") + b.find("failure.charged")
