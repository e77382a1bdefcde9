"""status, ls, scale, drain and stop against a real etcd."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any, cast

import pyte
import pytest

from elasticd.cli import job_commands
from elasticd.cli.command_error import CommandError
from elasticd.cli.job_access import Place
from elasticd.cli.main import _exit_code
from elasticd.core import gathered
from elasticd.core.facts import (
    Cause,
    Drained,
    Exit,
    Fact,
    Failure,
    Leadership,
    Limits,
    Member,
    Node,
    NodeTelemetry,
    Outcome,
    Phase,
    Progress,
    Round,
    SlotProgress,
    Spec,
    Summary,
)
from elasticd.core.ports import Applied, Put
from elasticd.daemon.gathering import Gathering
from elasticd.daemon.leader_link.telemetry_listener import TelemetryListener
from elasticd.etcd import registry
from elasticd.etcd.access import EtcdAccess
from elasticd.etcd.blocking_client import Client
from elasticd.etcd.embedded import Embedded
from elasticd.telemetry import accepting, runs
from tests.etcd.cluster import EtcdOnPorts

SPEC = Spec(Limits(2, 8), Limits(2, 8), "job.py", "f")
LIVE = Round(1, Phase.LIVE, (), "x:1", Cause.START, 1.0)


def a_node(name: str) -> Node:
    return Node(name, f"{name}-1", "127.0.0.1", (0, 1), 0, 1, 2, "host")


@pytest.fixture(scope="module")
def server() -> Iterator[Embedded]:
    with EtcdOnPorts() as etcd:
        yield etcd


@pytest.fixture
def etcd(server: Embedded, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """An empty etcd, named by ELASTICD_ETCD."""
    monkeypatch.setenv("ELASTICD_ETCD", f"http://{server.endpoint}")
    with Client(server.access) as client:
        client.delete_raw(b"/elasticd/", prefix=True)
        yield client


def put(client: Client, job: str, **facts: Fact) -> None:
    writes = tuple(Put(key.replace("__", "/"), fact) for key, fact in facts.items())
    assert isinstance(client.transact(job, (), writes), Applied)


def spec_of(client: Client, job: str) -> Spec:
    entry = client.get(job, "spec")
    assert entry is not None and isinstance(entry.fact, Spec)
    return entry.fact


def elasticd(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = _exit_code(list(argv))
    out, err = capfd.readouterr()
    return code, out, err


class Leading:
    """Stands in for the leader's knowledge of its job."""

    def __init__(self, step: int) -> None:
        beats = (SlotProgress(0, 0, 71, step, time.time()), SlotProgress(1, 1, 72, step, time.time()))
        told = NodeTelemetry("a", "a-1", progress=Progress("a", 1, beats))
        self.known = gathered.hear(gathered.Gathered(1), told)

    def summary(self, now: float) -> Summary:
        return gathered.summarize(self.known, "a", None, now)[1]


ROUND = replace(LIVE, members=(Member("a", "a-1", (0, 1), 0),), since=time.time() - 100)


@contextmanager
def served(step: int) -> Iterator[Leadership]:
    """Serve this step at an address. Return the address."""
    listener = accepting.listen("127.0.0.1")
    there = Leadership("a", "a-1", "127.0.0.1", listener.getsockname()[1], "secret")
    with TelemetryListener(listener, "secret", cast(Gathering, Leading(step))):
        yield there


