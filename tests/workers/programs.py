"""The programs of ``workers/`` in small configurations, and the faults that happen to them.

A fault comes after a step that is counted in the worker itself, so that the fault comes at the same place
each time.
"""

from __future__ import annotations

import math
import os
import re
import select
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.harness import PATIENCE_S, Agent, Cluster

WORKERS = Path(__file__).parents[2] / "workers"
ACCIDENT = str(Path(__file__).with_name("accident.py"))
SLICE_S = 0.02  # seconds between two looks at a folder


@dataclass(frozen=True)
class Program:
    """A program in a small configuration.

    ``after``: a fault comes after so many steps of a worker's optimizers, and a second one after twice as
    many. ``rank``: of that worker. ``accuracy``: the least balanced accuracy on held-out images, in percent.
    ``loss``: the largest held-out loss. ``unit``: of ``elasticd run --unit``. ``same_bits``: the weights have
    the same bits, whether or not a worker is killed. ``audited``: the audit proves that each draw was used
    once. ``says``: a line that the program prints if a worker is killed. ``samples``: how many all workers
    together handle from one step of that worker's optimizers to the next. ``beside``: the program that trains
    the same model with DistributedDataParallel.
    """

    name: str
    arguments: str
    after: int
    accuracy: float = 0.0
    loss: float = math.inf
    rank: int = 1
    workers: int = 2
    unit: int = 1
    same_bits: bool = False
    audited: bool = False
    says: str = ""
    samples: int = 64
    beside: str = "ddp"

    def __str__(self) -> str:
        return self.name

    def argv(self, folder: Path) -> list[str]:
        return [str(WORKERS / f"{self.name}.py"), *self.arguments.format(folder=folder).split()]

    def require_quality(self, said: list[str]) -> str:
        """Check what a finished program printed about held-out data, and return that line."""
        line = [line for line in said if line.startswith("held-out")][-1]
        accuracy, loss = (re.search(pattern, line) for pattern in (r"accuracy ([\d.]+)%", r"loss.* ([\d.]+)"))
        assert not self.accuracy or (accuracy and float(accuracy[1]) >= self.accuracy), line
        assert self.loss == math.inf or (loss and float(loss[1]) <= self.loss), line
        return line


TEXT = Path(os.__file__).parent / "asyncio"
GPT = f"--data={TEXT} --layers=2 --heads=2 --width=32 --context=32 --log-every=10"
KEPT = "--checkpoints={folder}/kept"
FSDP = f"--steps=40 --bf16 --recompute {KEPT}"
OF_GPT: dict[str, Any] = {"samples": 24, "beside": "train_gpt"}
PROGRAMS = [
    Program("ddp", "--epochs=6", 35, accuracy=90, same_bits=True),
    Program("imbalanced", "--epochs=16", 30, accuracy=80, same_bits=True, audited=True),
    Program(
        "local_sgd",
        "--meetings=8 --inner-steps=50",
        130,
        accuracy=90,
        says="goes on after 50 of 50 steps of its own",
    ),
    Program("parameter_server", "--gradients=400 --snapshot-every=50", 120, accuracy=85, rank=0, samples=32),
    Program("accumulation", "--steps=80", 20, accuracy=90, samples=256),
    Program("growing_batch", "--epochs=5", 30, accuracy=85),
    Program("data_parallel", "--epochs=5", 50, accuracy=90, rank=0, workers=1, same_bits=True),
    Program("layers_on_devices", "--epochs=5", 30, accuracy=90),
    Program("train_gpt", f"{GPT} --steps=40 --snapshot-every=5 --sample=0", 10, loss=3.6, **OF_GPT),
    Program("pipeline", "--steps=110 --unit=2", 30, accuracy=85, workers=4, unit=2),
    Program("tensor_parallel", "--steps=80 --unit=2", 20, accuracy=85, workers=4, unit=2),
    Program("train_gpt_fsdp", f"{GPT} {FSDP}", 10, loss=3.6, **OF_GPT),
    Program("train_gpt_fsdp_in_place", f"{GPT} --steps=40 --bf16 --recompute", 10, loss=3.6, **OF_GPT),
    Program("train_gpt_in_place", f"{GPT} --steps=40", 10, loss=3.6, same_bits=True, **OF_GPT),
]


