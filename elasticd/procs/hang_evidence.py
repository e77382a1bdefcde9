"""Evidence about a worker that makes no steps, from the worker itself and from the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from elasticd.core.hang.judging import ProcessState
from elasticd.core.hang.standstill import Vitals
from elasticd.core.thread_activity import ThreadActivity, activity_of
from elasticd.procs import flight_recorder, stacks
from elasticd.procs.vitals import thread_report, vitals
from elasticd.procs.workers import Watched


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence about one worker. ``stacks``: the stacks of all threads as text, or why there are none.
    ``threads``: one line per thread, from the kernel. ``recorded``: see ``flight_recorder.ask``."""

    worker: Watched
    vitals: Vitals
    where: ThreadActivity | None
    stacks: str
    threads: str
    recorded: bytes = b""


def look(workers: Sequence[Watched]) -> tuple[Evidence, ...]:
    """Look at all workers in parallel. Takes tens of milliseconds, or some seconds if a worker does not
    answer."""
    if not workers:
        return ()
    with ThreadPoolExecutor(min(32, len(workers)), "elasticd-look") as pool:
        return tuple(pool.map(_look, workers))


def _look(worker: Watched) -> Evidence:
    seen = vitals(worker.pid)
    answers = seen.state not in (ProcessState.STOPPED, ProcessState.GONE)
    text = stacks.ask(worker.page.path) if answers else ""
    recorded = flight_recorder.ask(worker.page.path) if answers else b""
    where = activity_of(stacks.main_thread(text))
    if not text:
        text = stacks.py_spy_dump(worker.pid)
        where = activity_of(stacks.py_spy_main_thread(text, worker.pid))
    return Evidence(worker, seen, where, text, thread_report(worker.pid), recorded)


def write(folder: Path, conclusion: str, evidence: Sequence[Evidence]) -> None:
    """Write the evidence into ``folder``: ``conclusion.txt``, and for each rank ``rank-N.txt`` and, if
    recorded, ``flight-recorder-N.json``. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "conclusion.txt").write_text(conclusion + "\n", encoding="utf-8")
    for one in evidence:
        of, calls = one.worker, flight_recorder.last_calls(one.recorded)
        text = "\n".join(
            [
                f"rank {of.rank}, slot {of.slot}, pid {of.pid}: {_in_words(one)}",
                "",
                "Threads, as the kernel sees them:",
                one.threads,
                "Stacks, most recent call first:",
                one.stacks,
                *(("Collectives, most recent call last:", *calls, "") if calls else ()),
            ]
        )
        (folder / f"rank-{of.rank}.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
        if one.recorded:
            (folder / f"flight-recorder-{of.rank}.json").write_bytes(one.recorded)


def _in_words(one: Evidence) -> str:
    where = one.where
    at = f", in {where.place}" + (f" ({where.doing})" if where.doing else "") if where else ""
    return f"process state {one.vitals.state}, {one.vitals.cpu_s:.1f} s of CPU used{at}"
