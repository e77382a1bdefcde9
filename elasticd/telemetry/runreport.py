"""The report of a run, computed from the events and the timelines that its agents wrote. Pure.

The report of a run that crashed ends at the last written line. Times are in seconds since the epoch, lengths
in seconds. Worker time is the time of all slots together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticd.core.facts import Cause
from elasticd.core.ledger import Kind
from elasticd.telemetry import describe
from elasticd.telemetry.events import ENDED, STARTED, Event
from elasticd.telemetry.goodput import goodput

Line = Mapping[str, Any]
BINS_MAX = 80  # the most points of a plot
_STRAGGLERS = ("worker.straggling", "slot.bad", "gpu.strained")
# Warnings with a section of their own.
_OTHER_SECTIONS = ("worker.ended", "failure.charged", "workers.hung", *_STRAGGLERS)
_UNCHARGED = (Cause.NODE_LOST, Cause.WORLD_BROKEN)  # causes for which no worker failed
_CHANGES = ("job.waiting", "workers.stopping", "workers.leaving", "round.awaiting_release")


@dataclass(frozen=True, slots=True)
class AgentFiles:
    """The events and the timeline of one agent. ``alive``: the agent may still be writing."""

    events: Sequence[Event]
    timeline: Sequence[Line]
    alive: bool = False


@dataclass(frozen=True, slots=True)
class AgentPart:
    """One agent. ``ended_at``: the time of its last line. ``code``: its exit code; None without the event
    ``agent.ended``."""

    node: str
    began_at: float
    ended_at: float
    code: int | None
    slots: int
    alive: bool

    @property
    def fate(self) -> str:
        if self.code is not None:
            return f"ended with exit code {self.code}"
        return "still runs" if self.alive else "died unexpectedly"


@dataclass(frozen=True, slots=True)
class RoundPart:
    """One round. ``lost_s``: the seconds of worker time lost between the end of the previous round's live
    phase and the end of this one's (for the last round: the end of the run). None if the timeline has no line
    of this round while live."""

    number: int
    began_at: float
    ended_at: float
    world: int
    cause: str
    ended_by: str
    lost_s: float | None


@dataclass(frozen=True, slots=True)
class FailurePart:
    """One failure. ``cost_s``: the ``lost_s`` of the next round; None if there was no next round, or nothing
    was measured. ``shared``: the previous failure has the same next round, and so the same cost."""

    event: Event
    cost_s: float | None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class SlotPart:
    """One slot of one node. ``step_s``: the mean time of its steps, in seconds."""

    node: str
    slot: int
    spent: Mapping[str, float]
    steps: int
    step_s: float | None


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a plot. Each value holds from its time on; None is a gap."""

    name: str
    points: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True, slots=True)
class RunReport:
    """The whole report. ``outcome``: the job's end in words. ``spent``: worker time by kind. ``unseen``:
    nodes of the run whose files are not on this machine."""

    job: str
    script: str
    version: str
    outcome: str
    went_well: bool
    began_at: float
    ended_at: float
    limits: tuple[int, int]
    agents: tuple[AgentPart, ...]
    rounds: tuple[RoundPart, ...]
    slots: tuple[SlotPart, ...]
    spent: Mapping[str, float]
    failures: tuple[FailurePart, ...]
    hangs: tuple[Event, ...]
    stragglers: tuple[Event, ...]
    checkpoints: tuple[Event, ...]
    warnings: tuple[Event, ...]
    world: Series
    goodput_over_time: Series
    step_times: tuple[Series, ...]
    unseen: tuple[str, ...] = ()

    @property
    def goodput(self) -> float | None:
        return goodput(self.spent)


