"""The Python stacks of a worker's threads: requested by a signal, answered by elasticd/worker/boot.

A stopped worker cannot answer, nor can a program without elasticd's startup code. The stacks then come from
py-spy, if it is installed and permitted.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from elasticd.core.thread_activity import Frame
from elasticd.procs.linux import status_of
from elasticd.procs.page import Page

SIGNAL = 47  # a real-time signal that neither glibc nor any known program uses
ANSWER_S = 2.0
_QUIET_S = 0.05  # after this time without a further byte, the answer is complete
_LOOK_S = 0.01
_PY_SPY_S = 10.0

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_PY_SPY_THREAD = re.compile(r"^Thread (?P<id>\d+) ")
_PY_SPY_FRAME = re.compile(r"^ {4}(?P<function>\S+) \((?P<file>.+):(?P<line>\d+)\)$")
_THREAD = re.compile(r"^(Current thread|Thread) 0x")


def ask(path: Path) -> str:
    """Return the stacks in faulthandler's format, the main thread's last; empty if there is no answer within
    two seconds. ``path``: of the worker's page."""
    try:
        page = Page(path, again=True)
    except OSError:  # the agent has removed the page: the worker has ended
        return ""
    with closing(page):
        return _ask(page)


def _ask(page: Page) -> str:
    told = page.contents()
    if told.stacks_fd < 0:
        return ""
    try:
        pidfd = os.pidfd_open(told.pid)
    except OSError:
        return ""
    try:
        # The signal would end a program that has no handler for it. If the program has closed the page, the
        # descriptor may be another file by now.
        if not (_catches(told.pid) and _has(told.pid, told.stacks_fd, page)):
            return ""
        page.forget_stacks()
        signal.pidfd_send_signal(pidfd, SIGNAL)
    except OSError:
        return ""
    finally:
        os.close(pidfd)
    return _await_answer(page).decode("ascii", "backslashreplace")


def _await_answer(page: Page) -> bytes:
    """Read until no more bytes come. There is no end mark, but faulthandler writes all threads within
    microseconds."""
    deadline = time.monotonic() + ANSWER_S
    said, since = b"", time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        now = page.stacks()
        if len(now) > len(said):
            said, since = now, time.monotonic()
        elif said and time.monotonic() - since >= _QUIET_S:
            break
    return said


def _has(pid: int, fd: int, page: Page) -> bool:
    """Whether the descriptor of the process is open on the page. psutil would read all of its descriptors."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{fd}") == str(page.path)
    return False


def _catches(pid: int) -> bool:
    """Return whether the process has a handler for the signal, and does not block the signal. psutil does not
    report signal masks."""
    status = status_of(pid)
    blocks, catches = (int(status.get(name, b"0"), 16) >> (SIGNAL - 1) & 1 for name in (b"SigBlk", b"SigCgt"))
    return bool(catches and not blocks)


def parse(text: str) -> list[tuple[Frame, ...]]:
    """Return the stack of each thread, innermost frame first, in the order of the text."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (found := _FRAME.match(line)):
            threads[-1].append(Frame(found["file"], int(found["line"]), found["function"]))
    return [tuple(frames) for frames in threads]


def py_spy_main_thread(text: str, pid: int) -> tuple[Frame, ...]:
    """Return the stack of the main thread from py-spy's output."""
    frames: list[Frame] = []
    main = False
    for line in text.splitlines():
        if found := _PY_SPY_THREAD.match(line):
            main = int(found["id"]) == pid
        elif main and (found := _PY_SPY_FRAME.match(line)):
            frames.append(Frame(found["file"], int(found["line"]), found["function"]))
    return tuple(frames)


def main_thread(text: str) -> tuple[Frame, ...]:
    """Return the main thread's stack from faulthandler's output ``text``, innermost frame first; empty if
    there is none. The innermost frame has the text of its line of source."""
    threads = parse(text)
    if not threads or not threads[-1]:
        return ()
    inner, *outer = threads[-1]
    return (replace(inner, text=linecache.getline(inner.file, inner.line).strip()), *outer)


def py_spy_dump(pid: int) -> str:
    """Return py-spy's output for a process, which may be stopped; or a sentence that says why there is
    none."""
    py_spy = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if py_spy is None:
        return "The worker did not answer, and py-spy, which reads the stacks from outside, is not installed."
    try:
        done = subprocess.run(
            [py_spy, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PY_SPY_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"The worker did not answer, and py-spy failed: {error}."
    if done.returncode != 0:
        return f"The worker did not answer, and py-spy failed: {done.stderr.strip()}"
    return done.stdout
