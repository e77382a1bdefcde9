"""What happens between a kill and the next step, and how long each part takes, from the agent's log and
the job's marks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.steps import Mark, StepMade

Event = Mapping[str, Any]
Part = tuple[str, float]  # the name of a part, and the time at which it was over


def events(log: Path) -> list[Event]:
    """Return the events that an agent logged as JSON; other lines are skipped. ``at``: seconds since the
    epoch, of a death when the agent noticed, as its line is written only after the agent has acted."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{") and '"event"' in line:
            event = json.loads(line)
            at = event.get("noticed_at", event["timestamp"])
            event["at"] = datetime.fromisoformat(at).timestamp()
            found.append(event)
    return found


def decided(log: Sequence[Event], killed_at: float, wall_s: float) -> list[Part]:
    """Return the times of the agent's events. ``wall_s``: subtract it from them to get the job's clock."""
    names = {"worker.ended": "noticed", "round.closing": "closed", "round.formed": "next formed"}
    parts: list[Part] = []
    for event, name in names.items():
        at = [e["at"] - wall_s for e in log if e["event"] == event and e["at"] - wall_s >= killed_at]
        if at:
            parts.append((name, min(at)))
    return parts


def joined(log: Sequence[Event], round_number: int, wall_s: float) -> list[Part]:
    """Return the times of the last worker to join, where workers keep their process."""
    entered = [e for e in log if e["event"] == "worker.entered" and e["round"] == round_number]
    if not entered:
        return []
    last = max(entered, key=lambda e: e["at"])
    at = last["at"] - wall_s
    has_group = at - last["state_s"]
    return [("told", has_group - last["group_s"]), ("group", has_group), ("state, model", at)]


def grown(log: Sequence[Event], marks: Iterable[Mark], killed_at: float, wall_s: float) -> list[Part]:
    """Return the times from the kill to a world of full size, where the replacement had yet to be started.
    Until it waits, the other workers train; then they end their step, and all form the next world."""
    since = [e for e in log if e["at"] - wall_s >= killed_at]

    def first(event: str, **fields: str) -> list[tuple[Event, float]]:
        found = (e for e in since if e["event"] == event and fields.items() <= e.items())
        return [(e, e["at"] - wall_s) for e in found][:1]

    noticed, ready = first("worker.ended"), first("standby.ready")
    began = [m.at for m in marks if m.what == "imported" and m.at >= killed_at][:1]
    asked, formed = first("round.closing", cause="grew"), first("round.formed", cause="grew")
    return [
        *(("noticed", at) for _, at in noticed),
        *(("process, imports", at) for at in began),
        *(("model, ready", at) for _, at in ready),
        *(("asked to commit", at) for _, at in asked),
        *(("committed, next formed", at) for _, at in formed),
        *(part for event, _ in formed for part in joined(log, event["round"], wall_s)),
    ]


def begun(marks: Iterable[Mark], pids: set[int]) -> list[Part]:
    """Return the times of the last worker to begin, where workers are new processes."""
    mine = [m for m in marks if m.pid in pids]
    names = {"imported": "process, imports", "joined": "group", "built": "model"}
    return [
        (name, max(m.at for m in mine if m.what == what))
        for what, name in names.items()
        if any(m.what == what for m in mine)
    ]


def lengths(killed_at: float, parts: Sequence[Part], step: StepMade) -> dict[str, float]:
    """Return the seconds of each part. They add up to the whole time."""
    took, before = {}, killed_at
    for name, at in [*parts, ("first step", step.at)]:
        took[name] = max(0.0, at - before)
        before = max(before, at)
    return took


def line(name: str, kills: Sequence[Mapping[str, float]]) -> str:
    """Return the median of each part in milliseconds, in order."""
    names = list(dict.fromkeys(part for kill in kills for part in kill))
    cells = [f"{part} {median([kill[part] for kill in kills if part in kill]) * 1e3:.1f}" for part in names]
    return f"  {name:<42} {', '.join(cells)}"
