"""Scripts that save when SIGTERM asks them to leave, each in its own way: no step is made twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.checkpoint.storage import store_at
from tests.e2e.harness import Cluster

LEAVING = str(Path(__file__).parent / "programs" / "leaving.py")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["own", "checkpoints"])
@pytest.mark.parametrize("asked", ["drained", "preempted"])
def test_a_script_that_saves_when_it_is_asked_to_leave_makes_no_step_twice(
    cluster: Cluster, how: str, asked: str
) -> None:
    folder = cluster.folder / "out"
    folder.mkdir()
    kept = cluster.folder / "kept"
    cluster.limits = (1, 2)
    a, b = cluster.start("a", "b", program=(LEAVING, str(folder), how), options=(f"--checkpoints={kept}",))
    both = cluster.until_said(a, "workers.started", world_size=2)
    line = "made a step in a world of 2"
    cluster.until(lambda: any(line in said for said in a.out + b.out), "they train together")
    if asked == "drained":
        assert cluster.command("drain", "b").code == 0
    else:
        b.signal(signal.SIGTERM)
    assert b.end() == 128 + signal.SIGTERM, b.said()
    cluster.until(
        lambda: [e for e in a.find("workers.started", world_size=1) if e["round"] > both["round"]],
        "it goes on alone",
    )
    (folder / "stop").touch()
    assert a.end() == 0, a.said()

    made = [tuple(map(int, line.split())) for line in (folder / "steps").read_text().splitlines()]
    assert [step for _, step in made] == list(range(1, len(made) + 1)), "each once"
    left = [int(line) for line in (folder / "left").read_text().split()]
    assert len(left) >= 2 and left[-1] == len(made)
    assert all((2, step) in made for step in left[-2:-1]), "together, and went on from there"
    if how == "checkpoints":
        saved = FilePointer(store_at(kept)).read().saved
        assert [s.step for s in saved] == left[-3:], "committed before they left"
    assert not a.find("failure.charged") + b.find("failure.charged")