def run_report(parts: Sequence[AgentFiles]) -> RunReport:
    """Return the report of a run from its agents' parts. Raises ValueError if no agent has written
    anything."""
    parts = [part for part in parts if part.events or part.timeline]
    if not parts:
        raise ValueError("no agent has written anything about this run")
    events = sorted((e for part in parts for e in part.events), key=lambda e: float(e["at"]))
    timeline = sorted((line for part in parts for line in part.timeline), key=lambda line: float(line["at"]))
    agents = tuple(map(_agent, parts))
    began_at = min(a.began_at for a in agents)
    ended_at = max(a.ended_at for a in agents)
    outcome, went_well = _outcome(events, agents)
    first = next((e for e in events if e["event"] == STARTED), {})
    by_node: dict[str, list[Line]] = {}
    for part, agent in zip(parts, agents, strict=True):
        by_node.setdefault(agent.node, []).extend(part.timeline)
    slots = tuple(s for node, lines in sorted(by_node.items()) for s in _slots(node, lines))
    told = _final_times(events)
    spent = _sum([*(s.spent for s in slots if s.node not in told), *told.values()])
    limits = (timeline[-1] if timeline else {}).get("limits") or {}
    rounds = _rounds(events, timeline, {node: _losses(lines) for node, lines in by_node.items()}, ended_at)
    seen = {a.node for a in agents}
    return RunReport(
        job=str((events or [{}])[0].get("job", "")),
        script=str(first.get("script", "")),
        version=str(first.get("version", "")),
        outcome=outcome,
        went_well=went_well,
        began_at=began_at,
        ended_at=ended_at,
        limits=(
            int(limits.get("min") or first.get("min") or 1),
            int(limits.get("max") or first.get("max") or 1),
        ),
        agents=agents,
        rounds=rounds,
        slots=slots,
        spent=spent,
        failures=_failures(events, rounds),
        hangs=_once([e for e in events if e["event"] == "workers.hung"], "round", "conclusion"),
        stragglers=tuple(e for e in events if e["event"] in _STRAGGLERS),
        checkpoints=_once([e for e in events if e["event"].startswith("checkpoint.")], "event", "name"),
        warnings=tuple(
            e for e in events if e.get("level") in ("warning", "error") and e["event"] not in _OTHER_SECTIONS
        ),
        world=_world(timeline, ended_at),
        goodput_over_time=_goodput_over_time(by_node, began_at, ended_at),
        step_times=tuple(
            _step_times(node, slot, lines, began_at, ended_at)
            for node, lines in sorted(by_node.items())
            for slot in sorted({k for line in lines for k in line.get("slots", {})}, key=int)
        ),
        unseen=tuple(sorted(node for node in told if node not in seen)),
    )


# ---------------------------------------------------------------- who, and how it ended


def _agent(part: AgentFiles) -> AgentPart:
    times = [float(line["at"]) for line in (*part.events, *part.timeline)]
    first = next((e for e in part.events if e["event"] == STARTED), {})
    last = next((e for e in part.events if e["event"] == ENDED), None)
    return AgentPart(
        node=str((part.events or [{}])[0].get("node", "?")),
        began_at=float(first.get("at", min(times))),
        ended_at=max(times),
        code=last.get("code") if last is not None else None,
        slots=int(first.get("slots") or len((part.timeline or [{}])[-1].get("slots", ()))),
        alive=part.alive and last is None,
    )


def _outcome(events: Sequence[Event], agents: Sequence[AgentPart]) -> tuple[str, bool]:
    ended = [e for e in events if e["event"] == "job.ended"]
    if ended:
        return str(ended[-1]["text"]), ended[-1].get("outcome") == "succeeded"
    if any(agent.alive for agent in agents):
        return "the job still runs", True
    over = [e for e in events if e["event"] == ENDED and e.get("outcome")]
    if over:
        return str(over[-1]["text"]).rstrip("."), over[-1]["outcome"] == "succeeded"
    silent = [agent.node for agent in agents if agent.code is None]
    if silent:
        return (
            f"how it ended is unknown: the agent on {', '.join(sorted(set(silent)))} died unexpectedly",
            False,
        )
    return "the agents of this machine left before the job ended", True


def _final_times(events: Sequence[Event]) -> dict[str, dict[str, float]]:
    """Return the time of each node by kind, from the ``agent.ended`` event that lists the most nodes."""
    over = [e for e in events if e["event"] == ENDED and e.get("outcome") and isinstance(e.get("time"), dict)]
    told: list[dict[str, dict[str, float]]] = [e["time"] for e in over]
    return max(told, key=len, default={})


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {str(kind): sum(part.get(kind, 0.0) for part in parts) for kind in Kind}


# ---------------------------------------------------------------- what it was spent on


