"""A crash of Python after a script has finished does not count as a failure. Every other crash does."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.procs.agents import PROGRAMS
from tests.procs.conftest import Bench, News
from tests.procs.forked import both

CRASH = str(PROGRAMS / "dumped" / "crash_at_exit.py")


def run(bench: Bench, *argv: str) -> tuple[int, list[dict[str, Any]]]:
    news = News()
    bench.start(bench.procs([sys.executable, *argv], warn=news))
    (exit,) = bench.wait()
    return exit.code, news.of("worker.crashed_at_exit")


@pytest.mark.parametrize("number", ["SIGABRT", "SIGSEGV", "SIGBUS"])
def test_a_script_that_ran_to_its_end_has_finished_even_if_python_then_crashes(
    bench: Bench, number: str
) -> None:
    code, said = run(bench, CRASH, "end", number)
    assert code == 0, bench.console.written
    (fields,) = said
    assert (fields["slot"], fields["rank"], number in fields["why"]) == (10, 0, True)


@pytest.mark.parametrize("how", ["end", "exit 1"])
def test_the_kernel_ends_a_python_that_does_not_exit(bench: Bench, how: str) -> None:
    """The program looks at its timer, and sends the signal of the timer itself."""
    code, said = run(bench, CRASH, how, "SIGALRM")
    *_, last = bench.console.lines()
    assert last.startswith(b"killed in ") and 0 < float(last.split()[2]) <= 120
    assert (code, len(said)) == ((0, 1) if how == "end" else (-signal.SIGALRM, 0))
    assert all("Python did not exit after the script had finished" in fields["why"] for fields in said)


def test_a_forked_script_that_ran_to_its_end_has_finished_even_if_python_then_crashes(bench: Bench) -> None:
    news = News()
    ran = both(bench, [CRASH, "end", "SIGABRT"], warn=news)
    assert [r.exits[0].code for r in ran] == [0, 0], ran
    assert len(news.of("worker.crashed_at_exit")) == 2


@pytest.mark.parametrize(
    "how",
    [
        "crash", "crash in a function at exit", "exit", "exit 1", "raise SystemExit", "raise", "interrupt",
    ],
)  # fmt: skip
def test_a_script_that_may_have_failed_has_crashed(bench: Bench, how: str) -> None:
    """If a script has asked for an exit status, nobody knows which status it was."""
    assert run(bench, CRASH, how, "SIGABRT") == (-signal.SIGABRT, [])


def test_a_script_that_crashes_in_an_exit_handler_has_failed_also_if_forked(bench: Bench) -> None:
    ran = both(bench, [CRASH, "crash in a function at exit", "SIGABRT"])
    assert [r.exits[0].code for r in ran] == [-signal.SIGABRT] * 2, ran


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
def test_a_worker_that_is_killed_at_its_end_has_not_crashed(bench: Bench, number: str) -> None:
    assert run(bench, CRASH, "end", number) == (-getattr(signal, number), [])


def test_programs_that_are_no_script_file_are_not_known_to_have_ended_well(bench: Bench) -> None:
    source = Path(CRASH).read_text()
    code = f"import sys; sys.path.insert(0, {str(PROGRAMS / 'dumped')!r})\n{source}"
    assert run(bench, "-c", code, "end", "SIGABRT") == (-signal.SIGABRT, [])


def test_a_childs_end_is_not_the_workers(bench: Bench) -> None:
    assert run(bench, CRASH, "a child ends well", "SIGABRT")[0] == -signal.SIGABRT


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="late threads do no harm there")
def test_python_is_not_taken_down_under_a_thread_of_torchs_that_is_at_work(
    bench: Bench, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        f"""
import ctypes, hashlib, sys, threading
sys.path.insert(0, {str(PROGRAMS / "faketorch")!r})
import torch

begun = threading.Event()

def late():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)
    begun.set()
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 400_000)  # without the interpreter's lock
    print("done", flush=True)

threading.Thread(target=late, daemon=True).start()
begun.wait()
"""
    )
    assert run(bench, str(script)) == (0, [])
    assert bench.console.lines() == [b"done"]


def test_a_script_that_destroys_its_groups_goes_on_once_torchs_threads_have_let_go_of_them(
    bench: Bench, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(PROGRAMS / 'faketorch')!r})\n"
        "from torch import distributed\n"
        "distributed.destroy_process_group()\n"
        "print(distributed.destroy_process_group.__doc__, flush=True)\n"
    )
    assert run(bench, str(script)) == (0, [])
    assert bench.console.lines() == [b"let go of None", b"Destroy a group."]
