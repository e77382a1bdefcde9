"""The life of a pod: process 1, the termination message, and the messages to a service manager."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticd.core.agent import AgentConfig, AgentState, Identity, step
from elasticd.core.agent.agent_state import Registration
from elasticd.core.agent_messages import Signalled
from elasticd.core.facts import Limits, Node, Spec
from elasticd.core.ports import Entry
from elasticd.daemon.service_manager import Manager, Service
from elasticd.telemetry.termination import BYTES_MAX, KILLED, TerminationLog, shortened

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(__file__).parent / "programs" / "in_a_pod.py")
ELASTICD = str(Path(sys.executable).with_name("elasticd"))
POD = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
PATIENCE_S = 60


def _may_unshare() -> bool:
    try:
        return subprocess.run([*POD, "true"], capture_output=True, timeout=PATIENCE_S).returncode == 0
    except FileNotFoundError:
        return False


in_a_pod = pytest.mark.skipif(
    not _may_unshare(), reason="process 1 needs a pid namespace, which may not be made here"
)


def as_process_1(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*POD, sys.executable, PROGRAM, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outside_pid_of(unshare: subprocess.Popen[str]) -> int:
    """Return the pid outside the container of the process that is 1 inside."""
    children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()
    return int(children[0])


# ---------------------------------------------------------------- process 1


@in_a_pod
def test_process_1_reaps_what_has_no_parent() -> None:
    pod = as_process_1("orphan")
    _, said = pod.communicate(timeout=PATIENCE_S)
    assert pod.returncode == 0, said


@in_a_pod
@pytest.mark.parametrize("code", [0, 3, 143])
def test_process_1_ends_with_the_agents_exit_code(code: int) -> None:
    assert as_process_1("exit", str(code)).wait(PATIENCE_S) == code


@in_a_pod
def test_process_1_says_of_a_killed_agent_what_a_shell_would() -> None:
    assert as_process_1("die").wait(PATIENCE_S) == 128 + signal.SIGKILL


@in_a_pod
def test_process_1_passes_signals_on() -> None:
    pod = as_process_1("heed")
    assert pod.stdout is not None
    ready, pid, parent = pod.stdout.readline().split()
    assert (ready, parent) == ("ready", "1") and pid != "1"
    os.kill(outside_pid_of(pod), signal.SIGTERM)
    assert pod.wait(PATIENCE_S) == 143
    pod.communicate()


@in_a_pod
def test_a_ctrl_c_on_the_terminal_reaches_the_agent_once() -> None:
    """The kernel sends the signal to all processes in the foreground, so process 1 must not forward it as
    well."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execvp(POD[0], [*POD, sys.executable, PROGRAM, "count"])
    try:
        _read_until(terminal, b"ready")
        os.write(terminal, b"\x03")
        _read_until(terminal, b"got 1")
        (inside,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(inside), signal.SIGTERM)  # afterwards no signal can be on its way
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 1, "as many as it got"
    finally:
        os.close(terminal)


def _read_until(terminal: int, word: bytes) -> None:
    said = b""
    while word not in said:
        assert select.select([terminal], [], [], PATIENCE_S)[0], said
        said += os.read(terminal, 1024)


def test_any_other_process_stays_one() -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, "exit", "7"], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 7


# ---------------------------------------------------------------- the termination message


def test_the_message_is_of_a_killed_agent_until_it_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    log = TerminationLog(path)
    assert path.read_text() == KILLED + "\n"
    log.write("it finished")
    assert path.read_text() == "it finished\n"


def test_a_message_that_cannot_be_left_is_a_problem_and_no_end(tmp_path: Path) -> None:
    log = TerminationLog(tmp_path / "nowhere" / "log")
    log.write("it finished")
    assert "cannot be written" in log.problem
    assert TerminationLog(None).problem == ""


@pytest.mark.parametrize("letter", ["x", "ä", "網", "🙂"])
def test_a_long_message_keeps_its_start_and_its_end_within_4096_bytes(letter: str) -> None:
    text = f"why it failed\n{letter * 5000}\nIts output: /logs/0/stderr.log"
    kept = shortened(text)
    assert BYTES_MAX - 8 <= len(kept) <= BYTES_MAX
    said = kept.decode()
    assert said.startswith("why it failed\n") and said.endswith("Its output: /logs/0/stderr.log")
    assert set(said) <= set(text) | set("[...]\n")