def start(
    cluster: Cluster, program: Program, *kinds: str, rank: int | None = None, nodes: tuple[str, ...] = ("a",)
) -> list[Agent]:
    """Start the program on these nodes, with a fault of each of these kinds. ``rank``: by default the
    program's."""
    cluster.limits = (program.unit, program.workers)
    argv = program.argv(cluster.folder)
    if kinds:
        whose = program.rank if rank is None else rank
        accidents = [f"{kind}:{whose}:{steps_until(program, n)}" for n, kind in enumerate(kinds)]
        argv = [ACCIDENT, ",".join(accidents), str(cluster.folder), *argv]
    cluster.policy["settle_s"] = PATIENCE_S  # the first world has workers of all nodes
    options = ["--audit"] if program.audited else []
    if program.unit > 1:
        options.append(f"--unit={program.unit}")
    return cluster.start(*nodes, slots=program.workers // len(nodes), options=options, program=argv)


def steps_until(program: Program, number: int) -> int:
    """Return the steps before the fault of that number, which counts from 0."""
    return program.after * (number + 1)


def end(program: Program, *agents: Agent) -> str:
    """Wait for the end of a job that reaches its quality. Return the line with its quality."""
    for agent in agents:
        assert agent.end(4 * PATIENCE_S) == 0, agent.said()
    return program.require_quality([line for agent in agents for line in agent.out])


def weights(agent: Agent) -> str:
    return next(line for line in agent.out if line.startswith("weights"))


# ---------------------------------------------------------------- faults


def killed(cluster: Cluster, program: Program) -> str:
    """Kill a worker."""
    return end(program, *start(cluster, program, "kill"))


def hung(cluster: Cluster, program: Program) -> str:
    """Stop a worker. The agents must notice."""
    return end(program, *start(cluster, program, "stop"))


def node_lost(cluster: Cluster, program: Program) -> str:
    """Kill the node of a worker, with its agent."""
    first, second = agents = start(cluster, program, "wait", nodes=("a", "b"))
    until_there(cluster, str(steps_until(program, 0)), *agents)
    lost = next(a for a in agents if any(program.rank in e["ranks"] for e in a.find("workers.started")))
    lost.kill()
    return end(program, first if lost is second else second)


def resized(cluster: Cluster, program: Program) -> str:
    """Shrink the world by a worker, or by a unit, and grow it again."""
    (agent,) = start(cluster, program, "wait", "wait", rank=0)  # the rank of this worker is in each world

    def changes() -> int:
        """Return how often a change of the world was begun, or delayed until the next snapshot."""
        return len(agent.find("round.closing") + agent.find("round.awaiting_checkpoint"))

    for number, size in enumerate((program.workers - program.unit, program.workers)):
        steps = steps_until(program, number)
        until_there(cluster, str(steps), agent)
        before = changes()
        said = cluster.command("scale", cluster.job, f"--max={size}")
        assert said.code == 0, said.err
        cluster.until(lambda before=before: changes() > before, f"the world changes to {size}")  # type: ignore[misc]
        let_go(cluster, program, number)
    found = end(program, agent)
    sizes = [event["world_size"] for event in agent.find("round.formed")]
    assert sizes == [program.workers, program.workers - program.unit, program.workers], sizes
    return found


def let_go(cluster: Cluster, program: Program, number: int) -> None:
    """End the fault with that number, which is a "wait"."""
    (cluster.folder / f"go-{steps_until(program, number)}").touch()


def until_there(cluster: Cluster, name: str, *agents: Agent) -> None:
    """Wait for a file in the cluster's folder. No event tells of it."""
    while not (cluster.folder / name).exists():
        for agent in agents:
            assert agent.process.poll() is None, agent.said()
        select.select([], [], [], SLICE_S)


FAULTS: dict[str, Callable[[Cluster, Program], str]] = {
    "worker killed": killed,
    "worker hangs": hung,
    "node lost": node_lost,
    "two resizes": resized,
}


def applies(fault: str, program: Program) -> bool:
    """Whether the fault can happen to the program: a program with one worker has no second node, and cannot
    shrink."""
    return program.workers > 1 or fault in ("worker killed", "worker hangs")
