"""Stories: text files that say what happens to a job, and record what its agents and its leader do about it.

A story runs in the simulator, with the real agents and the real leader. The network always takes one
millisecond, and nothing is random. A line that starts at the left margin is an event, written by a person;
``EVENTS`` has all kinds of events. The indented lines below an event are what followed: the seconds since the
story began, who acted, and the words that the log of a real job has for it. A line that starts with ``#`` is
a comment. The first comment is the story's title.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partial
from random import Random
from typing import Any, TypeVar

from elasticd.core.agent_messages import StoreComplained, StoreFilled, WardenLost
from elasticd.core.facts import Limits, Policy
from elasticd.core.gpu_health import GpuErrors, note_errors
from elasticd.core.page_layout import Fatal
from elasticd.core.reasons import (
    FailureCharged,
    JobEnded,
    RoundClosing,
    RoundFormed,
    SlotBad,
    SlotDrained,
    SlotQuarantined,
    Wait,
    WorkerKeepsUp,
    WorkerStraggling,
)
from elasticd.telemetry import describe
from tests.sim.clock import START, Clock
from tests.sim.cluster import Cluster, Setup, SimAgent
from tests.sim.inspector import Illness
from tests.sim.invariants import Invariants
from tests.sim.procs import Job, World

MOST_S = 7200.0  # how long a story waits for the condition in an event
DELAY_S = 0.001  # each way between an agent and etcd
# The reasons that an agent gives as the leader.
Leaders = (Wait | FailureCharged | JobEnded | RoundClosing | RoundFormed | SlotDrained | SlotQuarantined) | (
    SlotBad | WorkerKeepsUp | WorkerStraggling
)
T = TypeVar("T")


class Misread(Exception):
    """A line of a story has no meaning, or waits for something that does not happen."""


class NoDice(Random):
    """Random numbers that are always the lowest: delays are the shortest of their range, and random faults
    never happen."""

    def random(self) -> float:
        return 0.0


class StoryClock(Clock):
    """Records what happened, in words for people, each thing once."""

    def __init__(self) -> None:
        super().__init__("story")
        self.lines: list[str] = []

    def random(self, purpose: str) -> Random:
        return NoDice()

    def note(self, who: str, what: object) -> None:
        # the leader and the agent have better words for these
        if who == "round" or " fails by itself" in f"{what}":
            return
        if isinstance(what, Leaders):
            who = f"leader {who}"
        said = what if isinstance(what, str) else describe.sentence(what, self.now())  # type: ignore[arg-type]
        self.lines.append(f"{self.now() - START:10.1f}  {who:<10} {said}".rstrip())


@dataclass(slots=True)
class Stage:
    """What a story acts on. ``job``: its settings, until the first node starts."""

    clock: StoryClock = field(default_factory=StoryClock)
    setup: Setup = field(default_factory=lambda: Setup((), Limits(1, 1), Policy(), job=Job(**_JOB)))
    built: Cluster | None = None
    told: int = 0  # how many lines of the transcript have been returned

    @property
    def cluster(self) -> Cluster:
        if self.built is None:
            self.built = Cluster("story", self.setup, self.clock)
            self.built.network.fastest_s = self.built.network.slowest_s = DELAY_S
            Invariants(self.built)
        return self.built

    def agent(self, name: str) -> SimAgent:
        if name not in self.cluster.agents:
            raise Misread(f"there is no node {name}")
        return self.cluster.agents[name]

    def news(self) -> list[str]:
        """Return the new lines of the transcript."""
        told, self.told = self.told, len(self.clock.lines)
        return self.clock.lines[told:]

    def wait(self, done: Callable[[], bool], what: str) -> None:
        if not done() and not self.clock.run(until=self.clock.now() + MOST_S, done=done):
            raise Misread(f"{what!r} does not happen within {MOST_S:g} s")

    def later(self, seconds: str, act: Callable[[], None]) -> None:
        self.clock.after(float(seconds), act)


_JOB: dict[str, Any] = {"total_steps": 1000, "step_s": 1.0, "start_s": (0.3, 0.3), "end_s": (0.1, 0.1)}
EVENTS: list[tuple[re.Pattern[str], Callable[..., None]]] = []


def event(pattern: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the function for lines of this form. The parts in parentheses are its arguments; ``N`` stands
    for a name."""

    def enter(act: Callable[..., None]) -> Callable[..., None]:
        EVENTS.append((re.compile(pattern.replace("N", r"([a-z]\w*)")), act))
        return act

    return enter


def _set(facts: T, settings: str) -> T:
    """Return the facts, with the fields changed that these ``key=value`` name."""
    known = {f.name for f in fields(facts)}  # type: ignore[arg-type]
    pairs = (pair.partition("=") for pair in settings.split())
    changes = {key: _value(getattr(facts, key), text) for key, _, text in pairs if key in known}
    return replace(facts, **changes)  # type: ignore[type-var]


def _value(old: object, text: str) -> object:
    if isinstance(old, Enum):
        return type(old)(text)
    if isinstance(old, tuple):
        return (float(text), float(text))
    return type(old)(text) if isinstance(old, (float, str)) else int(text)


