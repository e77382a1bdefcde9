"""What the agent sees of a worker, and the evidence that it keeps. The processes and the page are real."""

from __future__ import annotations

import queue
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticd.core.hang.hang_messages import EvidenceKept, Looked
from elasticd.core.hang.judging import Doing, Look, ProcessState, Verdict, Why
from elasticd.daemon.inspector import LocalInspector
from elasticd.procs.page import HEAD, MAGIC, PAGE_BYTES, TIMES, Page
from elasticd.procs.workers import Watched

ANSWER_S = 30.0
VERDICT = Verdict(Why.STOPPED, (Look("a", 0, 0, 3, 9.0, Doing.STOPPED),))


class Setup:
    """A process that has made three steps, according to its page."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(["sleep", "1000"])
        self.page = Page(folder / "slot0")
        self.times = [time.monotonic() - 3 + n for n in range(3)]
        ring = [0, *(int(at * 1e9) for at in self.times)] + [0] * 252
        head = HEAD.pack(MAGIC, 1, self.process.pid, 3, ring[3])
        self.page.path.write_bytes(head.ljust(PAGE_BYTES - TIMES.size, b"\0") + TIMES.pack(*ring))
        self.condemned: list[tuple[int, int, str]] = []
        procs = SimpleNamespace(
            watched=lambda: (Watched(0, 5, self.process.pid, self.page, 1),),
            condemn=lambda *what: self.condemned.append(what),
        )
        self.news: queue.SimpleQueue[Looked | EvidenceKept] = queue.SimpleQueue()
        self.run = folder / "run"
        self.inspector = LocalInspector(cast(Any, procs), lambda: self.run)
        self.inspector.listen(self.news.put)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.page.close()


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    made = Setup(tmp_path)
    yield made
    made.close()


def test_steps_are_told_once(setup: Setup) -> None:
    (beat,) = setup.inspector.steps({})
    assert (beat.slot, beat.rank, beat.pid, beat.steps) == (0, 5, setup.process.pid, 3)
    assert beat.times == pytest.approx(setup.times[1:]), "the first was made before this round"
    assert beat.times[-1] < setup.inspector.now()
    (beat,) = setup.inspector.steps({setup.process.pid: 3})
    assert beat.times == ()


def test_a_stopped_process_is_seen_to_be_and_what_was_found_is_kept(setup: Setup) -> None:
    setup.process.send_signal(signal.SIGSTOP)
    while setup.inspector.sample({0: setup.process.pid})[0].state is not ProcessState.STOPPED:
        time.sleep(0.01)
    setup.inspector.look(7, (0, 1))
    looked = setup.news.get(timeout=ANSWER_S)
    assert isinstance(looked, Looked) and looked.number == 7
    ((slot, rank, state),) = [(s.slot, s.rank, s.vitals.state) for s in looked.sights]
    assert (slot, rank, state) == (0, 5, ProcessState.STOPPED)
    setup.inspector.keep(8, 2, VERDICT, 7)
    folder = setup.run / "hang-of-round-2"
    assert setup.news.get(timeout=ANSWER_S) == EvidenceKept(8, str(folder))
    assert "rank 0 on node a is stopped (SIGSTOP)" in (folder / "conclusion.txt").read_text()
    assert {file.name for file in folder.iterdir()} == {"conclusion.txt", "rank-5.txt"}
    setup.inspector.keep(9, 3, VERDICT, 6)
    assert setup.news.get(timeout=ANSWER_S) == EvidenceKept(9, str(setup.run / "hang-of-round-3"))
    assert not (setup.run / "hang-of-round-3" / "rank-5.txt").exists(), "that was another look"


def test_evidence_that_a_full_disk_does_not_hold_is_nowhere_to_be_seen(setup: Setup) -> None:
    evidence = setup.run / "hang-of-round-1"
    evidence.mkdir(parents=True)
    (evidence / "conclusion.txt").symlink_to("/dev/full")
    setup.inspector.keep(1, 1, VERDICT, 0)
    assert setup.news.get(timeout=ANSWER_S) == EvidenceKept(1, "")


@pytest.mark.parametrize("evidence", ["", "/run/hang-of-round-1"])
def test_the_exit_of_a_condemned_worker_names_the_reason_and_the_evidence(
    setup: Setup, evidence: str
) -> None:
    setup.inspector.condemn(0, 41, VERDICT, evidence)
    ((slot, pid, why),) = setup.condemned
    assert (slot, pid) == (0, 41) and why.startswith("hung: rank 0 on node a is stopped (SIGSTOP)")
    assert why.endswith(f" (see {evidence})") == bool(evidence)
