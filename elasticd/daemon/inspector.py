"""Inspects this node's workers, writes evidence of a hang, and kills hung workers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from elasticd.core.hang.hang_messages import EvidenceKept, Looked
from elasticd.core.hang.judging import Verdict
from elasticd.core.hang.standstill import Beat, Inspected, Vitals
from elasticd.procs import hang_evidence
from elasticd.procs.hang_evidence import Evidence
from elasticd.procs.vitals import vitals
from elasticd.procs.workers import LocalProcs, Watched
from elasticd.telemetry import describe


class LocalInspector:
    """``core.ports.Inspector`` with real processes. Slow work runs in a daemon thread. ``folder`` returns the
    run's folder, which gets the evidence."""

    def __init__(self, procs: LocalProcs, folder: Callable[[], Path | None]) -> None:
        self._procs = procs
        self._folder = folder
        self._news: Callable[[Looked | EvidenceKept], None] = lambda news: None
        self._found: tuple[int, tuple[Evidence, ...]] = (0, ())

    def now(self) -> float:
        return time.monotonic()

    def listen(self, news: Callable[[Looked | EvidenceKept], None]) -> None:
        self._news = news

    def steps(self, known: Mapping[int, int]) -> tuple[Beat, ...]:
        beats = []
        for w in self._procs.watched():
            steps, times = w.page.step_times(known.get(w.pid, w.steps_before))
            beats.append(Beat(w.slot, w.rank, w.pid, w.steps_before, steps, times))
        return tuple(beats)

    def sample(self, pids: Mapping[int, int]) -> Mapping[int, Vitals]:
        return {slot: vitals(pid) for slot, pid in pids.items()}

    def look(self, number: int, slots: tuple[int, ...]) -> None:
        watched = [w for w in self._procs.watched() if w.slot in slots]
        self._in_a_thread(lambda: self._look(number, watched))

    def _look(self, number: int, workers: Sequence[Watched]) -> None:
        evidence: tuple[Evidence, ...] = ()
        with contextlib.suppress(OSError):
            evidence = hang_evidence.look(workers)
        self._found = (number, evidence)
        inspected = (Inspected(one.worker.slot, one.worker.rank, one.vitals, one.where) for one in evidence)
        self._news(Looked(number, tuple(inspected)))

    def keep(self, number: int, round: int, verdict: Verdict, look: int) -> None:
        base, (found, evidence) = self._folder(), self._found
        folder = base / f"hang-of-round-{round}" if base is not None else None
        shown = evidence if found == look else ()
        self._in_a_thread(lambda: self._keep(number, folder, describe.hang(verdict), shown))

    def _keep(self, number: int, folder: Path | None, conclusion: str, evidence: Sequence[Evidence]) -> None:
        place = ""
        with contextlib.suppress(OSError):
            if folder is not None:
                with contextlib.suppress(OSError):
                    hang_evidence.write(folder, conclusion, evidence)
                if (folder / "conclusion.txt").stat().st_size:  # the disk may be full
                    place = str(folder)
        self._news(EvidenceKept(number, place))

    def condemn(self, slot: int, pid: int, verdict: Verdict, evidence: str) -> None:
        seen = f" (see {evidence})" if evidence else ""
        self._procs.condemn(slot, pid, f"hung: {describe.hang(verdict)}{seen}")

    def _in_a_thread(self, call: Callable[[], None]) -> None:
        threading.Thread(target=call, name="elasticd-hang", daemon=True).start()
