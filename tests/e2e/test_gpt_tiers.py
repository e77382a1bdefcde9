"""The GPTs of ``workers/`` through kills and resizes. Their state comes from each tier: workers, memory of
nodes, disk. Each run ends as an undisturbed one would."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import PATIENCE_S, Agent, Cluster, assert_nothing_left, marked

WORKERS = Path(__file__).parents[2] / "workers"
DATA = str(Path(os.__file__).parent / "asyncio")
STEPS = 600  # enough steps for a busy machine, on which the job trains on while new processes start
SHAPE = f"--layers=2 --heads=2 --width=32 --context=32 --lr=1e-3 --steps={STEPS} --log-every=1"
OPTIONS = ("--replicate=1", "--checkpoint-every=1", "--hang-after=off", "--max-restarts=100")
# of a loss whose sums were added up in another order; from step to step the loss changes by 0.09
ROUNDING = 2e-3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Training:
    """One job of such a script. ``resumed`` says, oldest first, from where its worlds had their state."""

    def __init__(self, cluster: Cluster, script: str, *flags: str) -> None:
        self.cluster, self.script, self.flags = cluster, script, flags
        self.checkpoints = f"--checkpoints={cluster.folder}/kept"
        cluster.limits = (2, 8)

    @property
    def program(self) -> tuple[str, ...]:
        return (str(WORKERS / f"{self.script}.py"), f"--data={DATA}", *SHAPE.split(), *self.flags)

    def start(self, *names: str, slots: int) -> list[Agent]:
        options = (*OPTIONS, self.checkpoints)
        return self.cluster.start(*names, slots=slots, options=options, program=self.program)

    @property
    def step(self) -> int:
        said = (re.match(r"step +(\d+) ", line) for line in self.said)
        return max((int(m[1]) for m in said if m), default=0)

    @property
    def resumed(self) -> list[tuple[str, int, int]]:
        """Return the tier, the step and the world size of each resume."""
        if self.script == "train_gpt_fsdp":
            pattern = r"resumed after step (\d+) of \d+ from (\w+), (\d+) w"
            found = (re.match(pattern, line) for line in self.said)
            return sorted((m[2], int(m[1]), int(m[3])) for m in found if m)
        worlds: dict[int, list[dict[str, object]]] = {}
        for agent in self.cluster.agents:
            for event in agent.find("worker.entered"):
                worlds.setdefault(event["round"], []).append(event)
        for events in worlds.values():
            assert len({(e["state_from"], e["step"]) for e in events}) == 1, "all from the same"
        return [
            (str(events[0]["state_from"]), int(str(events[0]["step"])), len(events))
            for _, events in sorted(worlds.items())
            if events[0]["step"]
        ]

    def goes_on(self, world: int, steps: int = 8) -> None:
        """Wait until a world of that size has made some steps."""

        def lives() -> bool:
            begun = [event for agent in self.cluster.agents for event in agent.find("workers.started")]
            newest = max(begun, key=lambda event: event["round"], default=None)
            return newest is not None and newest["world_size"] == world

        self.cluster.until(lives, f"there is a world of {world}")
        goal = self.step + steps
        self.cluster.until(lambda: self.step >= goal, f"it goes on to step {goal}")
        assert lives() and goal < STEPS

    def until_saved(self, world: int) -> None:
        """Wait until the saver has all shards of a world of that size, and has written them. Until a shard is
        handed over, only its worker has it."""
        begun = max(step for _, step, size in self.resumed if size == world)
        self.cluster.until(
            lambda: [
                e for a in self.cluster.agents for e in a.find("checkpoint.committed") if e["step"] > begun
            ],
            f"a step after {begun} is committed",
        )

    def workers(self, *nodes: str) -> list[int]:
        """Return the processes of the workers."""

        def known() -> list[int]:
            round = self.cluster.round
            pids = []
            for member in round.members:
                if member.node in nodes:
                    told = self.cluster.told(member.node)
                    there = told.progress if told is not None else None
                    if there is None or there.round != round.number:
                        return []
                    pids += [slot.pid for slot in there.slots]
            return pids if all(pids) else []

        return self.cluster.until(known, f"the workers of {nodes} are known")

    @contextmanager
    def standstill(self, *nodes: str) -> Iterator[list[int]]:
        """Stop the workers of these nodes within the block, which may take long."""
        pids = self.workers(*nodes)
        send(signal.SIGSTOP, pids)
        yield pids
        send(signal.SIGCONT, pids)

    def kill(self, pids: list[int]) -> None:
        """Kill all of these processes at once."""
        send(signal.SIGSTOP, pids)
        send(signal.SIGKILL, pids)

    def scale(self, most: int, *nodes: str) -> None:
        with self.standstill(*nodes):
            said = self.cluster.command("scale", self.cluster.job, f"--max={most}")
            assert said.code == 0, said.err

    def until_resumed(self, tier: str, *, times: int = 1) -> None:
        self.cluster.until(
            lambda: [t for t, _, _ in self.resumed].count(tier) >= times, f"{tier} is resumed from"
        )

    @property
    def said(self) -> list[str]:
        return [line for agent in self.cluster.agents for line in [*agent.out]]


def send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # its agent or its warden may be faster
            os.kill(pid, number)


def digest(said: list[str]) -> str:
    [its] = [line for line in said if line.startswith("weights and optimizer: ")]
    return its


def losses(said: list[str]) -> list[tuple[int, float]]:
    """Return the printed losses by step, also of steps that were abandoned and made again."""
    found = (re.match(r"step +(\d+)  loss ([\d.]+) ", line) for line in said)
    return [(int(m[1]), float(m[2])) for m in found if m]


def undisturbed(training: Training) -> list[str]:
    """Return what the script prints in one process, without an agent."""
    environment = {k: v for k, v in training.cluster.environment().items() if not k.startswith("E2E_")}
    argv = [sys.executable, *training.program]
    if training.script == "train_gpt_fsdp":
        argv.append(f"--checkpoints={training.cluster.folder}/alone")
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def holders(mark: str) -> list[int]:
    """Return the processes with that mark that hold memory of shards."""
    return [
        pid
        for pid in marked(mark)
        if any("elasticd" in open_file and "memfd" in open_file for open_file in files_of(pid))
    ]


def files_of(pid: int) -> list[str]:
    found = []
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.append(os.readlink(link))
    return found


def held(agent: Agent) -> dict[str, int]:
    """Return the bytes by kind that the status page shows."""
    page = agent.find("agent.started")[0]["http"]
    with urllib.request.urlopen(f"{page}status", timeout=PATIENCE_S) as answer:
        (own,) = json.load(answer)["nodes"]
        return {"own": own["own_bytes"], "replicas": own["replica_bytes"]}


@pytest.mark.parametrize("with_warden", [False, True], ids=["the agent", "the agent and its warden"])
def test_memory_of_checkpoints_and_copies_is_shown_and_gone_when_it_is_killed(
    with_warden: bool, clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    training = Training(clusters(shared_etcd), "train_gpt_fsdp")
    cluster = training.cluster
    agents = training.start("a", "b", slots=1)
    training.goes_on(2)

    def settled() -> bool:
        """Whether each node holds two buffers of its own, and copies of both buffers of the other node,
        according to every source."""
        said = json.loads(cluster.command("status", cluster.job, "--json").out)["nodes"]
        shown = {n["node"]: {"own": n["own_bytes"], "replicas": n["replica_bytes"]} for n in said}
        a, b = shown["a"], shown["b"]
        ring = (a["own"], b["own"]) == (b["replicas"], a["replicas"])
        return ring and 0 not in a.values() and all(held(agent) == shown[agent.name] for agent in agents)

    cluster.until(settled, "both nodes hold their own and the other's")
    assert "B of other nodes'" in cluster.command("status", cluster.job).out

    assert holders(cluster.mark)
    processes = [agent.pid for agent in agents]
    if with_warden:
        children = [child for pid in processes for child in psutil.Process(pid).children()]
        processes += [child.pid for child in children if child.name() == "elasticd-warden"]
        assert len(processes) == 2 * len(agents)
    send(signal.SIGSTOP, processes)
    send(signal.SIGKILL, processes)
    for agent in agents:
        agent.process.wait()
    assert_nothing_left(cluster)
    assert not holders(cluster.mark)


@pytest.mark.parametrize("how", ["consistent", "DDP", "FSDP2"])
def test_gpt_ends_as_if_nothing_had_happened_whichever_memory_or_disk_it_had_to_go_on_from(
    how: str, clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    in_place = how != "FSDP2"
    script = "train_gpt_in_place" if in_place else "train_gpt_fsdp"
    training = Training(clusters(shared_etcd), script, *(["--ddp"] if how == "DDP" else []))

    (a,) = training.start("a", slots=4)
    training.goes_on(4)
    training.kill(training.workers("a")[:1])
    training.until_resumed("survivor" if in_place else "memory")
    training.goes_on(4)
    training.kill(training.workers("a"))
    training.until_resumed("memory", times=1 if in_place else 2)
    training.goes_on(4)

    with training.standstill("a"):
        b, c = training.start("b", "c", slots=2)
        for agent in (b, c):
            training.cluster.until_said(agent, "agent.started")
    training.goes_on(8)
    before = len([t for t, _, _ in training.resumed if t == "peer"])
    lost = training.workers("a", "b", "c")
    send(signal.SIGSTOP, lost)
    training.until_saved(8)
    b.kill()
    send(signal.SIGKILL, lost)
    training.until_resumed("peer", times=before + 1)
    training.goes_on(6)

    training.scale(3, "a", "c")
    training.goes_on(3)
    training.scale(8, "a", "c")
    training.goes_on(6)

    a.kill()
    c.kill()
    assert not [t for t, _, _ in training.resumed if t == "disk"]
    (d,) = training.start("d", slots=2)
    training.until_resumed("disk")
    training.goes_on(2)
    assert d.end() == 0, d.said()

    tiers = {t for t, _, _ in training.resumed}
    assert tiers == {"memory", "peer", "disk"} | ({"survivor"} if in_place else set())
    assert {2, 3, 4, 6, 8} <= {world for _, _, world in training.resumed}
    alone = undisturbed(training)
    if how == "consistent":
        assert digest(training.said) == digest(alone), "to the last bit"
    expected, made = dict(losses(alone)), losses(training.said)
    assert max(made)[0] == STEPS
    for step, loss in made:
        assert loss == pytest.approx(expected[step], abs=ROUNDING), step


def test_a_checkpoint_of_another_model_is_refused_at_once_and_in_a_sentence(
    clusters: Callable[[str | None], Cluster],
) -> None:
    cluster = clusters(None)
    cluster.limits = (2, 2)
    program = (
        str(WORKERS / "train_gpt_fsdp.py"),
        f"--data={DATA}",
        "--layers=1",
        "--heads=1",
        "--context=32",
    )
    options = (f"--checkpoints={cluster.folder}/kept",)
    ended = []
    for width, job in ((32, "first"), (16, "second")):
        cluster.job = job
        (a,) = cluster.start(
            "a", slots=2, options=options, program=(*program, "--steps=1", f"--width={width}")
        )
        ended.append(a.end())
    assert ended == [0, 2], a.said()
    assert len(a.find("workers.started")) == 1, "another try would find the same"
    assert a.text[-1].startswith("elasticd: model.") and " has the shape [" in a.text[-1]
    assert a.text[-1].endswith(
        f"or start anew with checkpoints in another folder than {cluster.folder}/kept."
    )
