"""``python -m tests.worker.shardchaos``: losses and resizes of worlds that train the small GPT in FSDP2 or
HSDP, drawn from a seed. The losses of all steps are compared with those of an undisturbed run. Some trainings
are in consistent mode: their losses and weights must have the bits of an undisturbed run of DDP.

Workers are real processes, and are really killed and stopped; the crew takes the agent's place. Most scripts
have no checkpoint, so all state comes from the workers' memory, and a lost part of the state would end the
run. Other scripts have a saver beside the workers, and may lose more workers at once than there are copies.
Then the state comes from the saver's memory, and never from the disk.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from elasticd.channel.worker_messages import Source
from elasticd.data.audit import judge
from elasticd.data.auditnotes import FOLDER, lines
from tests.checkpoint.faults import Helper
from tests.worker import shardgpt
from tests.worker.chaos import run_seeds
from tests.worker.crew import Crew, Hand

STEPS = 8
TOLERANCE = 1e-7  # of sums in another order, in float64
PER_NODE = 2
FROM_WORKERS = (Source.SURVIVOR, Source.REPLICA, Source.COPY)
FROM_MEMORY = (*FROM_WORKERS, Source.MEMORY)
PAUSE_S = 0.2  # how long a worker stays stopped, until its agent notices


@dataclass(frozen=True)
class Event:
    """What happens once step ``step`` is made. ``kind``: kill, stop, node, grow, shrink; twice (shrink, and
    shrink again before the next world); or lose (kill more workers than there are copies). ``many``: the
    number of workers."""

    kind: str
    step: int
    many: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.many} after {self.step}"


@dataclass(frozen=True)
class Plan:
    """``saves``: a saver has the commits. ``virtual_ranks``: 0 if the samples do not come from worker.Data.
    ``consistent``: in consistent mode. ``whole``: in DDP. ``overlap``: copies are sent while the next step
    runs. ``blocks_only``: the embedding and the norm are replicated. ``bare``: the model is on the meta
    device at first. ``late``: two workers are connected when they first talk, as in a large world."""

    workers: int
    redundancy: int
    unit: int
    events: tuple[Event, ...]
    saves: bool = False
    virtual_ranks: int = 0
    consistent: bool = False
    whole: bool = False
    overlap: bool = False
    blocks_only: bool = False
    bare: bool = False
    late: bool = False

    def __str__(self) -> str:
        mode = f"HSDP of {self.unit}" if self.unit > 1 else "FSDP2"
        events = ", ".join(map(str, self.events))
        mode = "consistent " * self.consistent + mode
        more = (
            ", blocks only" * self.blocks_only
            + ", meta device" * self.bare
            + ", overlap" * self.overlap
            + ", saves" * self.saves
            + ", connected late" * self.late
            + f", Data in {self.virtual_ranks}" * (self.virtual_ranks > 0)
        )
        return f"{mode}, {self.workers} workers, redundancy {self.redundancy}{more}; {events}"


def draw(seed: int) -> Plan:
    """Return the plan of a seed. Half of the plans with copies send them while the next steps run. A third
    have replicated parameters, and a third begin on the meta device. A fourth are connected late. Half of the
    plans have worker.Data, most of these in consistent mode. A fourth have a saver, and lose more workers
    than there are copies. In most worlds of eight a worker is lost."""
    plan, chance = _simple(seed), random.Random(f"more shards {seed}")
    parts = random.Random(f"parts {seed}")
    plan = replace(plan, blocks_only=parts.random() < 0.3, bare=parts.random() < 0.3)
    plan = replace(plan, late=parts.random() < 0.25)
    plan = replace(plan, overlap=plan.redundancy > 0 and random.Random(f"overlap {seed}").random() < 0.5)
    if chance.random() < 0.5:
        consistent = random.Random(f"mode {seed}").random() < 0.7
        plan = replace(plan, virtual_ranks=chance.randint(1, 8), consistent=consistent)
    if plan.events[0].many == 6 and plan.redundancy and chance.random() < 0.7:
        there, back = plan.events
        loss = Event(chance.choice(["kill", "stop"]), there.step + 1, plan.redundancy)
        return replace(plan, events=(there, loss, replace(back, many=back.many - loss.many)))
    if chance.random() < 0.25:
        loss = Event("lose", max(3, plan.events[-1].step), max(PER_NODE, plan.redundancy + 1))
        return replace(plan, events=(*plan.events[:-1], loss), saves=True)
    return plan


def _simple(seed: int) -> Plan:
    """Let each loss cost at most as many workers as there are copies, and come once its world has the
    copies."""
    chance = random.Random(f"shards {seed}")
    unit, redundancy = chance.choice([1, 1, 2]), chance.choice([0, 1, 1, 2])
    if chance.random() < 0.15:
        there = Event("grow", 1, 6), Event("shrink", 4, 6)
        return Plan(2, redundancy, unit, there)
    kinds = ["grow", "shrink", "twice"] + ["kill", "kill", "stop", "node"] * (redundancy > 0)
    steps = sorted(chance.sample(range(1, STEPS - 1), chance.choice([1, 2, 2, 3])))
    workers = left = chance.randint(3, 5)
    events = []
    for step in steps:
        kind = chance.choice(kinds)
        many = chance.randint(1, redundancy) if kind in ("kill", "stop") else chance.randint(1, 2)
        if kind == "node":
            many = PER_NODE
        event = Event(kind, step, many)
        loses = many + (kind == "twice")
        if kind != "grow" and left - loses < (2 if kind != "node" else 1):
            event = Event("grow", step, many)
        left += many if event.kind == "grow" else -loses
        events.append(event)
    return Plan(workers, redundancy, unit, tuple(events))


class Agent(Crew):
    """Runs one training to its end. ``losses``: of each step, as all workers reported."""

    def __init__(self, plan: Plan, folder: Path, chance: random.Random) -> None:
        super().__init__()
        self.plan, self.folder, self._chance = plan, folder, chance
        self._made = -1
        self._saver, self._helper = "", contextlib.ExitStack()
        self._news = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._news.bind("\0" + self.address + "-news")
        self._selector.register(self._news, 1, self._told)
        self.reads = 0  # of checkpoints from disk
        self.losses: dict[int, set[float]] = {}
        self.outcomes: list[list[float | str]] = []

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._helper.close()
        self._news.close()

    def add(self) -> Hand:
        plan, name = self.plan, str(len(self.hands))
        news = self.address + "-news"
        asked = str(self.folder), name, news, STEPS, plan.redundancy, plan.unit
        data = {"virtual_ranks": plan.virtual_ranks, "consistent": plan.consistent}
        more = {"whole": plan.whole, "overlap": plan.overlap, "blocks_only": plan.blocks_only}
        more |= {"late": plan.late}
        return self.start(shardgpt.work, *asked, saver=self._saver, bare=plan.bare, **data, **more)

    def see_through(self) -> None:
        """Run the training. Raises AssertionError if it does not end."""
        if self.plan.saves:
            self._saver, _ = self._helper.enter_context(Helper("forker.py")).saver(linger_s=None)
        self.form(*[self.add() for _ in range(self.plan.workers)])
        for event in self.plan.events:
            self.until(functools.partial(self._is_due, event))
            if not self._is_over():
                self._befall(event)
        self.until(self._is_over)

    def _is_due(self, event: Event) -> bool:
        return self._is_over() or (self._made >= event.step and not self.closing and self._has_copies())

    def _has_copies(self) -> bool:
        """Whether every shard has all its copies: all workers train in the present world."""
        return all(hand.entered and hand.entered[-1].round == self.round for hand in self.members)

    def _is_over(self) -> bool:
        return all(hand.status is not None or hand.shunned for hand in self.members)

    def _befall(self, event: Event) -> None:
        members = [hand for hand in self.members if hand.status is None]
        chosen = self._chance.sample(members, min(event.many, len(members) - 1))
        match event.kind:
            case "kill" | "lose":
                self._kill(chosen)
            case "stop":
                self._signal(signal.SIGSTOP, chosen)
                time.sleep(PAUSE_S)  # the agent notices a stopped worker after a while
                self._kill(chosen)
            case "node":
                first = PER_NODE * self._chance.randrange(max(1, len(members) // PER_NODE))
                self._kill(self.members[first : first + PER_NODE])
            case "grow":
                self.all_ready([self.add() for _ in range(event.many)])
            case "shrink" | "twice":
                self._shrink(chosen, again=event.kind == "twice")

    def _kill(self, hands: list[Hand]) -> None:
        """Kill the workers. Wait until the end of their world is noticed, so that the world has no further
        loss."""
        self._signal(signal.SIGKILL, hands)
        self.until(lambda: all(hand.status is not None for hand in hands))

    def _signal(self, number: int, hands: list[Hand]) -> None:
        for hand in hands:
            if hand.process.pid is not None:
                os.kill(hand.process.pid, number)

    def all_ready(self, newcomers: list[Hand]) -> None:
        self.until(lambda: all(hand.waiting is not None for hand in newcomers) or self._is_over())
        if not self._is_over() and not self.closing:
            self.close(planned=True)

    def _shrink(self, going: list[Hand], *, again: bool) -> None:
        staying = [hand for hand in self.members if hand not in going and hand.status is None]
        if len(staying) < 2:
            again = False
        for hand in going:
            hand.shunned = True
        self.least = 99 if again else 1
        self.close(planned=True, going=tuple(going))
        if not again:
            return
        self.until(lambda: all(hand.waiting is not None for hand in (*staying, *going)) or self._is_over())
        self.least = 1
        if all(hand.waiting is not None for hand in staying):
            staying[-1].shunned = True
            self.form(*staying, handover=True)

    def _environment(self, rank: int) -> dict[str, str]:
        return super()._environment(rank) | {"GROUP_RANK": str(rank // PER_NODE)}

    def _told(self) -> None:
        _, what, step, values = json.loads(self._news.recv(1 << 16))
        if what == "outcome":
            self.outcomes.append(values)
        elif what == "read":
            self.reads += 1
        else:
            self.losses.setdefault(step, set()).add(values)
            self._made = max(self._made, step)


@functools.cache
def undisturbed(
    virtual_ranks: int = 0, *, blocks_only: bool = False
) -> tuple[dict[int, set[float]], list[float | str]]:
    """Return the losses of each step, and the outcome, of one worker. ``virtual_ranks``: 0, or the number of
    virtual ranks for a run of the whole model in consistent mode. ``blocks_only``: gradients are clipped as
    if only the blocks were sharded."""
    consistent = virtual_ranks > 0
    folder = Path(tempfile.mkdtemp(prefix="shardchaos-"))
    try:
        plan = Plan(1, 0, 1, (), virtual_ranks=virtual_ranks, consistent=consistent, whole=consistent)
        plan = replace(plan, blocks_only=blocks_only)
        with Agent(plan, folder, random.Random(0)) as agent:
            agent.see_through()
            return agent.losses, agent.outcomes[0]
    finally:
        shutil.rmtree(folder)


def run(seed: int, befell: Counter[str] | None = None) -> list[str]:
    """Run the plan of the seed. Return what is wrong with the run. ``befell`` counts the events, and where
    the state came from."""
    plan = draw(seed)
    exact = plan.virtual_ranks if plan.consistent else 0
    losses, outcome = undisturbed(exact, blocks_only=plan.blocks_only)
    folder = Path(tempfile.mkdtemp(prefix="shardchaos-"))
    try:
        with Agent(plan, folder, random.Random(f"victims {seed}")) as agent:
            try:
                agent.see_through()
            except AssertionError as error:
                return [str(error)[:2000], *_errors(folder)]
            if befell is not None:
                befell.update(event.kind for event in plan.events)
                befell["read from disk"] += agent.reads
                befell.update(f"from {m.source}" for hand in agent.hands for m in hand.entered if m.step)
            audited = _audited(folder) if plan.virtual_ranks else []
            return (
                _differences(agent, losses, outcome) + audited + (_errors(folder) if _failed(agent) else [])
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _failed(agent: Agent) -> list[str]:
    fine = (0, -signal.SIGKILL, None)
    return [f"worker {n} ended with {h.status}" for n, h in enumerate(agent.hands) if h.status not in fine]


def _errors(folder: Path) -> list[str]:
    said = {path.name: path.read_text().strip().splitlines() for path in sorted(folder.glob("*.err"))}
    return [f"{name}: {lines[-1][:300]}" for name, lines in said.items() if lines]


def _differences(agent: Agent, losses: dict[int, set[float]], outcome: list[float | str]) -> list[str]:
    found, exact = _failed(agent), agent.plan.consistent
    if not agent.outcomes:
        found.append(f"no worker has come to the end: {agent}")
    for step, [right] in sorted(losses.items()):
        wrong = [loss for loss in agent.losses.get(step, {math.nan}) if not _close(loss, right, exact=exact)]
        if wrong:
            found.append(f"step {step} had the loss {wrong}, not {right}")
    for values in agent.outcomes:
        if not all(_close(*pair, exact=exact) for pair in zip(values, outcome, strict=True)):
            found.append(f"the weights are {values}, not {outcome}"[:300])
    right_sources = FROM_MEMORY if agent.plan.saves else FROM_WORKERS
    for hand in agent.hands:
        found += [
            f"{m.source} in round {m.round}" for m in hand.entered if m.step and m.source not in right_sources
        ]
    if agent.reads:
        found.append(f"checkpoints were read from disk {agent.reads} times, and memory had the state")
    return found


def _audited(folder: Path) -> list[str]:
    """Return what is wrong with the samples, according to the workers' notes."""
    verdict = judge({path.name: lines(path.read_bytes()) for path in (folder / FOLDER).iterdir()})
    used = [(epoch.used, epoch.over) for epoch in verdict.epochs]
    right = [(STEPS * shardgpt.BATCH, True)]
    return [str(one)[:300] for one in verdict.findings] + ([f"samples: {used}"] if used != right else [])


def _close(one: float | str, other: float | str, *, exact: bool) -> bool:
    if exact or isinstance(one, str) or isinstance(other, str):
        return one == other
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def main() -> int:
    return run_seeds("tests.worker.shardchaos", __doc__, run, draw)


if __name__ == "__main__":
    sys.exit(main())
