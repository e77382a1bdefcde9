"""The end of a worker is reported when its exit begins. Later a second report says that the process
is gone."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.core.facts import Exit
from elasticd.core.page_layout import MUTEX
from elasticd.core.ports import WorkerGone, WorkerLingers, WorkerNews
from elasticd.procs import warden_client
from elasticd.procs.death_notices import DeathNotices, exit_under_way
from elasticd.procs.linux import stat_of
from elasticd.procs.page import BOOT_DIR, VARIABLE, Page
from elasticd.procs.warden_client import Warden
from elasticd.procs.workers import LocalProcs
from tests.procs.agents import PATIENCE_S, wait_until
from tests.procs.conftest import Bench
from tests.procs.undead import Undead

BALLAST = "ballast = bytearray(1 << 30)\nfor i in range(0, len(ballast), 4096): ballast[i] = 1\n"
ROOT = Path(__file__).parents[2]
STAY = "import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n"
UNDEAD = f"import signal, threading\nthreading.Thread(target=signal.pause, daemon=True).start()\n{STAY}"
EXIT = {"x86_64": 60, "aarch64": 93}  # the system call that ends one thread


class Watched:
    """Processes with a page that are not reaped, and the notices about them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.deaths: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.trouble: list[str] = []
        self.notices = DeathNotices(8 * MUTEX, lambda *death: self.deaths.put(death), self.trouble.append)

    def run(self, program: str) -> subprocess.Popen[bytes]:
        """Run this Python program, and wait until it has printed a line."""
        page = Page(self._folder / f"page{len(self._processes)}")
        env = {**os.environ, VARIABLE: str(page.path), "PYTHONPATH": BOOT_DIR}
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._processes.append(process)
        self.notices.watch(process.pid, process.pid, str(page.path))
        assert process.stdout is not None
        self.said = process.stdout.readline()
        assert self.said
        return process

    def noticed(self) -> tuple[int, int]:
        return self.deaths.get(timeout=PATIENCE_S)

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
def test_an_exit_is_noticed_with_its_status_before_it_is_reaped(
    watched: Watched, end: str, code: int, threads: int
) -> None:
    others = "for _ in range(%d): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    program = f"import os, signal, sys, threading, time\n{others % threads}\nprint(flush=True)\n{end}"
    process = watched.run(program)
    assert watched.noticed() == (process.pid, code)
    assert process.wait(PATIENCE_S) == code


def test_each_of_many_is_noticed_also_one_that_was_stopped(watched: Watched) -> None:
    processes = [watched.run(STAY) for _ in range(4)]
    os.kill(processes[2].pid, signal.SIGSTOP)
    for process in (processes[2], processes[0]):
        process.kill()
        assert watched.noticed() == (process.pid, -signal.SIGKILL)
    watched.notices.forget(processes[0].pid)
    late = watched.run(STAY)
    late.terminate()
    assert watched.noticed() == (late.pid, -signal.SIGTERM)


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
    (wait,) = watched.notices._waits
    while process.pid in wait._mutexes:  # until the thread has seen the mutex
        assert process.poll() is None
    assert exit_under_way(process.pid) is None
    witness.kill()
    assert watched.noticed() == (witness.pid, -signal.SIGKILL)


