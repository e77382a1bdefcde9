"""The loss of a node loses no step. State that a node has in memory is not read from disk."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.checkpoint.storage import store_at
from tests.e2e.harness import PATIENCE_S, Cluster
from tests.e2e.test_in_place import Residents

SHARDED = str(Path(__file__).parent / "programs" / "sharded.py")
STEPS, FATAL = 9, 5


def undisturbed() -> dict[int, float]:
    """Return the losses of the same training in one process."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = {}
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step + 1] = loss.item()
    return losses


@pytest.mark.slow
def test_a_sharded_job_that_loses_a_node_goes_on_from_the_memory_of_the_others(cluster: Cluster) -> None:
    folder = cluster.folder / "out"
    folder.mkdir()
    cluster.limits = (2, 2)
    options = ("--replicate=1",)
    program = (SHARDED, str(folder), str(STEPS), str(FATAL))
    agents = cluster.start("a", "b", "c", slots=1, options=options, program=program)
    for agent in agents:
        assert agent.process.wait(3 * PATIENCE_S) in (0, -signal.SIGKILL), agent.said()
    assert sum(agent.process.returncode != 0 for agent in agents) == 1
    for rank in range(2):
        first, second = (folder / f"began-{rank}").read_text().splitlines()
        assert first == "0 nothing 2"
        step, tier, world = second.split()
        assert (tier, world) == ("peer", "2") and int(step) == FATAL
    expected = undisturbed()
    made = [line.split() for line in (folder / "losses").read_text().splitlines()]
    assert {int(step) for step, _ in made} == set(expected)
    for step, loss in made:
        assert float(loss) == pytest.approx(expected[int(step)], rel=1e-4)


@pytest.mark.slow
def test_a_lone_worker_that_is_drained_leaves_every_step_to_the_newcomer(cluster: Cluster) -> None:
    residents = Residents(cluster)
    cluster.limits = (1, 1)
    options = (f"--checkpoints={cluster.folder}/kept",)
    (a,) = residents.start("a", slots=1, options=options)
    first, _ = residents.world(1)
    (b,) = residents.start("b", slots=1, options=options)
    cluster.until_said(b, "agent.started")
    a.signal(signal.SIGTERM)
    residents.world(1, after=first)
    assert a.end() == 128 + signal.SIGTERM
    residents.finish(b)  # the test sees that each step was made once
    committed = FilePointer(store_at(cluster.folder / "kept")).read().saved
    assert committed and committed[-1].step > 0


@pytest.mark.slow
def test_a_spare_that_was_left_behind_goes_on_from_what_was_kept_since(cluster: Cluster) -> None:
    """The spare has a whole state in memory, but an old one."""
    residents = Residents(cluster)
    cluster.limits = (1, 2)
    kept = cluster.folder / "kept"
    (a,) = residents.start("a", slots=2, options=("--spares=1", f"--checkpoints={kept}"))
    first, before = residents.world(2)
    assert cluster.command("scale", cluster.job, "--min=1", "--max=1").code == 0
    second, (active,) = residents.world(1, after=first)
    (spare,) = set(before) - {active}
    left = spare.did("committed")[-1]["step"]

    def committed() -> int:
        newest = FilePointer(store_at(kept)).read().newest
        return newest.step if newest else 0

    cluster.until(lambda: committed() > left + 20, "checkpoints are committed without the spare")
    there = committed()
    os.kill(active.pid, signal.SIGKILL)
    _, (after,) = residents.world(1, after=second)
    assert after is spare and spare.did("entered")[-1]["step"] >= there
    after.tell("stop_after", step=there + 100)
    assert a.end() == 0, a.said()
    losses: dict[int, set[float]] = defaultdict(set)
    for player in (*before, active):
        for made in player.did("committed"):
            losses[made["step"]].add(made["loss"])
    assert sorted(losses) == list(range(there + 101))
    assert all(len(alike) == 1 for alike in losses.values()), "one training"
