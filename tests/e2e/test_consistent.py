"""In consistent mode the weights and the optimizer's state have the same bits at the end, whatever the worlds
were and whatever happened to the workers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.harness import PATIENCE_S, Agent, Cluster

PROGRAM = Path(__file__).parent / "programs" / "consistent.py"
STEPS = {"digits": 30, "gpt": 34}
ACCIDENTS = ("kill", "stop", "sleep")
DRAINED = 143  # the exit code of an agent


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write scikit-learn's pictures to a file for the programs: an import of scikit-learn takes seconds."""
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    images = (table[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    np.savez(path, images=images, labels=table[:, -1].astype(np.int64))
    return path


class Training:
    """One job in a folder of its own."""

    def __init__(self, folder: Path, digits: Path, kind: str, **schedule: Any) -> None:
        self.folder, self.kind = folder, kind
        folder.mkdir()
        (folder / "digits.npz").symlink_to(digits)
        (folder / "schedule.json").write_text(json.dumps(schedule))

    @property
    def program(self) -> tuple[str, ...]:
        return str(PROGRAM), self.kind, str(self.folder)

    def results(self) -> set[str]:
        """Return the results of the workers of the last world."""
        found = [json.loads(path.read_text()) for path in self.folder.glob("*.result")]
        assert found and all(f["done"] == STEPS[self.kind] for f in found), found
        assert all(f["last"] < f["first"] for f in found), "it learns"
        return {f["digest"] for f in found}


@pytest.fixture
def train(tmp_path: Path, digits: Path) -> Callable[..., Training]:
    def make(kind: str, **schedule: Any) -> Training:
        return Training(tmp_path / f"training{len(list(tmp_path.iterdir()))}", digits, kind, **schedule)

    return make


def alone(training: Training, cluster: Cluster) -> set[str]:
    """Train in one process, without an agent."""
    environment = {k: v for k, v in cluster.environment().items() if not k.startswith("E2E_")}
    done = subprocess.run(
        [sys.executable, *training.program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return training.results()


def undisturbed(training: Training, cluster: Cluster, size: int) -> set[str]:
    cluster.limits = (size, size)
    (agent,) = cluster.start("a", slots=size, program=training.program)
    assert agent.end() == 0, agent.said()
    assert len(list(training.folder.glob("*.result"))) == size
    return training.results()


def disturbed(training: Training, cluster: Cluster, first: int, nodes: int = 1) -> set[str]:
    """Train with the accidents of the schedule. Whenever the workers wait for a world, scale the job, and
    replace a node by another one. Any two nodes have room for the largest world."""
    cluster.limits = (2, first)
    cluster.policy |= {"hang_floor_s": 0.03, "part_s": 10}
    options = ("--max-restarts=100",)

    def start() -> None:
        name = f"node{len(cluster.agents)}"
        cluster.start(name, slots=8 if nodes == 1 else 4, options=options, program=training.program)

    for _ in range(nodes):
        start()
    alive = [*cluster.agents]
    schedule = json.loads((training.folder / "schedule.json").read_text())
    for done, size, leaves in schedule["waits"]:

        def waits(done: int = done, alive: Sequence[Agent] = alive) -> bool:
            assert all(agent.process.poll() is None for agent in alive), cluster.state()
            return any(m["done"] == done for p in cluster.stage.players for m in p.did("waits"))

        cluster.until(waits, f"after {done} steps they wait")
        said = cluster.command("scale", cluster.job, f"--max={size}")
        assert said.code == 0, said.err
        if leaves:
            start()
            alive.append(cluster.agents[-1])
            agent = alive.pop(0)
            if leaves == "drained":
                said = cluster.command("drain", agent.name)
                assert said.code == 0, said.err
                assert agent.end() == DRAINED, agent.said()
            else:

                def spread(size: int = size) -> bool:
                    """Whether the world has a worker of another node. If not, the loss of the node would lose
                    the state."""
                    here = [p.did("entered") for p in cluster.stage.players if not p.gone]
                    return any(entered and entered[-1]["world"] == size for entered in here)

                cluster.until(spread, f"a world of {size}")
                agent.kill()
        (training.folder / f"scaled-{done}").touch()
    for agent in alive:
        assert agent.end() == 0, agent.said()
    expected = {f"{what}-{at}-{where}" for at, _, where, what in schedule["accidents"]}
    had = {path.name for what in ACCIDENTS for path in training.folder.glob(f"{what}-*")}
    assert had == expected, "all the accidents, and no others"
    sizes = {m["world"] for p in cluster.stage.players for m in p.did("entered")}
    assert {size for _, size, _ in schedule["waits"]} <= sizes
    return training.results()


def test_killed_grown_and_shrunk_it_ends_as_one_process_alone_does_to_the_last_bit(
    train: Callable[..., Training], clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    reference = alone(train("digits"), clusters(shared_etcd))
    assert len(reference) == 1
    schedule = {"waits": [(8, 3, ""), (16, 2, "")], "accidents": [(11, 2, "forward", "kill")]}
    assert disturbed(train("digits", **schedule), clusters(shared_etcd), 2) == reference


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["digits", "gpt"])
def test_worlds_of_any_size_and_random_schedules_of_kills_and_resizes_end_alike(
    kind: str, train: Callable[..., Training], clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    reference = alone(train(kind), clusters(shared_etcd))
    assert len(reference) == 1
    for size in (2, 3, 4, 5, 8):
        assert undisturbed(train(kind), clusters(shared_etcd), size) == reference, f"a world of {size}"
    for seed in range(3):
        schedule, first = random_schedule(random.Random(seed), STEPS[kind])
        found = disturbed(train(kind, **schedule), clusters(shared_etcd), first)
        assert found == reference, f"schedule {seed}: {schedule}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["digits", "gpt"])
def test_random_schedules_of_kills_hangs_drains_and_lost_nodes_end_alike_on_several_nodes(
    kind: str, train: Callable[..., Training], clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    reference = alone(train(kind), clusters(shared_etcd))
    assert len(reference) == 1
    for seed in range(3):
        schedule, first = random_schedule(random.Random(100 + seed), STEPS[kind], nodes=3)
        found = disturbed(train(kind, **schedule), clusters(shared_etcd), first, nodes=3)
        assert found == reference, f"schedule {seed}: {schedule}"


def random_schedule(chance: random.Random, steps: int, nodes: int = 1) -> tuple[dict[str, Any], int]:
    """Draw six resizes, five accidents, and the size of the first world. On several nodes a node leaves at
    some of the resizes, and some workers hang."""
    ways = ("", "", "drained", "drained", "lost") if nodes > 1 else ("",)
    waits = []
    for at in sorted(chance.sample(range(1, steps), 6)):
        leaves = chance.choice(ways)
        waits.append((at, chance.randint(5 if leaves == "lost" else 2, 8), leaves))
    points = ("begun", "forward", "summed", "stepped")
    kinds = ("kill", *ACCIDENTS) if nodes > 1 else ("kill",)
    accidents = [
        (at, chance.randrange(8), chance.choice(points), chance.choice(kinds))
        for at in chance.sample(range(steps), 5)
    ]
    return {"waits": waits, "accidents": accidents}, chance.randint(2, 8)
