"""``elasticd top``: all nodes of a job, live, on the full terminal."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Any

import click

from elasticd.cli.complaint import Complaint
from elasticd.cli.control import find, places
from elasticd.cli.options import etcd_options
from elasticd.cli.report import JobReport
from elasticd.cli.values import Name
from elasticd.core.facts import Limits
from elasticd.telemetry import describe
from elasticd.telemetry.snapshot import Event, SlotLine, Snapshot

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


@click.command()
@click.argument("job", type=Name("job"), required=False)
@etcd_options
def top(job: str | None, **etcd: Any) -> None:
    """Watch JOB: its world, its pace, and every slot of every node. Ctrl-C leaves.

    Without JOB: the only one.
    """
    if not sys.stdout.isatty():
        raise Complaint("top needs a terminal; elsewhere use `elasticd status --watch`")
    if job is None:
        jobs = [name for place in places(etcd) for name in place.jobs]
        if len(jobs) != 1:
            there = f"there are {describe.listing(jobs, most=10)}" if jobs else "there is none"
            raise Complaint(f"top needs a job: {there}.")
        job = jobs[0]
    place = find(etcd, job)

    from elasticd.cli.watch import watch

    sys.stdout.write(_ENTER)
    last: list[JobReport] = []
    try:
        watch(place, job, lambda report: _draw(report, last))
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
    if last:
        from elasticd.telemetry import footer

        lines = footer.render(snapshot(last[-1], time.time()), 80, 24, fold=True)
        sys.stdout.write("".join(f"{line}\n" for line in lines))


def _draw(report: JobReport, last: list[JobReport]) -> None:
    last[:] = [report]
    size = os.get_terminal_size(1) if sys.stdout.isatty() else shutil.get_terminal_size()
    room = size.lines - 1
    from elasticd.telemetry import footer  # late, since it imports rich, which --help does not need

    lines = footer.render(snapshot(report, time.time()), size.columns, 2 * room, rows_max=room, fold=True)
    sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\r\n" for line in lines[:room]) + "\x1b[J")
    sys.stdout.flush()


def snapshot(report: JobReport, now: float) -> Snapshot:
    """Return the job in the form of the live view. ``now``: seconds since the epoch."""
    slots = tuple(
        SlotLine(n.node, s.slot, s.state, s.rank, s.pid, s.step or 0, s.steps_per_s, report.step_told)
        for n in report.nodes
        for s in n.slots
    )
    need = report.waiting_for
    waiting = f"waiting for {describe.count(need.need - need.have, 'more worker')}" if need else ""
    told = []
    if report.time and (spent := describe.spent(report.time)):
        told.append(Event(now, spent))
    if saved := report.checkpoint:
        told.append(Event(saved.at, saved.in_words(now)))
    if failed := report.last_failure:
        how = (
            f"rank {failed.rank} {describe.ending(failed.code, hung=failed.hung)}"
            if failed.code is not None
            else "a worker failed"
        )
        said = f": {describe.first_line(failed.message)}" if failed.message else ""
        told.append(Event(failed.at, f"slot {failed.slot} on {failed.node}: {how}{said}"))
    if report.etcd_full:
        told.append(Event(now, "etcd is full: nothing is replaced or resized until there is room"))
    if report.stragglers:
        told.append(Event(now, "; ".join(map(describe.laggard, report.stragglers))))
    return Snapshot(
        job=report.job,
        node=report.leader or "",
        round=report.round,
        phase=report.outcome or report.phase,
        world_size=report.world_size,
        limits=report.limits or Limits(1, 1),
        slots=slots,
        restarts=report.restarts,
        budget_left=report.budget_left,
        waiting=waiting,
        events=tuple(sorted(told, key=lambda e: e.at)),
    )
