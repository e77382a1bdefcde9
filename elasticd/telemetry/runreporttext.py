"""The report of a run for the terminal. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import TypeVar

from elasticd.core.ledger import Kind
from elasticd.telemetry import describe
from elasticd.telemetry.events import Event
from elasticd.telemetry.runreport import RunReport
from elasticd.telemetry.runreportpage import length, notes, percent

T = TypeVar("T")

EACH_MAX = 12  # the most rows of one list
_BAR = 24


def lines(r: RunReport) -> list[str]:
    began, ended = (f"{datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M:%S}" for at in
                    (r.began_at, r.ended_at))  # fmt: skip
    told = [f"{r.job}: {r.outcome}", f"  {began} to {ended}, {describe.span(r.ended_at - r.began_at)}"]
    told += [f"  {note}" for note in notes(r)]
    share = r.goodput
    total = sum(r.spent.values())
    if total > 0:
        productive = (
            f"{percent(share)} of the worker time wanted was productive"
            if share is not None
            else "no step was seen"
        )
        told += ["", f"Where the time went: {productive}"]
        for kind, name in describe.KINDS.items():
            spent_s = r.spent.get(kind, 0.0)
            if spent_s >= 0.05:
                bar = "#" * max(1, round(_BAR * spent_s / total))
                told.append(f"  {name:<30} {length(spent_s):>12} {percent(spent_s / total):>8}  {bar}")
    told += ["", f"Rounds: {len(r.rounds)}"]
    for one in _some(r.rounds):
        if one is None:
            told.append("  ...")
            continue
        lost = "" if one.lost_s is None else f", {length(one.lost_s)} of worker time lost"
        why = f": {one.ended_by}" if one.ended_by else ""
        told.append(
            f"  {one.number:>3}  {describe.count(one.world, 'worker')} for "
            f"{length(one.ended_at - one.began_at)}{lost}{why}"
        )
    for title, events in (
        ("Failures", tuple(one.event for one in r.failures)),
        ("Hangs", r.hangs),
        ("Stragglers and bad slots", r.stragglers),
    ):
        if events:
            told += ["", f"{title}: {len(events)}", *_events(events, r.began_at)]
    saved = [e for e in r.checkpoints if e["event"] == "checkpoint.committed"]
    if saved:
        told += ["", f"Checkpoints: {len(saved)}, the last of step {saved[-1].get('step')}"]
    if r.slots:
        told += ["", "Slots"]
        for slot in r.slots:
            step = "-" if slot.step_s is None else f"{slot.step_s:.3g} s a step"
            trained = describe.span(slot.spent.get(Kind.PRODUCTIVE, 0.0))
            told.append(
                f"  {slot.node} slot {slot.slot}: {describe.count(slot.steps, 'step')}, {step}, {trained} "
                "productive"
            )
    return told


def _events(events: tuple[Event, ...], since: float) -> list[str]:
    return [
        "  ..."
        if e is None
        else f"  after {describe.span(float(e['at']) - since)}: {e.get('text') or e['event']}"
        for e in _some(events)
    ]


def _some(all_of_them: tuple[T, ...]) -> list[T | None]:
    """Return the first and the last items of a long tuple, with None between them."""
    if len(all_of_them) <= EACH_MAX:
        return list(all_of_them)
    return [*all_of_them[: EACH_MAX // 2], None, *all_of_them[-EACH_MAX // 2 :]]
