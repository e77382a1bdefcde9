"""A worker's end is reported when its exit begins, and its successor starts once it is gone."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.core.page_layout import MUTEX
from elasticd.procs.death_notices import DeathNotices, exit_under_way
from elasticd.procs.linux import is_ready, stat_of
from elasticd.procs.page import BOOT_DIR, VARIABLE, Page
from elasticd.procs.workers import LocalProcs
from tests.procs.agents import PATIENCE_S
from tests.procs.conftest import Bench

BALLAST = "ballast = bytearray(1 << 30)\nfor i in range(0, len(ballast), 4096): ballast[i] = 1\n"
LOOK = "import os, sys\nif 'OLD' in os.environ: sys.exit(os.path.exists('/proc/' + os.environ['OLD']))\n"
STAY = "import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n"
PTRACE_DETACH, PTRACE_SEIZE, PTRACE_O_TRACEEXIT = 17, 0x4206, 0x40
EXIT = {"x86_64": 60, "aarch64": 93}  # the system call that ends one thread


class Watched:
    """Processes with a page, that are reaped by nobody, and what is noticed of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.notices = DeathNotices(8 * MUTEX)

    def run(self, program: str) -> subprocess.Popen[bytes]:
        """Run this Python program, and wait until it has printed a line."""
        page = Page(self._folder / f"page{len(self._processes)}")
        env = {**os.environ, VARIABLE: str(page.path), "PYTHONPATH": BOOT_DIR}
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._processes.append(process)
        self.notices.watch(process.pid, str(page.path))
        assert process.stdout is not None
        self.said = process.stdout.readline()
        assert self.said
        return process

    def noticed(self, timeout_s: float = PATIENCE_S) -> list[tuple[int, int]]:
        return self.notices.take() if is_ready(self.notices.fd, select.POLLIN, timeout_s) else []

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    yield watched
    watched.close()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.abort()", -signal.SIGABRT),
        ("sys.exit(3)", 3),
        ("os._exit(4)", 4),
        ("threading.Thread(target=os._exit, args=(5,)).start(); signal.pause()", 5),
        ("raise ValueError", 1),
    ],
)
@pytest.mark.parametrize("threads", [0, 3])
def test_an_exit_is_noticed_with_its_status_before_anybody_reaps_it(
    watched: Watched, end: str, code: int, threads: int
) -> None:
    others = "for _ in range(%d): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    program = f"import os, signal, sys, threading, time\n{others % threads}\nprint(flush=True)\n{end}"
    process = watched.run(program)
    assert watched.noticed() == [(process.pid, code)]
    assert process.wait(PATIENCE_S) == code


def test_each_of_many_is_noticed_also_one_that_was_stopped(watched: Watched) -> None:
    processes = [watched.run(STAY) for _ in range(4)]
    os.kill(processes[2].pid, signal.SIGSTOP)
    for process in (processes[2], processes[0]):
        process.kill()
        assert watched.noticed() == [(process.pid, -signal.SIGKILL)]
    watched.notices.forget(processes[0].pid)
    late = watched.run(STAY)
    late.terminate()
    assert watched.noticed() == [(late.pid, -signal.SIGTERM)]


@pytest.mark.parametrize(
    "goes_on",
    [
        "os.execv('/bin/cat', ['cat'])",
        "threading.Thread(target=sys.stdin.read).start(); ctypes.CDLL(None).pthread_exit(None)",
    ],
    ids=["with another program", "without its main thread"],
)
def test_a_process_that_goes_on_is_not_reported(watched: Watched, goes_on: str) -> None:
    program = f"import ctypes, os, sys, threading\nprint(flush=True)\nsys.stdin.readline()\n{goes_on}"
    process, witness = watched.run(program), watched.run(STAY)
    assert process.stdin is not None
    process.stdin.write(b"go on\n")
    process.stdin.flush()
    while process.pid in watched.notices._mutexes:  # until the thread has seen the mutex
        assert process.poll() is None
    assert exit_under_way(process.pid) is None
    witness.kill()
    assert watched.noticed() == [(witness.pid, -signal.SIGKILL)]