def test_a_living_thread_of_any_name_is_seen_and_a_gone_process_raises_no_error(
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
    assert exit_under_way(process.pid) == 3  # the process is reaped after its status was read


def test_an_exit_is_noticed_while_another_thread_has_not_begun_its_own(watched: Watched) -> None:
    stay = "def stay(): print(threading.get_native_id(), flush=True); signal.pause()\n"
    process = watched.run(
        f"import os, signal, sys, threading\n{stay}threading.Thread(target=stay).start()\n"
        "sys.stdin.readline(); os._exit(4)"
    )
    with Undead(process.pid) as undead:
        assert process.stdin is not None
        process.stdin.write(b"go on\n")
        process.stdin.flush()
        undead.wait_for_the_exit()
        assert exit_under_way(process.pid) == 4


def test_without_a_free_thread_notices_are_late_and_no_error_is_raised(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", fail)
        process = watched.run(STAY)
    assert watched.trouble == ["can't start new thread"]
    watched.run(STAY)
    process.kill()
    assert watched.noticed() == (process.pid, -signal.SIGKILL)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the module has another name")
def test_a_subinterpreter_leaves_the_mutex_to_the_main_thread(watched: Watched) -> None:
    subinterpreter = (
        "import _xxsubinterpreters as s, signal, threading\ndef run(): s.destroy(s.create())\n"
        "thread = threading.Thread(target=run)\nthread.start()\nthread.join()\n"
    )
    process = watched.run(f"{subinterpreter}print(flush=True)\nsignal.pause()")
    process.terminate()
    assert watched.noticed() == (process.pid, -signal.SIGTERM)


def test_a_page_that_its_worker_truncates_or_removes_breaks_no_notice(watched: Watched) -> None:
    spoil = "import os\nos.truncate(os.environ['ELASTICD_PAGE'], 0)\n"
    keep = "import os\nos.unlink(os.environ['ELASTICD_PAGE'])\n"
    watched.run(spoil + STAY)  # the next change finds no mutex there
    removed = watched.run(keep + STAY)
    removed.kill()
    assert watched.noticed() == (removed.pid, -signal.SIGKILL)


# ---------------------------------------------------------------- in the warden


def test_a_large_worker_is_reported_while_the_kernel_takes_it_down(bench: Bench) -> None:
    procs = bench.procs([sys.executable, "-c", BALLAST + STAY])
    there = []
    while True not in there:  # a busy machine may be too slow to look in time
        assert len(there) < 5, "a worker is reported only once it is gone"
        pid = _start(bench, procs)
        os.kill(pid, signal.SIGKILL)
        (exit,) = bench.wait()
        there.append(os.path.exists(f"/proc/{pid}"))
        assert exit.code == -signal.SIGKILL


def test_a_process_that_the_kernel_takes_down_is_reported_twice_ended_and_gone(bench: Bench) -> None:
    procs = bench.procs([sys.executable, "-c", UNDEAD])
    news = _news(procs)
    pid = _start(bench, procs)
    with Undead(pid):
        os.kill(pid, signal.SIGKILL)
        (exit,) = bench.wait()
        assert exit.code == -signal.SIGKILL
        assert news.get(timeout=PATIENCE_S) == WorkerLingers(10, pid, failed=True)
        assert news.empty()
    assert news.get(timeout=PATIENCE_S) == WorkerGone(pid)
    assert not os.path.exists(f"/proc/{pid}")


def test_a_death_is_told_before_it_is_known_how_the_worker_ended(bench: Bench) -> None:
    procs = bench.procs([sys.executable, "-c", UNDEAD])
    told: list[tuple[WorkerNews, list[Exit]]] = []
    procs.listen(lambda news: told.append((news, [*bench.exits])))
    pid = _start(bench, procs)
    with Undead(pid):
        os.kill(pid, signal.SIGKILL)
        bench.wait()
        assert told == [(WorkerLingers(10, pid, failed=True), [])]


def test_a_worker_that_ends_because_it_was_told_to_has_not_failed(bench: Bench) -> None:
    procs = bench.procs([sys.executable, "-c", UNDEAD])
    news = _news(procs)
    pid = _start(bench, procs)
    with Undead(pid):
        procs.stop(signal.SIGTERM, 60.0)
        bench.wait()
        assert news.get(timeout=PATIENCE_S) == WorkerLingers(10, pid, failed=False)


def _start(bench: Bench, procs: LocalProcs) -> int:
    """Start a worker that prints its pid. Return the pid."""
    bench.start(procs)
    bench.console.wait_for(b"\n")
    return int(bench.console.written[1])


def _news(procs: LocalProcs) -> queue.SimpleQueue[WorkerNews]:
    news: queue.SimpleQueue[WorkerNews] = queue.SimpleQueue()
    procs.listen(news.put)
    return news


# ---------------------------------------------------------------- the end of the thread


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A warden and an agent. They wait 2 s for killed processes that still run, and a minute (or the
    parameter's seconds) for processes that the kernel takes down."""
    taking_down_s = getattr(request, "param", 60.0)
    shorter = (
        f"import elasticd.procs.warden as w; w._LAST_REAPING_S, w.TAKING_DOWN_S = 2.0, {taking_down_s}; "
    )
    begin, call = warden_client._PROGRAM.split("from elasticd.procs.warden", 1)
    monkeypatch.setattr(warden_client, "_PROGRAM", f"{begin}{shorter}from elasticd.procs.warden{call}")
    monkeypatch.setattr(warden_client, "_KILL_ORPHANS_S", 0.2)
    bench = Bench(Warden.start())
    yield bench
    bench.close()


def test_the_warden_closes_once_the_kernel_has_taken_a_process_down(
    impatient: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    pid = _start(impatient, impatient.procs([sys.executable, "-c", UNDEAD]))
    closing = threading.Thread(target=impatient.warden.close, args=(0.0,))
    with Undead(pid) as undead:
        closing.start()
        undead.wait_for_the_exit()
        wait_until(lambda: f"still taking down processes {pid}" in caplog.text, "it says so")
    closing.join(PATIENCE_S)
    assert not closing.is_alive() and impatient.warden.left == () and not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("impatient", [0.2], indirect=True)
def test_the_warden_says_which_processes_it_leaves(impatient: Bench) -> None:
    pid = _start(impatient, impatient.procs([sys.executable, "-c", UNDEAD]))
    with Undead(pid):
        impatient.warden.close(0.0)
        assert impatient.warden.left == (pid,)
    os.waitpid(pid, 0)


@pytest.mark.slow  # this test has failed once beside other tests: its 0.2 s are of a real clock
def test_a_killed_warden_leaves_processes_that_the_kernel_takes_down_to_the_end_of_its_agent(
    impatient: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    pid = _start(impatient, impatient.procs([sys.executable, "-c", UNDEAD]))
    closing = threading.Thread(target=impatient.warden.close, args=(0.0,))
    with Undead(pid):
        os.kill(impatient.warden.pid, signal.SIGKILL)
        (exit,) = impatient.wait()
        assert exit.fenced and os.path.exists(f"/proc/{pid}")
        closing.start()
        wait_until(lambda: f"still taking down processes {pid}" in caplog.text, "it says so")
    closing.join(PATIENCE_S)
    assert not closing.is_alive() and not os.path.exists(f"/proc/{pid}")


# ---------------------------------------------------------------- late notices


def test_more_workers_than_one_system_call_takes_are_watched(tmp_path: Path) -> None:
    deaths: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    trouble: list[str] = []
    notices = DeathNotices(8 * MUTEX, lambda *death: deaths.put(death), trouble.append)
    pages = [Page(tmp_path / f"page{n}") for n in range(130)]
    argv = [sys.executable, "-S", "-c", MANY, BOOT_DIR, str(8 * MUTEX), *(str(page.path) for page in pages)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = list(map(int, process.stdout.readline().split()))
        for n, (pid, page) in enumerate(zip(pids, pages, strict=True)):
            notices.watch(n, pid, str(page.path))
        for n in (129, 0):
            os.kill(pids[n], signal.SIGKILL)
            assert deaths.get(timeout=PATIENCE_S) == (n, -signal.SIGKILL)
        process.communicate()
    assert not trouble


def test_a_kernel_without_the_system_call_is_reported_once_and_deaths_are_noticed_later(
    tmp_path: Path,
) -> None:
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_CALL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    why = "futex_waitv: Function not implemented (Linux has it from 5.16 on)"
    late = f"deaths of workers are noticed later, once the kernel has taken the process down: {why}\n"
    assert told.stdout == f"{late}exit codes -9 -9\n", told.stderr


def test_an_unknown_c_library_is_reported(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python with musl is not available here, so the test has a stand-in."""
    names = {name: n for name, n in os.confstr_names.items() if name != "CS_GNU_LIBC_VERSION"}
    monkeypatch.setattr(os, "confstr_names", names)
    watched.run(STAY)
    assert watched.trouble == ["the C library is not glibc"]


def test_a_notice_does_not_count_for_a_later_process_with_the_same_pid(tmp_path: Path) -> None:
    """Run this in a process of its own, since the warden kills all its children."""
    if not os.access("/proc/sys/kernel/ns_last_pid", os.W_OK):
        pytest.skip("this process may not choose a pid")
    subprocess.run(
        [sys.executable, "-c", SAME_PID, str(tmp_path), BOOT_DIR], cwd=ROOT, check=True, timeout=PATIENCE_S
    )


@pytest.mark.parametrize("agent", ["has no room", "is gone"])
def test_a_notice_that_the_agent_does_not_get_is_sent_later_or_ends_the_warden(agent: str) -> None:
    """Run this in a process of its own, since the warden reaps all its children."""
    subprocess.run([sys.executable, "-c", NOT_SENT, agent], cwd=ROOT, check=True, timeout=PATIENCE_S)


MANY = """
import mmap, os, signal, sys
sys.path.insert(0, sys.argv[1])
from elasticd_mutex import hold_mutex
ours, theirs = os.pipe()
pids = []
for path in sys.argv[3:]:
    pid = os.fork()
    if not pid:
        memory = mmap.mmap(os.open(path, os.O_RDWR), mmap.PAGESIZE)
        hold_mutex(memory, int(sys.argv[2]))
        os.write(theirs, b"x")
        signal.pause()
    os.read(ours, 1)
    pids.append(pid)
print(*pids, flush=True)
sys.stdin.read()
for pid in pids:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""

WITHOUT_THE_CALL = """
import ctypes, logging, os, signal, struct, sys
filters = ((0x20, 0, 0, 0), (0x15, 0, 1, 449), (0x06, 0, 0, 0x50026), (0x06, 0, 0, 0x7fff0000))  # ENOSYS
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in filters))
program = ctypes.create_string_buffer(struct.pack("HP", len(filters), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()

from elasticd.procs.warden_client import Warden
from tests.procs.conftest import Bench

logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
bench = Bench(Warden.start())
procs = bench.procs([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
codes = []
for _ in range(2):
    bench.start(procs)
    codes += [exit.code for exit in bench.wait()]
bench.close()
print("exit codes", *codes)
"""

NOT_SENT = """
import os, signal, sys, threading
from elasticd.channel.framing import Channel, pair
from elasticd.channel.warden_messages import AGENT_TO_WARDEN, WARDEN_TO_AGENT, CloseWarden, Ended, Spawned
from elasticd.procs.linux import die_with_parent
from elasticd.procs.warden import WardenProcess, _Child

ours, theirs = pair()
warden = WardenProcess(theirs, None)
agent = Channel(ours, AGENT_TO_WARDEN, WARDEN_TO_AGENT)
told = 0
while not warden._agent.pending:
    warden._tell(Spawned(told, 1))
    told += 1
warden._agent._unsent.clear()
pid = os.fork()
if not pid:
    ours.close()
    die_with_parent()
    signal.pause()
warden._children[pid] = _Child(7, pid, False, "", False, -1)

def report_and_read():
    if sys.argv[1] == "is gone":
        ours.close()
    warden._hear_of_exit(7, -signal.SIGKILL)
    if sys.argv[1] == "is gone":
        return
    for _ in range(told - 1):
        assert isinstance(agent.receive()[0], Spawned)
    end, _ = agent.receive()
    assert isinstance(end, Ended) and (end.id, end.code, end.lingers) == (7, -signal.SIGKILL, True), end
    agent.send(CloseWarden(0.0))

threading.Thread(target=report_and_read).start()
warden.run(os.getppid())
assert not warden._children
"""

SAME_PID = """
import os, signal, sys
from pathlib import Path
from elasticd.channel.framing import pair
from elasticd.channel.warden_messages import Program, Spawn
from elasticd.procs.page import VARIABLE, Page
from elasticd.procs.warden import WardenProcess

folder, boot = sys.argv[1:]
ours, theirs = pair()
warden = WardenProcess(theirs, None)
said, says = os.pipe()

def start(id):
    page = Page(Path(folder, str(id)))
    env = {**os.environ, VARIABLE: str(page.path), "PYTHONPATH": boot}
    argv = (sys.executable, "-c", "import signal; print(flush=True); signal.pause()")
    warden._obey(Spawn(id, Program(argv, env, "/"), page=str(page.path)), (0, says, 2))
    os.read(said, 1)
    return next(iter(warden._children.values()))

warden._working.acquire()  # the thread that has seen the death waits for this, before it reports
first = start(1)
os.kill(first.pid, signal.SIGKILL)
while warden._children:
    warden._reap()
id, second = 2, first
while True:  # until no other process gets the pid first
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(first.pid - 1))
    second = start(id)
    if second.pid == first.pid:
        break
    os.kill(second.pid, signal.SIGKILL)
    while warden._children:
        warden._reap()
    id += 1
warden._hear_of_exit(1, -signal.SIGKILL)
lives = not second.told
os.kill(second.pid, signal.SIGKILL)
assert lives, "a process that runs was reported as ended"
"""
