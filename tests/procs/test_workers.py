"""What a worker gets at its start, and what is reported about its end."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elasticd.core.page_layout import ASTRAY
from elasticd.procs.linux import children, is_resource_tracker
from elasticd.procs.logdest import LogDest
from elasticd.procs.warden_client import WardenError
from tests.procs.agents import PATIENCE_S, PROGRAMS, is_running, wait_until_gone
from tests.procs.conftest import Bench, News

FAMILY = [sys.executable, str(PROGRAMS / "family.py")]


def _families(bench: Bench, count: int) -> list[dict[str, Any]]:
    start = b"family "
    return [json.loads(line.removeprefix(start)) for line in bench.console.wait_for_lines(count, start)]


# ---------------------------------------------------------------- what a worker gets


def test_a_worker_gets_exactly_the_environment_it_was_given(bench: Bench) -> None:
    odd = os.fsdecode(b"caf\xe9 \xf0\x9f\x98\x80")
    given = {"A": "1", "ODD": odd, "LINES": "x\ny", "PYTHONPATH": f"/x{os.pathsep}/y"}
    procs = bench.procs(["/usr/bin/env", "-0"], base_env=given, heartbeat=False)
    bench.start(procs, TORCHELASTIC_RUN_ID="r")
    bench.wait()
    bench.console.wait_for(b"RANK=0")
    seen = dict(entry.split(b"=", 1) for entry in bench.console.written[1].split(b"\0") if entry)
    assert seen == {os.fsencode(k): os.fsencode(v) for k, v in (given | {"RANK": "0"}).items()} | {
        b"TORCHELASTIC_RUN_ID": b"r"
    }


def test_a_worker_has_three_open_files(bench: Bench) -> None:
    leaked = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    try:
        # one of the listed descriptors belongs to the listing itself
        bench.run("import os; print(len(os.listdir('/proc/self/fd')) - 1)", heartbeat=False)
    finally:
        os.close(leaked)
    assert bench.console.lines() == [b"3"]


def test_a_worker_leads_its_session_with_default_signals_and_none_blocked(bench: Bench) -> None:
    bench.start(bench.procs(["/bin/cat", "/proc/self/status", "/proc/self/stat"]))
    bench.wait()
    *lines, stat = bench.console.lines()
    status = dict(line.split(b":\t", 1) for line in lines)
    assert int(status[b"SigIgn"], 16) == 0
    assert int(status[b"SigBlk"], 16) == 0
    pid, _, _, _, group, session, *_ = stat.split()
    assert pid == group == session


def test_a_worker_starts_in_the_folder_it_was_given(bench: Bench, tmp_path: Path) -> None:
    bench.run("import os; print(os.getcwd())", cwd=tmp_path)
    bench.console.wait_for(os.fsencode(tmp_path.resolve()))


def test_the_command_may_depend_on_the_assignment(bench: Bench) -> None:
    bench.start(bench.procs(lambda a: ["/bin/echo", f"slot {a.slot}"]), 2)
    bench.wait(2)
    assert sorted(bench.console.lines()) == [b"slot 10", b"slot 11"]


# ---------------------------------------------------------------- how a worker ended


@pytest.mark.parametrize(
    ("program", "sentence"),
    [("/no/such/program", "No such file or directory"), ("/etc/passwd", "Permission denied")],
)
def test_a_program_that_cannot_run_is_an_exit_of_127_with_the_reason(
    bench: Bench, program: str, sentence: str
) -> None:
    bench.start(bench.procs([program]), 2)
    for exit in bench.wait(2):
        assert (exit.code, exit.message) == (127, f"cannot run {program}: {sentence}")


def test_a_folder_that_is_gone_is_an_exit_of_127_with_the_reason(bench: Bench, tmp_path: Path) -> None:
    bench.start(bench.procs(["/bin/true"], cwd=tmp_path / "gone"))
    (exit,) = bench.wait()
    assert (exit.code, exit.message) == (127, f"cannot run in {tmp_path / 'gone'}: No such file or directory")


def test_a_warden_without_files_for_a_worker_reports_an_error_and_lives_on(bench: Bench) -> None:
    bench.run("pass")  # by then the agent has opened all files that it has open while it waits
    with bench.room(3):  # descriptors for the worker's three files
        (exit,) = bench.run("pass")
        assert (exit.code, exit.message) == (127, "cannot fork: Too many open files")
    (exit,) = bench.run("pass")
    assert exit.code == 0


def _not_kept(news: News) -> list[str]:
    """Return why logs were not kept."""
    return [str(fields["why"]) for fields in news.of("log.not_kept")]


@pytest.mark.parametrize("how", ["stdouts", "tee_stdouts", "capture_dirs"])
def test_a_worker_whose_log_cannot_be_written_runs_and_prints_to_the_console(bench: Bench, how: str) -> None:
    dest = LogDest(**{how: {0: "/proc/no/such/folder"}})
    (exit,) = bench.run("print('hello')", reify=lambda _n, _e: dest, warn=(news := News()))
    assert (exit.code, exit.log) == (0, "")
    assert bench.console.lines()[-1].endswith(b"hello")
    (why,) = _not_kept(news)
    assert why.startswith("/proc/no") and "cannot be written: No such file" in why


def test_without_a_log_folder_every_worker_runs_and_one_warning_is_logged(bench: Bench) -> None:
    def reify(number: int, envs: dict[int, dict[str, str]]) -> LogDest:
        raise PermissionError(13, "Permission denied", "/logs")

    exits = bench.run("print('hello')", 2, reify=reify, warn=(news := News()))
    assert [exit.code for exit in exits] == [0, 0]
    assert _not_kept(news) == ["/logs cannot be written: Permission denied"]


def test_a_worker_whose_log_disk_is_full_from_the_start_prints_to_the_console(
    bench: Bench, tmp_path: Path
) -> None:
    full = tmp_path / "stdout.log"
    full.symlink_to("/dev/full")
    dest = LogDest(stdouts={0: str(full)}, stderrs={0: str(tmp_path / "stderr.log")})
    (exit,) = bench.run("print('hello')", reify=lambda _n, _e: dest, warn=(news := News()))
    assert exit.code == 0 and b"hello" in bench.console.lines()
    assert _not_kept(news) == [f"{full} cannot be written: No space left on device"]


def test_a_worker_that_fails_as_its_log_disk_is_full_fails_by_its_nodes_fault(
    bench: Bench, tmp_path: Path
) -> None:
    fills_up = "import os, sys; p = sys.argv[1]; os.unlink(p); os.symlink('/dev/full', p); raise OSError(28)"
    log = tmp_path / "stderr.log"
    for how, blamed in (("stderrs", True), ("tee_stderrs", False)):
        log.unlink(missing_ok=True)
        dest = LogDest(**{"stderrs": {0: str(log)}, how: {0: str(log)}})
        (exit,) = bench.run(fills_up, 1, str(log), reify=lambda _n, _e, dest=dest: dest)
        assert (exit.code, exit.node_fault) == (1, blamed)
    (exit,) = bench.run("raise OSError(28)", reify=lambda _n, _e: LogDest(stderrs={0: str(tmp_path / "x")}))
    assert not exit.node_fault, "which may be any disk"
    assert os.path.getsize(tmp_path / "x") == len((tmp_path / "x").read_bytes().rstrip(b"\0"))


def test_the_message_of_an_output_that_cannot_be_written_names_the_file_and_the_cause(
    bench: Bench, tmp_path: Path
) -> None:
    log = tmp_path / "stdout.log"
    fills_up = (
        f"import os, sys; os.unlink({str(log)!r}); os.symlink('/dev/full', {str(log)!r}); sys.exit(120)"
    )
    (exit,) = bench.run(fills_up, reify=lambda _n, _e: LogDest(stdouts={0: str(log)}))
    assert exit.message == (
        f"the node is at fault, not the worker: {log} cannot be written: No space left on device"
    )


def test_a_failure_is_told_from_the_error_file_of_torch(bench: Bench, tmp_path: Path) -> None:
    program = """