def test_the_leader_is_asked_for_steps_and_else_the_summary_in_etcd_says_them(
    etcd: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    summary = Leading(40).summary(time.time())
    with served(50) as leader:
        put(etcd, "j", spec=SPEC, round=ROUND, nodes__a=a_node("a"), leader=leader, summary=summary)
        code, out, err = elasticd(capfd, "status", "j", "--json")
        assert (code, err, json.loads(out)["step"]) == (0, "", 50)
    code, out, err = elasticd(capfd, "status", "j", "--json")  # nobody answers
    assert (code, err, json.loads(out)["step"]) == (0, "", 40)


def test_status_watch_shows_the_leader_s_steps(etcd: Client, server: Embedded) -> None:
    with served(50) as leader:
        put(etcd, "j", spec=SPEC, round=ROUND, nodes__a=a_node("a"), leader=leader)
        with watching("j", "--json", etcd=server) as process:
            while json.loads(next_line(process))["step"] != 50:
                pass


def test_scale_changes_the_limits_in_force_and_not_those_asked(
    etcd: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    put(etcd, "j", spec=SPEC, round=LIVE)
    code, out, _ = elasticd(capfd, "scale", "j", "--min", "3", "--max", "4")
    assert code == 0 and "3 to 4 workers" in out
    assert spec_of(etcd, "j") == replace(SPEC, limits=Limits(3, 4))
    assert elasticd(capfd, "scale", "j", "--max", "6")[0] == 0
    assert spec_of(etcd, "j").limits == Limits(3, 6)


OSC = "\x1b]0;owned\x07\x1b[2J\x9b2J\u202e"


def test_what_is_in_etcd_reaches_the_terminal_only_as_text(
    etcd: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    failure = Failure("a", Exit(0, 0, 1, 1.0, message=f"{OSC}boom\nfaked: line", log=f"/logs{OSC}"))
    ended = replace(LIVE, phase=Phase.ENDED, outcome=Outcome.FAILED, why=f"{OSC}why", failure=failure)
    put(etcd, "j", spec=replace(SPEC, script=f"{OSC}job.py"), round=ended)
    node = replace(a_node("a"), host=f"{OSC}host")
    put(etcd, "k", spec=SPEC, round=LIVE, nodes__a=node)
    etcd.swap_raw(b"/elasticd/k/nodes/\x1b[2Jb", b'{"v":1}', 0)
    etcd.swap_raw(b"/elasticd/k/nodes/c", f'{{"v":1,"name":"{OSC!a}"}}'.encode(), 0)
    etcd.swap_raw(b"/elasticd/\x1b[2Jgone/spec", b'{"v":1}', 0)
    for argv in (("status", "j"), ("status", "k"), ("status",), ("ls",), ("status", OSC), ("status", "x")):
        _, out, err = elasticd(capfd, *argv)
        assert "elasticd" in err or "job.py" in out
        assert not any(c in out + err for c in "\x1b\x07\x9b\u202e"), argv
    assert "boom" in elasticd(capfd, "status", "j")[1]


def test_status_prints_the_command_line_as_a_job_file(
    etcd: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    put(etcd, "j", spec=replace(SPEC, job_file='script = "job.py"\nmax = 8', limits=Limits(2, 4)), round=LIVE)
    code, out, _ = elasticd(capfd, "status", "j", "--job-file")
    assert code == 0 and elasticd(capfd, "status", "--job-file")[1] == out
    assert tomllib.loads(out) == {"script": "job.py", "max": 8}
    assert out.startswith("# j; `elasticd scale` has set 2..4\n")
    assert elasticd(capfd, "status", "j", "--job-file", "--json")[0] == 2
    put(etcd, "j", spec=SPEC)
    code, _, err = elasticd(capfd, "status", "j", "--job-file")
    assert code == 2 and "j has no job file" in err


def test_scale_refuses_a_minimum_above_the_maximum(etcd: Client, capfd: pytest.CaptureFixture[str]) -> None:
    put(etcd, "j", spec=SPEC, round=LIVE)
    for argv in (("--min", "9"), ("--max", "1"), ("--min", "5", "--max", "4")):
        code, _, err = elasticd(capfd, "scale", "j", *argv)
        assert code == 2 and "is above --max" in err and len(err.splitlines()) == 1
    assert elasticd(capfd, "scale", "j")[0] == 2
    assert spec_of(etcd, "j") == SPEC


def test_scale_keeps_to_whole_units(etcd: Client, capfd: pytest.CaptureFixture[str]) -> None:
    in_pairs = replace(SPEC, limits=Limits(2, 8, unit=2))
    put(etcd, "j", spec=in_pairs, round=LIVE)
    code, _, err = elasticd(capfd, "scale", "j", "--max", "5")
    assert code == 2 and "max is 5, which is no multiple of a unit of 2 workers" in err
    assert spec_of(etcd, "j") == in_pairs
    assert elasticd(capfd, "scale", "j", "--max", "6")[0] == 0
    assert spec_of(etcd, "j").limits == Limits(2, 6, unit=2)


def test_an_edit_that_came_between_is_not_lost(etcd: Client, server: Embedded) -> None:
    put(etcd, "j", spec=SPEC, round=LIVE)
    meddled: list[bool] = []

    def change(spec: Spec) -> Spec:
        if not meddled:  # another command changes the spec first, once
            meddled.append(True)
            put(etcd, "j", spec=replace(spec, stop=True))
        return replace(spec, limits=Limits(1, 1))

    job_commands._edit(Place(server.access, (), shared=True), "j", change)
    assert spec_of(etcd, "j") == replace(SPEC, stop=True, limits=Limits(1, 1))


def test_stop_asks_the_job_to_stop(etcd: Client, capfd: pytest.CaptureFixture[str]) -> None:
    put(etcd, "j", spec=SPEC, round=LIVE)
    assert elasticd(capfd, "stop", "j")[0] == 0
    assert spec_of(etcd, "j").stop


def test_a_job_that_has_ended_cannot_be_steered(etcd: Client, capfd: pytest.CaptureFixture[str]) -> None:
    put(etcd, "j", spec=SPEC, round=replace(LIVE, phase=Phase.ENDED, outcome=Outcome.SUCCEEDED))
    for argv in (("stop", "j"), ("scale", "j", "--max", "9")):
        code, _, err = elasticd(capfd, *argv)
        assert code == 2 and "has ended already" in err


def test_a_job_whose_end_took_its_spec_along_is_called_ended(
    etcd: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    put(etcd, "j", round=replace(LIVE, phase=Phase.ENDED, outcome=Outcome.SUCCEEDED))
    code, _, err = elasticd(capfd, "stop", "j")
    assert code == 2 and "has ended already" in err


def test_drain_finds_the_node_and_names_its_incarnation(
    etcd: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    put(etcd, "j", spec=SPEC, round=LIVE, nodes__a=a_node("a"), nodes__b=a_node("b"))
    for _ in range(2):  # the second time the node is draining already
        assert elasticd(capfd, "drain", "b")[0] == 0
        assert spec_of(etcd, "j").drain == (Drained("b", "b-1"),)
    put(etcd, "k", spec=SPEC, round=LIVE, nodes__b=a_node("b"))
    code, _, err = elasticd(capfd, "drain", "b")
    assert code == 2 and "j and k" in err and "--job" in err
    assert elasticd(capfd, "drain", "b", "--job", "k")[0] == 0
    assert spec_of(etcd, "k").drain == (Drained("b", "b-1"),)


def test_unknown_names_are_answered_with_the_known_ones(
    etcd: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    put(etcd, "mine", spec=SPEC, round=LIVE, nodes__a=a_node("a"))
    for argv, known in (
        (("status", "yours"), "mine"),
        (("scale", "yours", "--max", "9"), "mine"),
        (("stop", "yours"), "mine"),
        (("drain", "z"), "a"),
        (("drain", "z", "--job", "mine"), "a"),
    ):
        code, _, err = elasticd(capfd, *argv)
        assert code == 2 and f"there is {known}" in err and len(err.splitlines()) == 1


def test_status_and_ls_show_the_jobs(etcd: Client, capfd: pytest.CaptureFixture[str]) -> None:
    put(etcd, "j", spec=SPEC, round=LIVE, nodes__a=a_node("a"))
    code, out, _ = elasticd(capfd, "status", "j")
    assert code == 0 and "j: round 1 live" in out and "a at 127.0.0.1" in out
    assert elasticd(capfd, "status")[1].splitlines()[0].startswith("j: round 1 live")
    told = json.loads(elasticd(capfd, "status", "j", "--json")[1])
    assert (told["job"], told["phase"], told["limits"]["max"]) == ("j", "live", 8)
    put(etcd, "k", spec=SPEC)
    code, out, _ = elasticd(capfd, "ls")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["JOB", "j", "k"]
    assert elasticd(capfd, "status")[1] == out
    assert [json.loads(line)["job"] for line in elasticd(capfd, "ls", "--json")[1].splitlines()] == ["j", "k"]


def test_a_record_of_a_newer_elasticd_is_named(etcd: Client, capfd: pytest.CaptureFixture[str]) -> None:
    etcd.swap_raw(b"/elasticd/j/spec", b'{"v":99}', 0)
    code, _, err = elasticd(capfd, "stop", "j")
    assert code == 2 and "newer elasticd" in err
    for argv in (("status", "j"), ("status",), ("status", "j", "--json"), ("status", "j", "--watch")):
        code, out, err = elasticd(capfd, *argv)
        assert (code, out, len(err.splitlines())) == (2, "", 1) and "j: " in err and "newer elasticd" in err


def test_a_record_of_a_newer_elasticd_hides_no_other_job(
    etcd: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    etcd.swap_raw(b"/elasticd/j/round", b'{"v":99}', 0)
    put(etcd, "k", spec=SPEC, round=LIVE)
    code, out, err = elasticd(capfd, "ls")
    assert code == 0 and "j: " in err and "newer elasticd" in err
    assert [line.split()[0] for line in out.splitlines()] == ["JOB", "k"]


def test_a_report_of_a_newer_elasticd_hides_nothing_else(
    etcd: Client, capfd: pytest.CaptureFixture[str]
) -> None:
    put(etcd, "j", spec=SPEC, round=LIVE, nodes__a=a_node("a"))
    etcd.swap_raw(b"/elasticd/j/reports/b", b'{"v":99}', 0)
    code, out, err = elasticd(capfd, "status", "j")
    assert code == 0 and "newer elasticd" in err and "j: round 1 live" in out and "a at 127.0.0.1" in out


def test_an_etcd_that_cannot_be_reached_is_exit_code_4(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        for argv in (("status", "j"), ("ls",), ("scale", "j", "--max", "3"), ("stop", "j"), ("drain", "n")):
            code, out, err = elasticd(capfd, *argv, "--etcd", endpoint)
            assert (code, out, len(err.splitlines())) == (4, "", 1)


def test_the_wrong_scheme_is_bad_input(
    etcd: Client, server: Embedded, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _, err = elasticd(capfd, "ls", "--etcd", f"https://{server.endpoint}")
    assert code == 2 and "http://" in err and len(err.splitlines()) == 1


def test_commands_find_a_standalone_run_without_an_address(
    server: Embedded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("ELASTICD_ETCD", raising=False)
    code, out, err = elasticd(capfd, "ls")
    assert (code, out) == (0, "") and "no job on this machine" in err
    registry.register("alone", server.endpoint, server.pid, 1.0, server.folder)
    try:
        with Client(server.access) as client:
            client.delete_raw(b"/elasticd/", prefix=True)
            put(client, "alone", spec=SPEC, round=LIVE)
            assert "alone: round 1 live" in elasticd(capfd, "status")[1]
            assert elasticd(capfd, "scale", "alone", "--max", "3")[0] == 0
            assert spec_of(client, "alone").limits == Limits(2, 3)
    finally:
        registry.unregister("alone", server.folder)


def test_a_standalone_job_that_is_over_is_pointed_to_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ELASTICD_ETCD", raising=False)
    runs.note(runs.state_dir(), "train", "a", 1.0, tmp_path)
    _, _, err = elasticd(capfd, "status", "train")
    assert err.endswith("; `elasticd report train` shows how the run ended.\n") and len(err.splitlines()) == 1
    assert "elasticd report" not in elasticd(capfd, "status", "other")[2]


@contextmanager
def watching(*argv: str, etcd: Embedded | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run ``elasticd status --watch`` in a process of its own. Without ``etcd`` the command must find one."""
    process = interruptible("status", "--watch", *argv, etcd=etcd, stdout=PIPE, stderr=PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


# A watch that looks soon whether a silent etcd is away.
COMMAND = "from elasticd.cli import main, watch; watch.QUIET_S = 0.5; main.main()"


def interruptible(*argv: str, etcd: Embedded | None, **how: Any) -> subprocess.Popen[str]:
    """Start a command that reacts to Ctrl-C."""
    environ = {k: v for k, v in os.environ.items() if k != "ELASTICD_ETCD"}
    environ |= {"ELASTICD_ETCD": f"http://{etcd.endpoint}"} if etcd else {}
    # Background commands of a shell ignore SIGINT, and processes that they start do, too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen([sys.executable, "-c", COMMAND, *argv], env=environ, **how)
    finally:
        signal.signal(signal.SIGINT, before)


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_watching_shows_each_change_until_the_job_has_ended(etcd: Client, server: Embedded) -> None:
    put(etcd, "j", spec=SPEC, round=LIVE)
    with watching("j", "--json", etcd=server) as process:
        assert json.loads(next_line(process))["round"] == 1
        put(etcd, "j", round=replace(LIVE, number=2))
        assert json.loads(next_line(process))["round"] == 2
        put(etcd, "j", round=replace(LIVE, number=2, phase=Phase.ENDED, outcome=Outcome.SUCCEEDED))
        assert json.loads(next_line(process))["outcome"] == "succeeded"
        assert process.wait(60) == 0


def test_a_watch_waits_for_an_etcd_that_is_away_and_goes_on() -> None:
    with EtcdOnPorts() as etcd:
        with Client(etcd.access) as client:
            put(client, "j", spec=SPEC, round=LIVE)
            with watching("j", "--json", etcd=etcd) as process:
                assert process.stderr is not None
                assert json.loads(next_line(process))["round"] == 1
                etcd.stop(remove=False)
                assert process.stderr.readline() == "elasticd: etcd cannot be reached; waiting.\n"
                etcd.start()
                assert json.loads(next_line(process))["round"] == 1  # though nothing has changed
                put(client, "j", round=replace(LIVE, phase=Phase.ENDED, outcome=Outcome.SUCCEEDED))
                out, err = process.communicate(timeout=60)
        assert json.loads(out.splitlines()[-1])["outcome"] == "succeeded"
        assert (process.returncode, err) == (0, "")


def test_watching_a_standalone_run_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with EtcdOnPorts() as etcd:
        registry.register("alone", etcd.endpoint, etcd.pid, 1.0, etcd.folder)
        with Client(etcd.access) as client:
            put(client, "alone", spec=SPEC, round=LIVE)
        with watching("alone") as process:
            assert next_line(process)
            registry.unregister("alone", etcd.folder)
            etcd.stop()
            _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        assert err == "elasticd: the standalone run alone has ended, and its etcd with it.\n"


def test_top_draws_on_the_whole_terminal_and_gives_it_back_when_it_is_interrupted(
    etcd: Client, server: Embedded
) -> None:
    put(etcd, "j", spec=SPEC, round=LIVE, nodes__a=a_node("a"))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 70, 0, 0))
    before = termios.tcgetattr(theirs)
    process = interruptible("top", "j", etcd=server, stdin=theirs, stdout=theirs, stderr=theirs)
    try:
        written = b""
        while b"\x1b[J" not in written:  # the command has drawn its last line
            written += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert termios.tcgetattr(theirs) == before
        os.close(theirs)
        with suppress(OSError):  # no process has the other end open any more
            while part := os.read(ours, 65536):
                written += part
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    enters, drawn = written.split(b"\x1b[?1049h\x1b[?25l")
    drawn, left = drawn.split(b"\x1b[?25h\x1b[?1049l")
    assert (enters, left.strip()) == (b"", b"")
    screen = pyte.Screen(70, 20)
    pyte.ByteStream(screen).feed(drawn)
    lines = [line.rstrip() for line in screen.display]
    assert lines[1].startswith(" j  world 0  (2..8)  round 1  live"), lines
    assert any("slot 0" in line and "slot 1" in line for line in lines), lines


def test_a_standalone_run_that_ended_since_it_was_found_has_ended_and_is_not_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The etcd of the run has ended with it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    gone = Place(EtcdAccess((f"unix:{tmp_path}/clients:1",), timeout_s=0.5), ("j",), shared=False)
    with pytest.raises(CommandError) as met:
        job_commands._edit(gone, "j", lambda spec: spec)
    assert (met.value.sentence, met.value.code) == ("j has ended already.", 2)


def test_top_without_a_terminal_names_the_command_to_use_instead(capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = elasticd(capfd, "top", "train")
    assert code == 2 and "status --watch" in err