# ---------------------------------------------------------------- the job and its nodes


@event(r"job ((?: ?\w+=\S+)+)")
def _job(stage: Stage, settings: str) -> None:
    """``job min=2 max=4``: sets any field of Policy, of Setup, or of the simulator's Job."""
    assert stage.built is None, "the settings come before the first node"
    _check(settings, Limits, Policy, Setup, Job)
    most = re.search(r"max=(\d+)", settings)
    least = re.search(r"min=(\d+)", settings)
    limits = Limits(int(least[1]) if least else 1, int(most[1]) if most else 1)
    old = stage.setup
    stage.setup = replace(
        _set(old, settings), limits=limits, policy=_set(old.policy, settings), job=_set(old.job, settings)
    )


def _check(settings: str, *kinds: type) -> None:
    known = {f.name for kind in kinds for f in fields(kind)}
    if unknown := {pair.partition("=")[0] for pair in settings.split()} - known:
        raise Misread(f"there is no setting {', '.join(sorted(unknown))}")


@event(r"nodes? ([\w ]+?) starts? with (\d+) slots?(?:, though with ((?: ?\w+=\S+)+))?")
def _start(stage: Stage, names: str, slots: str, other: str | None) -> None:
    """``nodes a b start with 2 slots``. With ``, though with max=9`` their command line differs from the
    first node's."""
    rules = stage.cluster.setup
    if other:
        _check(other, Limits, Policy, Setup)
        limits, policy = _set(rules.limits, other), _set(rules.policy, other)
        stage.cluster.setup = replace(_set(rules, other), limits=limits, policy=policy)
    for name in names.split():
        stage.cluster.join(name, int(slots), unless_over=False)
        state = stage.agent(name).driver.state
        config = replace(state.config, began_at=stage.clock.now())
        stage.agent(name).driver.state = replace(state, config=config)
    stage.cluster.setup = rules


@event(r"another agent called N starts with (\d+) slots?")
def _start_namesake(stage: Stage, name: str, slots: str) -> None:
    """Start an agent of the same name on another machine, while the first one runs."""
    stage.clock.note(name, f"another agent of this name starts with {slots} slots")
    namesake = SimAgent(stage.cluster, name, int(slots), 0.0, machine="another machine")
    stage.cluster.agents[f"{name}2"] = namesake
    stage.cluster.all.append(namesake)


@event(r"agents? ([\w ]+?) (?:is|are) killed(?:, and started again (\d+) s later)?")
def _kill_agent(stage: Stage, names: str, seconds: str | None) -> None:
    """Kill the agent. Its workers die with it."""
    for name in names.split():
        stage.agent(name).crash()
        if seconds:
            stage.later(seconds, partial(stage.cluster.restart, name))


@event(r"agent N is stopped for (\d+) s")
def _pause(stage: Stage, name: str, seconds: str) -> None:
    """Stop the agent alone (SIGSTOP)."""
    stage.clock.note(name, "the agent is stopped")
    stage.agent(name).host.pause()

    def resume() -> None:
        stage.clock.note(name, "the agent goes on")
        stage.agent(name).host.resume()

    stage.later(seconds, resume)


@event(r"node N gets (SIG\w+)")
def _signal(stage: Stage, name: str, signal: str) -> None:
    stage.agent(name).signal(signals.Signals[signal])


@event(r"the warden of N's workers is killed")
def _kill_keeper(stage: Stage, name: str) -> None:
    """Kill the warden. The workers die with it."""
    agent = stage.agent(name)
    for worker in agent.procs.workers.values():
        worker.exited = lambda *_: None  # no process is left that could report the ends
    agent.procs.kill()
    agent.post(WardenLost())


@event(r"node N is cut off from etcd for (\d+) s")
def _cut(stage: Stage, name: str, seconds: str) -> None:
    stage.agent(name).store.cut_off()
    stage.later(seconds, stage.agent(name).store.reconnect)


# ---------------------------------------------------------------- workers of a node


@event(r"worker (\d+) on N (is killed|fails|hangs)(?:, with ((?: ?\w+=\S+)+))?(?:: (.+))?")
def _fail(stage: Stage, slot: str, name: str, how: str, more: str | None, message: str | None) -> None:
    """``worker 1 on b fails, with code=3: out of memory``: sets any field of Exit."""
    agent, exit = stage.agent(name), _HOW[how] | {"message": message or ""}
    for pair in (more or "").split():
        key, _, text = pair.partition("=")
        exit[key] = Fatal(text) if key == "fatal" else int(text)
    if int(slot) not in agent.procs.workers:
        raise Misread(f"there is no worker {slot} on {name}")
    agent.procs.crash(int(slot), **exit)


_HOW: dict[str, dict[str, Any]] = {
    "is killed": {"code": -9},
    "fails": {"code": 1},
    "hangs": {"code": -9, "hung": True},
}