def _slots(node: str, lines: Sequence[Line]) -> list[SlotPart]:
    """Return the slots of one node. An agent that starts again continues its ledger, but counts steps from
    0."""
    found = []
    for slot in sorted({k for line in lines for k in line.get("slots", {})}, key=int):
        mine = [line["slots"][slot] for line in lines if slot in line.get("slots", {})]
        steps = _grown([int(of.get("steps", 0)) for of in mine])
        spent = {str(k): float(s) for k, s in mine[-1].get("spent", {}).items()}
        trained_s = spent.get(Kind.PRODUCTIVE, 0.0) + spent.get(Kind.REPLAYED, 0.0)
        found.append(SlotPart(node, int(slot), spent, steps, trained_s / steps if steps else None))
    return found


def _grown(counts: Sequence[int]) -> int:
    """Return the total of a counter that was reset to 0 now and then."""
    return sum(max(0, b - a) if b >= a else b for a, b in zip((0, *counts), counts, strict=False))


def _lost(of: Mapping[str, float]) -> float:
    return sum(s for kind, s in of.items() if kind not in (Kind.PRODUCTIVE, Kind.IDLE))


def _all_slots(line: Line) -> dict[str, float]:
    return _sum([of.get("spent", {}) for of in line.get("slots", {}).values()])


def _losses(lines: Sequence[Line]) -> dict[int, float]:
    """Return the worker time lost when each round was last live; for the last round, at the end.

    The time that a failure costs while its round closes thus belongs to the next round.
    """
    live = [line for line in lines if line.get("phase") == "live"]
    last = {int(line["round"]): _lost(_all_slots(line)) for line in live}
    return last | {max(last): _lost(_all_slots(lines[-1]))} if last else last


# ---------------------------------------------------------------- rounds


def _rounds(
    events: Sequence[Event],
    timeline: Sequence[Line],
    lost: Mapping[str, Mapping[int, float]],
    ended_at: float,
) -> tuple[RoundPart, ...]:
    began: dict[int, tuple[float, int, str]] = {}
    closed: dict[int, tuple[float, str]] = {}
    for e in events:
        number = e.get("round")
        if not isinstance(number, int):
            continue
        if e["event"] == "round.formed" or (e["event"] == "workers.started" and number not in began):
            began[number] = (float(e["at"]), int(e.get("world_size", 0)), str(e.get("cause", "")))
        elif e["event"] == "round.closing" or (e["event"] in _CHANGES and number not in closed):
            closed[number] = (float(e["at"]), _why(e))
    for line in timeline:
        if line.get("phase") == "live" and line["round"] not in began:
            began[int(line["round"])] = (float(line["at"]), int(line.get("world_size", 0)), "")
    numbers = sorted(began)
    over = next((str(e["text"]) for e in events if e["event"] == "job.ended"), "")
    found = []
    before: dict[str, float] = {}
    for at, number in enumerate(numbers):
        following = began[numbers[at + 1]][0] if at + 1 < len(numbers) else ended_at
        until, why = closed.get(number, (following, over if at + 1 == len(numbers) else ""))
        losses = []
        for node, measured in lost.items():
            if number in measured:
                losses.append(measured[number] - before.get(node, 0.0))
                before[node] = measured[number]
        began_at, world, cause = began[number]
        lost_s = max(0.0, sum(losses)) if losses else None
        found.append(RoundPart(number, began_at, min(until, following), world, cause, why, lost_s))
    return tuple(found)


def _why(closing: Event) -> str:
    """Return a clause such as "a worker failed: rank 1 on node-b"."""
    cause = str(closing.get("cause", ""))
    why = describe.cause(Cause(cause)) if cause in set(Cause) else cause or str(closing.get("text", ""))
    if closing.get("failed_node"):
        return f"{why}: rank {closing.get('rank')} on {closing['failed_node']}"
    nodes = closing.get("nodes")
    return f"{why}: {describe.listing(list(map(str, nodes)))}" if isinstance(nodes, list) and nodes else why


def failures(events: Sequence[Event]) -> list[Event]:
    """Return the failures, sorted by time: the charged ones, and failed workers without a charge.

    The leader writes the charge, so the events of this machine may hold a failure without its charge.
    """
    charged = [e for e in events if e["event"] == "failure.charged"]
    known = {(e.get("failed_node"), e.get("slot"), e.get("rank"), e.get("log")) for e in charged}
    own = [e for e in events if e["event"] == "worker.ended" and e.get("code")]
    more = [e for e in own if (e.get("node"), e.get("slot"), e.get("rank"), e.get("log")) not in known]
    return sorted((*charged, *more), key=lambda e: float(e["at"]))