def test_a_thread_that_goes_on_is_seen_whatever_its_name_and_a_process_that_is_gone_harms_nobody(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_alone = f"libc.syscall({EXIT[os.uname().machine]}, 3)"
    name = "libc.prctl(15, b'\\xff', 0, 0, 0); print(flush=True); signal.pause()"
    program = f"import ctypes, signal, threading\nlibc = ctypes.CDLL(None)\ndef stay(): {name}\n"
    process = watched.run(f"{program}threading.Thread(target=stay).start()\n{ends_alone}")
    while stat_of(process.pid)[0] != b"Z":  # the main thread is a zombie, the other one lives
        assert process.poll() is None
    assert exit_under_way(process.pid) is None
    process.kill()
    process.wait(PATIENCE_S)
    monkeypatch.setattr("elasticd.procs.death_notices.stat_of", lambda pid: [b"4", *[b"4"] * 49, b"768"])
    assert exit_under_way(process.pid) == 3  # it is reaped after its status was read


def test_an_exit_is_noticed_while_another_thread_has_not_begun_its_own(watched: Watched) -> None:
    stay = "def stay(): print(threading.get_native_id(), flush=True); signal.pause()\n"
    process = watched.run(
        f"import os, signal, sys, threading\n{stay}threading.Thread(target=stay).start()\n"
        "sys.stdin.readline(); os._exit(4)"
    )
    thread = int(watched.said)
    libc = ctypes.CDLL(None)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    if libc.ptrace(PTRACE_SEIZE, thread, 0, PTRACE_O_TRACEEXIT) != 0:
        pytest.skip("this process may not trace another")
    assert process.stdin is not None
    process.stdin.write(b"go on\n")
    process.stdin.flush()
    while (stat_of(process.pid)[0], stat_of(thread)[0]) != (b"Z", b"t"):  # it is about to exit
        pass
    code = exit_under_way(process.pid)
    libc.ptrace(PTRACE_DETACH, thread, 0, 0)
    assert code == 4


def test_a_machine_without_another_thread_makes_notices_late_and_harms_nobody(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", fail)
        process = watched.run(STAY)
    watched.run(STAY)
    process.kill()
    assert watched.noticed() == [(process.pid, -signal.SIGKILL)]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the module has another name")
def test_a_subinterpreter_leaves_the_mutex_to_the_main_thread(watched: Watched) -> None:
    subinterpreter = (
        "import _xxsubinterpreters as s, signal, threading\ndef run(): s.destroy(s.create())\n"
        "thread = threading.Thread(target=run)\nthread.start()\nthread.join()\n"
    )
    process = watched.run(f"{subinterpreter}print(flush=True)\nsignal.pause()")
    process.terminate()
    assert watched.noticed() == [(process.pid, -signal.SIGTERM)]


def test_a_page_that_its_worker_truncates_or_removes_harms_nobody(watched: Watched) -> None:
    spoil = "import os\nos.truncate(os.environ['ELASTICD_PAGE'], 0)\n"
    keep = "import os\nos.unlink(os.environ['ELASTICD_PAGE'])\n"
    watched.run(spoil + STAY)  # the next change finds no mutex there
    removed = watched.run(keep + STAY)
    removed.kill()
    assert watched.noticed() == [(removed.pid, -signal.SIGKILL)]


# ---------------------------------------------------------------- in the warden


def test_a_large_worker_is_reported_while_the_kernel_takes_it_down(bench: Bench) -> None:
    procs = bench.procs([sys.executable, "-c", BALLAST + STAY])
    there = []
    while True not in there:  # a machine may be too busy to look in time
        assert len(there) < 5, "a worker is reported only once it is gone"
        bench.console.written[1] = b""
        bench.start(procs)
        bench.console.wait_for(b"\n")
        pid = int(bench.console.written[1])
        os.kill(pid, signal.SIGKILL)
        (exit,) = bench.wait()
        there.append(os.path.exists(f"/proc/{pid}"))
        assert exit.code == -signal.SIGKILL


def _kill_a_large_one(bench: Bench, procs: LocalProcs) -> int:
    """Start a worker, kill it, and wait until its end is reported. Return its pid."""
    bench.start(procs)
    bench.console.wait_for(b"\n")
    pid = int(bench.console.written[1])
    os.kill(pid, signal.SIGKILL)
    bench.wait()
    return pid


def test_a_successor_starts_once_its_predecessor_is_gone(bench: Bench) -> None:
    procs = bench.procs([sys.executable, "-c", LOOK + BALLAST + STAY])
    pid = _kill_a_large_one(bench, procs)
    bench.start(procs, OLD=str(pid))
    (exit,) = bench.wait()
    assert exit.code == 0


def test_a_worker_that_is_stopped_before_its_predecessor_is_gone_never_runs(bench: Bench) -> None:
    procs = bench.procs([sys.executable, "-c", BALLAST + STAY])
    _kill_a_large_one(bench, procs)
    bench.console.written[1] = b""
    bench.start(procs)
    procs.stop(signal.SIGTERM, PATIENCE_S)
    (exit,) = bench.wait()
    assert exit.code == -signal.SIGTERM and not bench.console.written[1]


def test_a_start_waits_for_the_predecessor_of_a_worker_that_never_ran(bench: Bench) -> None:
    procs = bench.procs([sys.executable, "-c", LOOK + BALLAST + STAY])
    pid = _kill_a_large_one(bench, procs)
    bench.start(procs)
    procs.stop(signal.SIGTERM, PATIENCE_S)
    bench.wait()
    bench.start(procs, OLD=str(pid))
    (exit,) = bench.wait()
    assert exit.code == 0


def test_the_agents_death_while_several_workers_wait_does_not_stop_the_warden() -> None:
    """In a process of its own, as the warden kills all its children."""
    program = """
import os, selectors, signal, socket
from elasticd.channel.framing import pair
from elasticd.channel.warden_messages import Program, Spawn, StopProcesses
from elasticd.procs.warden import WardenProcess

stay = Program(("sleep", "1000"), {}, "/")
ours, theirs = pair()
warden = WardenProcess(theirs, None)
warden._selector.register(warden._agent, selectors.EVENT_READ, "agent")
warden._obey(Spawn(1, stay), ())
for id in (2, 3):
    warden._obey(Spawn(id, stay, after=(1,)), ())
ours.shutdown(socket.SHUT_RDWR)  # the forked child may still have it open
%s
while not warden._all_gone():
    warden._reap()
assert not warden._waiting
"""
    for deed in (
        "warden._obey(StopProcesses(signal.SIGTERM, 0.0, (2, 3)), ())",
        "(child,) = warden._children.values(); child.told = True; os.kill(child.pid, signal.SIGKILL)",
    ):
        subprocess.run([sys.executable, "-c", program % deed], check=True, timeout=PATIENCE_S)