import json, os
extra = {"py_callstack": "Traceback …", "timestamp": "1"}
error = {"message": {"message": "ValueError: no", "extraInfo": extra}}
json.dump(error, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
raise SystemExit(1)
"""
    dest = LogDest(error_files={0: str(tmp_path / "error.json")})
    (exit,) = bench.run(program, reify=lambda _n, _e: dest)
    assert (exit.code, exit.message, exit.traceback) == (1, "ValueError: no", "Traceback …")


def test_without_an_error_file_a_failure_is_told_from_the_end_of_stderr(bench: Bench) -> None:
    (exit,) = bench.run("print('out'); raise RuntimeError('the last straw')")
    assert exit.code == 1
    assert exit.message == "RuntimeError: the last straw"
    assert exit.traceback.startswith("Traceback (most recent call last):")


def test_the_message_of_an_exit_also_comes_from_a_redirected_stderr(bench: Bench, tmp_path: Path) -> None:
    dest = LogDest(stderrs={0: str(tmp_path / "stderr.log")})
    (exit,) = bench.run("raise RuntimeError('the last straw')", reify=lambda _n, _e: dest)
    assert exit.message == "RuntimeError: the last straw"
    assert exit.log == str(tmp_path / "stderr.log")


def test_reify_may_add_to_the_environment(bench: Bench) -> None:
    def reify(number: int, envs: dict[int, dict[str, str]]) -> LogDest:
        for rank, env in envs.items():
            env["ADDED"] = f"{number}.{rank}"
        return LogDest()

    bench.run("import os; print(os.environ['ADDED'])", 2, reify=reify)
    assert sorted(bench.console.lines()) == [b"1.0", b"1.1"]


def test_a_worker_killed_while_it_ends_to_go_back_has_gone_back(bench: Bench) -> None:
    """On a busy machine Python takes a second to end, and survivors do not wait for that."""
    program = f"""
import os, signal, struct
with open(os.environ["ELASTICD_PAGE"], "r+b") as page:
    page.seek({8 * ASTRAY})
    page.write(struct.pack("=Q", 51))
os.kill(os.getpid(), signal.SIGKILL)
"""
    (exit,) = bench.run(program)
    assert (exit.code, exit.astray) == (-signal.SIGKILL, 50)


# ---------------------------------------------------------------- what a worker leaves behind


def test_what_the_last_worker_leaves_behind_is_killed(bench: Bench) -> None:
    bench.start(bench.procs(FAMILY), THEN="exit")
    (family,) = _families(bench, 1)
    (exit,) = bench.wait()
    assert exit.code == 3
    wait_until_gone(family.values())


def test_what_a_worker_leaves_behind_is_killed_while_others_and_theirs_live_on(bench: Bench) -> None:
    bench.start(bench.procs([*FAMILY, "child,group,setsid,daemon"]), 2)
    dead, living = _families(bench, 2)
    os.kill(dead["worker"], signal.SIGKILL)
    wait_until_gone(dead.values())
    assert all(map(is_running, living.values()))
    assert len(bench.exits) <= 1


SHARES = """
import json, multiprocessing, time
from multiprocessing import resource_tracker, shared_memory
made = shared_memory.SharedMemory(create=True, size=1 << 20)
lock = multiprocessing.get_context("spawn").Lock()
tracker = resource_tracker._resource_tracker._pid
shared = [f"/dev/shm/{made.name}", f"/dev/shm/sem.{lock._semlock.name[1:]}"]
print("family", json.dumps({"shared": shared, "tracker": tracker}), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["dies", "is stopped", "is fenced"])
def test_shared_memory_of_a_killed_worker_is_removed_by_pythons_own_tracker(bench: Bench, how: str) -> None:
    """Without an agent the memory would stay: if the tracker is killed together with the worker, it removes
    nothing."""
    procs = bench.procs([sys.executable, "-c", SHARES])
    bench.start(procs, 2)
    families = _families(bench, 2)
    assert all(os.path.exists(path) for family in families for path in family["shared"])
    if how == "dies":
        for pid in children(bench.warden.pid):
            os.kill(pid, signal.SIGKILL)
    elif how == "is stopped":
        procs.stop(signal.SIGCONT, 0.0)
    else:
        bench.warden.fence(0.0)
    bench.wait(2)
    wait_until_gone(family["tracker"] for family in families)
    assert not any(os.path.exists(path) for family in families for path in family["shared"])


def test_a_tracker_is_recognised_however_soon_after_its_start() -> None:
    """The process that starts a tracker goes on before the kernel shows the tracker's command line."""
    start = "from multiprocessing.resource_tracker import main;main(0)"
    for _ in range(50):
        with subprocess.Popen([sys.executable, "-S", "-c", start], stdin=subprocess.PIPE) as tracker:
            assert is_resource_tracker(tracker.pid)


def test_a_zombie_is_no_tracker() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert not is_resource_tracker(ended.pid)


def test_a_tracker_that_does_not_end_is_killed_in_the_end(bench: Bench) -> None:
    bench.start(bench.procs([sys.executable, "-c", SHARES]))
    (family,) = _families(bench, 1)
    os.kill(family["tracker"], signal.SIGSTOP)
    os.kill(*children(bench.warden.pid), signal.SIGKILL)
    bench.wait()
    wait_until_gone([family["tracker"]])
    for path in family["shared"]:
        os.unlink(path)


def test_stop_reaches_a_worker_however_soon_after_its_start(bench: Bench) -> None:
    procs = bench.procs(["/bin/sleep", "1000"], heartbeat=False)
    for _ in range(5):
        bench.start(procs, 2)
        procs.stop(signal.SIGTERM, 1000.0)
        assert [exit.code for exit in bench.wait(2)] == [-signal.SIGTERM] * 2


def test_stop_spares_the_children_of_a_worker_that_is_saving(bench: Bench) -> None:
    program = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal; print('child', flush=True); signal.pause()"])
def save(*_):
    print("saving with its child", child.poll(), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.01)  # the handler of a signal that came just before pause() would not run
"""
    exit = bench.stopped(program, b"ready", b"child\n")
    assert exit.code == 0
    assert b"saving with its child None" in bench.console.lines()


def test_stop_reaches_the_children_of_a_shell_where_asked_to(bench: Bench) -> None:
    inner = (
        "import itertools, signal, sys, time\n"
        "signal.signal(15, lambda *_: sys.exit(print('saved', flush=True)))\n"
        "print('in', flush=True); any(time.sleep(0.01) for _ in itertools.count())"
    )
    script = f'"{sys.executable}" -c "{inner}" & trap "wait; exit 0" TERM; wait'
    procs = bench.procs(["/bin/bash", "-c", script], whole_group=True)
    bench.start(procs)
    bench.console.wait_for(b"in\n")
    procs.stop(signal.SIGTERM, 60.0)
    assert bench.wait()[0].code == 0
    assert b"saved" in bench.console.lines()


# ---------------------------------------------------------------- services and the end


def test_a_service_runs_beside_the_workers_until_it_is_stopped(bench: Bench, tmp_path: Path) -> None:
    ends: queue.Queue[int] = queue.Queue()
    log = tmp_path / "log"
    os.mkfifo(log)
    with open(os.open(log, os.O_RDWR), "rb") as said:
        pid = bench.warden.spawn_service(
            ["/bin/sh", "-c", "trap 'echo ended; exit 4' TERM; echo begun; while :; do sleep 0.05; done"],
            log_path=log,
            ended=lambda end: ends.put(end.code),
        )
        assert said.readline() == b"begun\n"
        bench.run("pass")
        assert is_running(pid), "it is no orphan of a worker"
        bench.warden.stop_service(pid, grace_s=60.0)
        assert said.readline() == b"ended\n"
    assert ends.get(timeout=60.0) == 4


def test_a_service_that_ignores_sigterm_is_killed(bench: Bench, tmp_path: Path) -> None:
    ends: queue.Queue[int] = queue.Queue()
    log = tmp_path / "log"
    os.mkfifo(log)
    with open(os.open(log, os.O_RDWR), "rb") as said:
        pid = bench.warden.spawn_service(
            ["/bin/sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 0.05; done"],
            log_path=log,
            ended=lambda end: ends.put(end.code),
        )
        assert said.readline() == b"deaf\n"
    bench.warden.stop_service(pid, grace_s=0.2)
    assert ends.get(timeout=60.0) == -9


def test_a_service_that_cannot_run_is_one_sentence(bench: Bench) -> None:
    with pytest.raises(WardenError, match="cannot run /no/etcd: No such file or directory"):
        bench.warden.spawn_service(["/no/etcd"])


def test_a_service_that_is_slow_to_start_delays_nothing(bench: Bench, tmp_path: Path) -> None:
    program = tmp_path / "slow"
    shutil.copy("/bin/true", program)
    ended = threading.Event()
    asked = os.open(program, os.O_RDONLY)
    # a process that opens the file is delayed until the lease is given back
    fcntl.fcntl(asked, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(asked, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    starting = threading.Thread(
        target=lambda: bench.warden.spawn_service([str(program)], ended=lambda _: ended.set())
    )
    starting.start()
    try:
        # no event tells that the file is being opened
        while fcntl.fcntl(asked, fcntl.F_GETLEASE) == fcntl.F_WRLCK:
            time.sleep(0.01)
        bench.run("pass")
        assert starting.is_alive()
    finally:
        fcntl.fcntl(asked, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(asked)
        starting.join()
    assert ended.wait(PATIENCE_S)


def test_a_worker_started_after_the_warden_died_is_reported_as_ended(bench: Bench) -> None:
    lost = threading.Event()
    bench.warden.on_lost(lost.set)
    procs = bench.procs(["/bin/true"])
    os.kill(bench.warden.pid, signal.SIGKILL)
    assert lost.wait(PATIENCE_S)
    bench.warden._thread.join()
    bench.start(procs)
    (exit,) = bench.wait()
    assert (exit.code, "warden has ended" in exit.message) == (127, True)
    with pytest.raises(WardenError, match="warden has ended"):
        bench.warden.spawn_service(["/bin/true"])


def test_close_ends_everything_and_removes_what_was_to_be_removed(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "runtime"
    (folder / "deep").mkdir(parents=True)
    bench.warden.remove_at_end(folder)
    pid = bench.warden.spawn_service(["/bin/sleep", "1000"])
    procs = bench.procs(FAMILY)
    bench.start(procs)
    (family,) = _families(bench, 1)
    bench.warden.close()
    bench.warden.close()
    assert not any(map(is_running, [pid, *family.values()]))
    assert not folder.exists()
    assert not procs.page_dir.exists()
    with pytest.raises(WardenError, match="warden"):
        bench.warden.spawn_service(["/bin/true"])
