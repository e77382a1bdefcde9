"""A worker shows its stacks whatever it does, and the script does not notice."""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from elasticd.core.hang.judging import ProcessState
from elasticd.procs import hang_evidence, stacks
from elasticd.procs.vitals import vitals
from elasticd.procs.workers import LocalProcs, Watched
from tests.procs.conftest import Bench

PROGRAM = """
import os, signal, sys, threading, time
def inner(how):
    if how in ("sleep", "native", "spin"):
        print("here", flush=True)
    if how == "sleep":
        time.sleep(3600)
    elif how == "native":
        while True:
            ctypes.PyDLL(None).sleep(3600)  # holds the GIL; a signal wakes it
    elif how == "spin":
        while True:
            pass
    elif how == "blocked":
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        print("here", flush=True)
        time.sleep(3600)
    elif how == "closed":
        os.closerange(3, 200)
        os.open(os.devnull, os.O_WRONLY)
        for n in range(20): os.open("victim", os.O_RDWR | os.O_CREAT)
        print("here", flush=True)
        time.sleep(3600)
    elif how == "own handler":
        signal.signal(47, lambda *_: print("mine", flush=True))
        print("here", flush=True)
        time.sleep(3600)
    elif how == "default":
        signal.signal(47, signal.SIG_DFL)
        print("here", flush=True)
        time.sleep(3600)
import ctypes
threading.Thread(target=lambda: time.sleep(3600), daemon=True, name="other").start()
inner(sys.argv[1])
"""


def _started(bench: Bench, tmp_path: Path, how: str) -> Watched:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    procs = bench.procs([sys.executable, "-u", str(script), how])
    bench.start(procs)
    bench.console.wait_for(b"here")
    return the_one_watched(procs)


def _wait_until(worker: Watched, state: ProcessState) -> None:
    """Poll for the condition, since the kernel tells only the parent."""
    while (now := vitals(worker.pid).state) is not state:
        assert now is not ProcessState.GONE
        time.sleep(0.01)


def the_one_watched(procs: LocalProcs) -> Watched:
    """The worker's message may arrive before the warden's report that the worker has started."""
    while not (found := procs.watched()):
        time.sleep(0.01)
    (watched,) = found
    return watched


@pytest.mark.parametrize("how", ["sleep", "native", "spin"])
def test_a_worker_reports_the_stacks_of_all_threads_in_any_state(
    bench: Bench, tmp_path: Path, how: str
) -> None:
    worker = _started(bench, tmp_path, how)
    for _ in range(2):  # the second answer does not hold the first one up
        text = stacks.ask(worker.page.path)
        assert len(stacks.parse(text)) == 2, text
        frames = stacks.main_thread(text)
        assert [Path(f.file).name for f in frames][-2:] == ["script.py"] * 2
        assert frames[-2].function == "inner" and frames[-1].function == "<module>"


@pytest.mark.parametrize("how", ["blocked", "closed", "default"])
def test_a_worker_that_cannot_answer_is_not_harmed_by_the_request(
    bench: Bench, tmp_path: Path, how: str
) -> None:
    worker = _started(bench, tmp_path, how)
    assert stacks.ask(worker.page.path) == ""
    _wait_until(worker, ProcessState.SLEEPING)
    if how == "closed":
        assert Path("victim").read_bytes() == b""


def test_a_stopped_worker_is_recognized_and_the_evidence_says_so(bench: Bench, tmp_path: Path) -> None:
    worker = _started(bench, tmp_path, "sleep")
    os.kill(worker.pid, signal.SIGSTOP)
    _wait_until(worker, ProcessState.STOPPED)
    (seen,) = hang_evidence.look([worker])
    assert seen.vitals.state is ProcessState.STOPPED
    hang_evidence.write(tmp_path / "hang", "rank 0 is stopped", [seen])
    text = (tmp_path / "hang" / "rank-0.txt").read_text()
    assert "process state T" in text and "T (stopped)" in text
    assert (tmp_path / "hang" / "conclusion.txt").read_text() == "rank 0 is stopped\n"


def test_py_spy_sees_where_a_stopped_worker_is(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = metadata.distribution("py-spy").files or ()
    (program,) = (file.locate() for file in files if file.name == "py-spy")
    monkeypatch.setenv("PATH", str(Path(str(program)).resolve().parent), prepend=os.pathsep)
    worker = _started(bench, tmp_path, "sleep")
    os.kill(worker.pid, signal.SIGSTOP)
    _wait_until(worker, ProcessState.STOPPED)
    (seen,) = hang_evidence.look([worker])
    if "could not look" in seen.stacks:
        pytest.skip(f"nobody may look here: {seen.stacks}")
    assert seen.where is not None and seen.where.place.startswith("script.py:")


def test_without_py_spy_the_text_says_that_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "is not installed" in stacks.py_spy_dump(os.getpid())


def test_cpu_time_of_children_counts_as_the_workers(bench: Bench) -> None:
    program = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "print('here', flush=True)\\nwhile True: pass"])
child.wait()
"""
    procs = bench.procs([sys.executable, "-c", program])
    bench.start(procs)
    bench.console.wait_for(b"here")
    watched = the_one_watched(procs)
    before = vitals(watched.pid).cpu_s
    while vitals(watched.pid).cpu_s < before + 0.2:
        pass


def test_a_process_that_only_waits_in_pieces_is_seen_to_go_on(bench: Bench) -> None:
    program = "print('here', flush=True)\nimport time\nwhile True: time.sleep(0.01)"
    procs = bench.procs([sys.executable, "-c", program])
    bench.start(procs)
    bench.console.wait_for(b"here")
    watched = the_one_watched(procs)
    before = vitals(watched.pid)
    while (now := vitals(watched.pid)).wakes < before.wakes + 10:
        time.sleep(0.01)
    assert now.all_wakes >= now.wakes


def test_a_condemned_worker_ends_as_one_that_hung_with_the_reason(bench: Bench) -> None:
    procs = bench.procs([sys.executable, "-c", "print('here', flush=True); import time; time.sleep(3600)"])
    bench.start(procs)
    bench.console.wait_for(b"here")
    watched = the_one_watched(procs)
    procs.condemn(watched.slot, watched.pid + 1, "another one")
    procs.condemn(watched.slot, watched.pid, "hung: it is in job.py:7")
    (exit,) = bench.wait()
    assert (exit.code, exit.hung, exit.message) == (-9, True, "hung: it is in job.py:7")


def test_scripts_see_no_handler_and_no_module_of_ours(bench: Bench) -> None:
    program = "import signal, sys; print(signal.getsignal(47), 'faulthandler' in sys.modules)"
    bench.run(program)
    assert bench.console.lines() == [b"0 False"] or bench.console.lines() == [b"Handlers.SIG_DFL False"]
