"""Jobs that run the programs of this folder and have an accident: a worker is killed, or the world is
resized."""

from __future__ import annotations

import select
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.harness import PATIENCE_S, Agent, Cluster
from tests.integrations.ledger import Ledger, read

PROGRAMS = Path(__file__).parent / "programs"
SLICE_S = 0.02  # seconds between two looks at a folder
SAMPLES, EPOCHS = 53, 2  # steps of each program


@dataclass(frozen=True)
class Trained:
    """A job that has ended."""

    agent: Agent
    ledger: Ledger
    processes: int = field(default=0)

    @property
    def outcome(self) -> str:
        return self.ledger.judge(SAMPLES, EPOCHS)


def killed(cluster: Cluster, program: str, *arguments: str, limits: tuple[int, int] = (2, 2)) -> Trained:
    """Train with as many workers as the larger limit. Kill one of them after step 6. If the others can go on
    alone, they do so before the replacement joins them."""
    cluster.limits = limits
    accident = "outlive:6" if min(limits) < max(limits) else "kill:6"
    agent = start(cluster, program, *arguments, accident=accident, slots=max(limits))
    return ended(cluster, agent)


def resized(cluster: Cluster, program: str, *arguments: str, sizes: tuple[int, int] = (2, 3)) -> Trained:
    """Train with as many workers as the first size; after step 6, with as many as the second."""
    before, after = sizes
    cluster.limits = (1, before)
    agent = start(cluster, program, *arguments, accident="wait:6", slots=max(sizes))
    until(cluster, agent, lambda: len([*cluster.folder.glob("waits-*")]) == before)
    said = cluster.command("scale", cluster.job, f"--max={after}")
    assert said.code == 0, said.err
    cluster.until(
        lambda: agent.find("round.closing") + agent.find("round.awaiting_checkpoint"),
        f"the world changes to {after}",
    )
    (cluster.folder / "go").touch()
    cluster.until(lambda: agent.find("round.closing"), "the round ends")
    (cluster.folder / "closing").touch()
    return ended(cluster, agent)


def stopped(cluster: Cluster, program: str, *arguments: str) -> int:
    """Train with two workers, and stop the agent after step 6. Return its exit code."""
    cluster.limits = (2, 2)
    agent = start(cluster, program, *arguments, accident="wait:6")
    until(cluster, agent, lambda: len([*cluster.folder.glob("waits-*")]) == 2)
    agent.signal(signal.SIGTERM)
    cluster.until(
        lambda: agent.find("workers.stopping") + agent.find("workers.leaving"),
        "the workers are asked to end",
    )
    for file in ("go", "closing"):
        (cluster.folder / file).touch()
    return agent.end(4 * PATIENCE_S)


def killed_in_an_evaluation(cluster: Cluster, program: str, kind: str) -> Trained:
    """Train with two workers. Kill one of them while it evaluates the first epoch. Both workers then evaluate
    both epochs."""
    cluster.limits = (2, 2)
    arguments = (kind, str(cluster.folder / "output"), "1", "1000", "2")
    trained = ended(cluster, start(cluster, program, *arguments, accident="evaluate:0"))
    evaluated = {path.name for path in cluster.folder.glob("evaluated-*")}
    assert evaluated == {f"evaluated-{epoch}-{rank}" for epoch in (0, 1) for rank in (0, 1)}
    return trained


def start(cluster: Cluster, program: str, *arguments: str, accident: str = "none:0", slots: int = 2) -> Agent:
    cluster.policy["settle_s"] = 0
    env = {"LEDGER": str(cluster.folder), "ACCIDENT": accident}
    (agent,) = cluster.start("a", slots=slots, program=(str(PROGRAMS / program), *arguments), env=env)
    return agent


def ended(cluster: Cluster, agent: Agent) -> Trained:
    assert agent.end(4 * PATIENCE_S) == 0, agent.said()
    return Trained(agent, read(cluster.folder), len([*cluster.folder.glob("notes-*")]))


def until(cluster: Cluster, agent: Agent, holds: Callable[[], object]) -> None:
    """Wait for files in the cluster's folder. No event tells of them."""
    while not holds():
        assert agent.process.poll() is None, agent.said()
        select.select([], [], [], SLICE_S)