def test_the_message_keeps_the_file_that_is_mounted_there(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    path.touch()
    inode = path.stat().st_ino
    TerminationLog(path).write("it finished")
    assert path.stat().st_ino == inode


@pytest.mark.parametrize(
    "words", [["run", "--min", "none", "job.py"], ["run", "no_such_script.py"]], ids=["usage", "input"]
)
def test_a_command_line_that_is_not_understood_is_told_in_the_message(
    tmp_path: Path, words: list[str]
) -> None:
    path = tmp_path / "log"
    env = {**os.environ, "ELASTICD_TERMINATION_LOG": str(path)}
    done = subprocess.run([ELASTICD, *words], env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert f"elasticd: {path.read_text()}" == done.stderr


def test_other_commands_leave_the_message_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("of the agent")
    env = {**os.environ, "ELASTICD_TERMINATION_LOG": str(path)}
    done = subprocess.run([ELASTICD, "status", "--bogus"], env=env, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and path.read_text() == "of the agent"


# ---------------------------------------------------------------- the service manager


class Heard:
    """A service manager's socket."""

    def __init__(self, folder: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "notify"))
        self.socket.settimeout(PATIENCE_S)
        self.address = str(folder / "notify")
        self.words: list[str] = []

    def next(self) -> list[str]:
        said = self.socket.recv(4096).decode().split("\n")
        self.words += said
        return said

    def until(self, word: str, count: int = 1) -> None:
        while self.words.count(word) < count:
            self.next()

    def all_there_is(self) -> None:
        """A datagram to a socket of this machine has arrived when the sender continues."""
        self.socket.setblocking(False)
        try:
            while True:
                self.next()
        except BlockingIOError:
            self.socket.settimeout(PATIENCE_S)


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Heard]:
    listener = Heard(tmp_path)
    yield listener
    listener.socket.close()


ME = Identity("a", "one", "127.0.0.1", (0,), "host", 1)
STARTED_WITH = AgentConfig(600.0, store_name="etcd at http://e:2379")
STATE = AgentState(ME, Spec(Limits(1, 1), Limits(1, 1), "job.py", "f"), STARTED_WITH, 1)
NODE = Node(
    name="a", incarnation="one", address="127.0.0.1", slots=(0,), released=0, store_port=1, pid=1, host="host"
)
REGISTERED = replace(STATE, registration=Registration(own=Entry("nodes/a", NODE, 1, 1)))


def test_the_manager_is_forgotten_by_the_environment_so_that_workers_do_not_speak_to_it() -> None:
    environ = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7", "HOME": "/"}
    assert Manager.of(environ, 7).watchdog_s == 3.0
    assert environ == {"HOME": "/"}


def test_a_watchdog_of_another_process_is_not_fed() -> None:
    environ = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "8"}
    assert Manager.of(environ, 7).watchdog_s is None


def test_the_watchdog_is_fed_twice_in_its_time_and_only_by_the_routine(heard: Heard) -> None:
    service = Service(Manager(heard.address, watchdog_s=4.0), lambda: STATE)
    now = 100.0
    while now < 120.0:
        now = service.routine(now)
        heard.all_there_is()
    assert heard.words.count("WATCHDOG=1") >= 10
    assert "READY=1" not in heard.words


def test_systemd_hears_ready_once_at_registration_and_stopping_when_the_agent_leaves(heard: Heard) -> None:
    leaving = step(REGISTERED, Signalled(signal.SIGTERM), 0.0).state
    states = iter([STATE, REGISTERED, REGISTERED, leaving])
    service = Service(Manager(heard.address), lambda: next(states))
    for now in range(4):
        service.routine(float(now))
        heard.all_there_is()
    told = [w for w in heard.words if not w.startswith("STATUS=")]
    assert told == ["READY=1", "STOPPING=1"]
    assert heard.words[0] == "STATUS=joins the job in etcd at http://e:2379"


def test_a_service_manager_that_is_gone_or_does_not_read_stops_no_agent(tmp_path: Path, heard: Heard) -> None:
    assert not Manager(str(tmp_path / "gone")).tell("READY=1")
    manager = Manager(heard.address)
    while manager.tell("STATUS=" + "x" * 1000):  # until its queue is full
        pass


# ---------------------------------------------------------------- a whole agent


@in_a_pod
def test_an_agent_that_is_process_1_is_ready_fed_drained_and_says_why(tmp_path: Path, heard: Heard) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import json, os, signal\n"
        "print(json.dumps([k for k in os.environ if k in ('NOTIFY_SOCKET', 'WATCHDOG_USEC')]), flush=True)\n"
        "signal.pause()\n"
    )
    path = tmp_path / "log"
    env = {**os.environ, "NOTIFY_SOCKET": heard.address, "WATCHDOG_USEC": "2000000"}
    env |= {"ELASTICD_TERMINATION_LOG": str(path), "XDG_STATE_HOME": str(tmp_path / "state")}
    pod = subprocess.Popen(
        [*POD, ELASTICD, "run", "--min", "1", "--max", "1", "--job", "pod", "--node", "n", str(script)],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert pod.stdout is not None
        assert json.loads(pod.stdout.readline()) == []
        heard.until("READY=1")
        heard.until("STATUS=round 1 is live: 1 of 1 workers run on this node")
        heard.until("WATCHDOG=1", 3)
        assert path.read_text() == KILLED + "\n"
        os.kill(outside_pid_of(pod), signal.SIGTERM)
        assert pod.wait(PATIENCE_S) == 143
        heard.until("STOPPING=1")
        assert path.read_text().startswith("pod: n drained, after ")
    finally:
        pod.kill()
        pod.communicate()