def _failures(events: Sequence[Event], rounds: Sequence[RoundPart]) -> tuple[FailurePart, ...]:
    """Return all failures, including lost nodes and broken worlds, which the budget does not pay for."""
    more = [e for e in events if e["event"] == "round.closing" and e.get("cause") in _UNCHARGED]
    found: list[FailurePart] = []
    before = None
    for e in sorted((*failures(events), *_once(more, "round")), key=lambda e: float(e["at"])):
        after = next((r for r in rounds if r.began_at >= float(e["at"])), None)
        shared = after is not None and after is before
        found.append(FailurePart(e, after.lost_s if after is not None else None, shared))
        before = after
    return tuple(found)


def _once(events: Sequence[Event], *fields: str) -> tuple[Event, ...]:
    """Return one event for each value of ``fields``: several agents may write the same event."""
    found: dict[tuple[object, ...], Event] = {}
    for event in events:
        found.setdefault(tuple(str(event.get(f)) for f in fields), event)
    return tuple(found.values())


# ---------------------------------------------------------------- over time


def _world(timeline: Sequence[Line], ended_at: float) -> Series:
    """Return the world size over time. A line is ignored if an earlier line has a newer round."""
    points: list[tuple[float, float | None]] = []
    newest = 0
    for line in timeline:
        if int(line["round"]) < newest:
            continue
        newest, size = int(line["round"]), float(line.get("world_size", 0))
        if not points or points[-1][1] != size:
            points.append((float(line["at"]), size))
    if points:
        points.append((ended_at, points[-1][1]))
    return Series("workers", tuple(points))


def _edges(began_at: float, ended_at: float, lines: int) -> list[float]:
    count = max(1, min(BINS_MAX, lines // 2))
    length_s = max(ended_at - began_at, 1e-3) / count
    return [began_at + n * length_s for n in range(count + 1)]


def _goodput_over_time(by_node: Mapping[str, Sequence[Line]], began_at: float, ended_at: float) -> Series:
    edges = _edges(began_at, ended_at, max(map(len, by_node.values()), default=0))
    per_node = [_at(edges, [(float(x["at"]), _all_slots(x)) for x in lines]) for lines in by_node.values()]
    points: list[tuple[float, float | None]] = []
    for n, at in enumerate(edges[:-1]):
        told = [
            {kind: max(0.0, s - states[n].get(kind, 0.0)) for kind, s in states[n + 1].items()}
            for states in per_node
        ]
        points.append((at, goodput(_sum(told))))
    return Series("goodput", (*points, (ended_at, points[-1][1] if points else None)))


def _at(edges: Sequence[float], known: Sequence[tuple[float, dict[str, float]]]) -> list[dict[str, float]]:
    """Return the state at each edge: the newest known at that time, and for the last edge the newest of
    all."""
    times = [at for at, _ in known]
    return [
        known[i - 1][1] if (i := bisect_right(times, edge + 1e-3)) else {}
        for edge in (*edges[:-1], float("inf"))
    ]


def _step_times(node: str, slot: str, lines: Sequence[Line], began_at: float, ended_at: float) -> Series:
    """Return the mean time of a step over time, for one slot."""
    mine = [(float(line["at"]), line["slots"][slot]) for line in lines if slot in line.get("slots", {})]
    edges = _edges(began_at, ended_at, len(mine))
    states = _at(
        edges,
        [
            (
                at,
                {
                    "steps": float(of.get("steps", 0)),
                    "s": sum(of.get("spent", {}).get(k, 0.0) for k in (Kind.PRODUCTIVE, Kind.REPLAYED)),
                },
            )
            for at, of in mine
        ],
    )
    points: list[tuple[float, float | None]] = []
    for at, then, now in zip(edges[:-1], states[:-1], states[1:], strict=True):
        steps, spent_s = (now.get(k, 0.0) - then.get(k, 0.0) for k in ("steps", "s"))
        points.append((at, spent_s / steps if steps > 0 and spent_s > 0 else None))
    return Series(f"{node} slot {slot}", (*points, (ended_at, points[-1][1] if points else None)))