@event(r"worker (\d+) on N ends well")
def _finish(stage: Stage, slot: str, name: str) -> None:
    stage.agent(name).procs.workers[int(slot)].die(0, "", primary=False)


@event(r"worker (\d+) on N is stuck")
def _stick(stage: Stage, slot: str, name: str) -> None:
    """Let the worker not leave its round when it is told to."""
    stage.agent(name).procs.workers[int(slot)].stuck = True


@event(r"worker (\d+) on N is (stopped|asleep|busy|apart|polling) from now on(?:, for (\d+) s)?")
def _fall_ill(stage: Stage, slot: str, name: str, how: str, seconds: str | None) -> None:
    """Let the worker make no step. Its agent has to find out why. See ``Illness``."""
    worker = stage.agent(name).procs.workers[int(slot)]
    worker.fall_ill(Illness(how))
    if seconds:
        stage.later(seconds, worker.get_well)


@event(r"the workers lose each other")
def _break_up(stage: Stage) -> None:
    """Reset a connection between workers. No worker has ended."""
    _world(stage).break_up("connection reset by peer")


def _world(stage: Stage) -> World:
    for agent in stage.cluster.running():
        for worker in agent.procs.workers.values():
            if worker.world is not None and worker.world.running:
                return worker.world
    raise Misread("no world trains")


@event(r"slot (\d+) on N is bad for (\d+) s")
def _spoil(stage: Stage, slot: str, name: str, seconds: str) -> None:
    """Let the slot's workers die as soon as they have started."""
    stage.clock.note(name, f"slot {slot} is bad")
    stage.agent(name).procs.bad_slots[int(slot)] = stage.clock.now() + float(seconds)


@event(r"worker (\d+) on N is (\d+) % slower than its peers")
def _slow_down(stage: Stage, slot: str, name: str, slower: str) -> None:
    stage.agent(name).procs.slow_slots[int(slot)] = 1 + int(slower) / 100


@event(r"worker (\d+) on N has a bad GPU")
def _spoil(stage: Stage, slot: str, name: str) -> None:
    observer = stage.agent(name).observer
    observer.gpus = note_errors(observer.gpus, int(slot), GpuErrors(xids=(79,)))


# ---------------------------------------------------------------- etcd, and people


@event(r"etcd is (away|frozen) for (\d+) s")
def _outage(stage: Stage, how: str, seconds: str) -> None:
    etcd = stage.cluster.etcd
    etcd.kill() if how == "away" else etcd.hang()
    stage.later(seconds, etcd.recover)


@event(r"etcd revokes every lease")
def _revoke(stage: Stage) -> None:
    stage.cluster.etcd.expire_all()


@event(r"etcd is (full|wiped|too old|no longer full), as N is told")
def _complain(stage: Stage, how: str, name: str) -> None:
    post = stage.agent(name).post
    match how:
        case "full":
            post(StoreFilled("etcd has no room left"))
        case "no longer full":
            post(StoreFilled(""))
        case "too old":
            post(StoreComplained("etcd 3.3 is too old", forgot=False))
        case _:
            post(StoreComplained("etcd has lost its data", forgot=True))


@event(r"the operator (?:scales the job to (\d+)\.\.(\d+)|stops the job|drains N)")
def _operate(stage: Stage, least: str | None, most: str | None, name: str | None) -> None:
    if least and most:
        stage.cluster.scale(Limits(int(least), int(most)))
    elif name:
        stage.cluster.drain(name)
    else:
        stage.cluster.stop()


# ---------------------------------------------------------------- time


@event(r"for (\d+) s")
def _for(stage: Stage, seconds: str) -> None:
    stage.clock.run(until=stage.clock.now() + float(seconds))


@event(r"until step (\d+)")
def _until_step(stage: Stage, step: str) -> None:
    worlds: list[World] = []
    stage.cluster.training.stepped.append(worlds.append)
    stage.wait(lambda: bool(worlds) and worlds[-1].step >= int(step), f"step {step}")
    stage.cluster.training.stepped.remove(worlds.append)


@event(r"until everybody has left")
def _until_left(stage: Stage) -> None:
    stage.wait(lambda: not stage.cluster.running(), "everybody has left")


@event(r"until (.+)")
def _until(stage: Stage, text: str) -> None:
    """Wait until a new line of the transcript has these words."""
    since = len(stage.clock.lines)
    stage.wait(lambda: any(text in line for line in stage.clock.lines[since:]), text)


# ---------------------------------------------------------------- a story


def play(script: str) -> str:
    """Return the story with its new transcript, whatever transcript it has."""
    return "".join(f"{line}\n" for line in _played(script))


def _played(script: str) -> Iterator[str]:
    stage = Stage()
    for line in script.splitlines():
        if line.startswith(" "):
            continue
        yield line
        if line and not line.startswith("#"):
            _happen(stage, line)
            yield from stage.news()


def _happen(stage: Stage, line: str) -> None:
    for pattern, act in EVENTS:
        if found := pattern.fullmatch(line):
            act(stage, *found.groups())
            return
    raise Misread(f"no event is written so: {line!r}")
