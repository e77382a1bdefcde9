"""All that can be seen of a worker that makes no steps, without its help and with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from elasticd.core.hang import ProcessState
from elasticd.core.whereabouts import Whereabouts, whereabouts
from elasticd.procs import stacks
from elasticd.procs.linux import variable_of
from elasticd.procs.vitals import Vitals, thread_report, vitals

_RECORDER_FRESH_S = 60.0


@dataclass(frozen=True, slots=True)
class Subject:
    """A worker to be looked at. ``page``: the path of its heartbeat."""

    slot: int
    rank: int
    pid: int
    page: Path


@dataclass(frozen=True, slots=True)
class Scene:
    """``stacks``: of all its threads, in text, or why there are none. ``threads``: a line for each,
    as the kernel sees it. ``files``: dumps of torch's flight recorder."""

    subject: Subject
    vitals: Vitals
    where: Whereabouts | None
    stacks: str
    threads: str
    files: tuple[Path, ...] = field(default=())


def look(subjects: Sequence[Subject]) -> tuple[Scene, ...]:
    """Look at all of them at once. Takes tens of milliseconds; two seconds where one does not answer."""
    if not subjects:
        return ()
    with ThreadPoolExecutor(min(32, len(subjects)), "elasticd-look") as pool:
        return tuple(pool.map(_look, subjects))


def _look(subject: Subject) -> Scene:
    seen = vitals(subject.pid)
    text = "" if seen.state in (ProcessState.STOPPED, ProcessState.GONE) else stacks.ask(subject.page)
    where = whereabouts(stacks.main_thread(text))
    if not text:
        text = stacks.from_outside(subject.pid)
        where = whereabouts(stacks.seen_from_outside(text, subject.pid))
    return Scene(subject, seen, where, text, thread_report(subject.pid), _recorded(subject))


def _recorded(subject: Subject) -> tuple[Path, ...]:
    """What torch's flight recorder dumped of late, if the job's environment turned it on."""

    def told(*names: str) -> str:
        return next(filter(None, (variable_of(subject.pid, name) for name in names)), "")

    if not told("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        return ()
    cache = told("XDG_CACHE_HOME") or f"{told('HOME')}/.cache"
    start = told("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    file = Path(f"{start or f'{cache}/torch/comm_lib_trace_rank_'}{subject.rank}")
    try:
        fresh = time.time() - file.stat().st_mtime < _RECORDER_FRESH_S
    except OSError:
        return ()
    return (file,) if fresh else ()


def write(folder: Path, conclusion: str, scenes: Sequence[Scene]) -> None:
    """One folder of a hang: ``conclusion.txt``, and for each rank ``rank-N.txt``. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "conclusion.txt").write_text(conclusion + "\n", encoding="utf-8")
    for scene in scenes:
        of = scene.subject
        text = "\n".join(
            [
                f"rank {of.rank}, slot {of.slot}, pid {of.pid}: {_in_words(scene)}",
                "",
                "Threads, as the kernel sees them:",
                scene.threads,
                "Stacks, most recent call first:",
                scene.stacks,
            ]
        )
        (folder / f"rank-{of.rank}.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
        for file in scene.files:
            (folder / f"rank-{of.rank}-flight-recorder").write_bytes(file.read_bytes())


def _in_words(scene: Scene) -> str:
    where = scene.where
    at = f", in {where.place}" + (f" ({where.doing})" if where.doing else "") if where else ""
    return f"process state {scene.vitals.state}, {scene.vitals.cpu_s:.1f} s of CPU used{at}"
