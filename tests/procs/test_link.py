"""Workers that keep their process from round to round, and other processes that connect to their agent."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from elasticd.channel.codec import ChannelClosed
from elasticd.channel.framing import Channel, connect
from elasticd.channel.worker_messages import (
    AGENT_TO_WORKER,
    WORKER_TO_AGENT,
    AgentToWorker,
    Enter,
    Hello,
    WorkerToAgent,
)
from elasticd.core.facts import Exit
from elasticd.core.ports import Assignment, WorkerCheckpointed
from elasticd.procs.logdest import LogDest
from elasticd.procs.warden_client import Warden
from elasticd.procs.worker_links import LinkListener
from elasticd.procs.workers import LocalProcs
from tests.channel.starved import Accepts, descriptors
from tests.contract.heard import Heard
from tests.procs.agents import CALL, PATIENCE_S, PROGRAMS
from tests.procs.conftest import Bench

LINKED = [sys.executable, str(PROGRAMS / "linked.py")]
SIGTERM, SIGKILL = int(signal.SIGTERM), int(signal.SIGKILL)
LONG_S = 3600.0


class Party:
    """Workers that behave as the test orders, and all their messages."""

    def __init__(self, bench: Bench, command: list[str], **how: Any) -> None:
        self._told = threading.Condition()
        self.heard = Heard()
        self.exits: list[tuple[int, Exit]] = []
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.procs: LocalProcs = bench.procs(
            command, say=lambda event, **fields: self._add(self.said, (event, fields)), **how
        )
        self.procs.listen(lambda said: self._add(self.heard.news, said))

    def start(self, round_number: int, *how: str, **env: str) -> None:
        self.procs.start(round_number, _assign(how, env), self._exited)

    def standby(self, *how: str, **env: str) -> None:
        self.procs.standby(_assign(how, env), self._exited)

    def leave(self, *, planned: bool = False) -> None:
        self.procs.leave(planned, SIGTERM, LONG_S, LONG_S)

    def until(self, holds: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        with self._told:
            while not holds():
                assert time.monotonic() < deadline, (self.heard.news, self.exits, self.said)
                self._told.wait(0.02)  # no event tells of steps

    def events(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.said if event == name]

    def _exited(self, number: int, exit: Exit) -> None:
        self._add(self.exits, (number, exit))

    def _add(self, told: list[Any], what: Any) -> None:
        with self._told:
            told.append(what)
            self._told.notify_all()


def _assign(how: tuple[str, ...], env: dict[str, str]) -> tuple[Assignment, ...]:
    return tuple(Assignment(10 + i, i, i, {"RANK": str(i), "BEHAVE": h, **env}) for i, h in enumerate(how))


# ---------------------------------------------------------------- the rounds of a worker


def test_a_process_that_goes_on_has_the_environment_and_the_prefix_of_its_new_rank_and_its_old_log(
    bench: Bench, tmp_path: Path
) -> None:
    file = str(tmp_path / "out")
    asked: list[tuple[int, list[int]]] = []

    def reify(number: int, envs: dict[int, dict[str, str]]) -> LogDest:
        asked.append((number, sorted(envs)))
        return LogDest(stdouts={3: file}, tee_stdouts={3: file})

    party = Party(bench, LINKED, reify=reify)
    party.procs.standby((Assignment(10, 3, 3, {"RANK": "3", "BEHAVE": "obeys"}),), party._exited)
    party.until(lambda: party.heard.waits)
    # the output comes on another connection than the link, and may be later
    bench.console.wait_for(b"[default3]:started, afresh\n")
    party.procs.start(7, (Assignment(10, 0, 0, {"RANK": "0", "BEHAVE": "obeys"}),), party._exited)
    bench.console.wait_for(b"[default0]:round 7 rank 0\n")
    assert bench.console.lines()[0] == b"[default3]:started, afresh"
    party.until(lambda: party.events("worker.entered"))
    assert Path(file).read_text() == "started, afresh\nround 7 rank 0\n"
    assert asked == [(0, [3])]


def test_the_duration_of_entering_is_reported(bench: Bench) -> None:
    party = Party(bench, LINKED)
    party.start(1, "obeys")
    party.until(lambda: party.events("worker.entered"))
    told = {"slot": 10, "round": 1, "step": 0, "state_from": "peer", "group_s": 0.01, "state_s": 0.02}
    assert party.events("worker.entered") == [told]


def test_progress_lists_the_workers_of_the_round_and_no_waiting_ones(bench: Bench) -> None:
    party = Party(bench, LINKED)
    party.start(1, "obeys", "obeys")
    party.until(lambda: len([p for p in party.procs.progress() if p.step > 20]) == 2)
    pid = party.procs.progress()[0].pid
    party.leave()
    party.until(lambda: len(party.heard.waits) == 2)
    party.start(2, "obeys")
    (progress,) = party.procs.progress()
    assert (progress.slot, progress.pid) == (10, pid)
    assert progress.step <= 20
    party.until(lambda: party.procs.progress()[0].at > 0)


def test_steps_that_a_worker_never_commits_are_no_progress_of_its_round(bench: Bench) -> None:
    party = Party(bench, LINKED)
    party.start(1, "never commits", "obeys")
    party.until(lambda: len([p for p in party.procs.progress() if p.step > 20]) == 2)
    made = party.procs.steps()
    assert made[10] == 0 and made[11] > 0
    party.leave()
    party.until(lambda: len(party.heard.waits) == 2)
    assert {slot: steps > 0 for slot, _, steps, _ in party.heard.waits} == {10: False, 11: True}


def test_a_worker_whose_run_function_has_returned_ends_by_itself_though_its_round_is_closed(
    bench: Bench, tmp_path: Path
) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    party = Party(bench, LINKED)
    party.start(1, "obeys", FINISH="1", LINGER=str(fifo))
    party.until(lambda: party.heard.returns == [(10, 1)])
    party.procs.leave(True, SIGTERM, LONG_S, 0.0)
    with fifo.open("w"):
        party.until(lambda: party.exits)
    assert [(exit.code, exit.slot) for _, exit in party.exits] == [(0, 10)]


def test_a_worker_that_is_done_may_end(bench: Bench) -> None:
    party = Party(bench, LINKED)
    party.start(1, "obeys", FINISH="1")
    party.until(lambda: party.exits)
    assert party.events("worker.done") == [{"slot": 10, "round": 1}]
    assert [(number, exit.code) for number, exit in party.exits] == [(1, 0)]
    assert not party.events("worker.unlinked")


def test_a_worker_that_loses_the_others_reports_it_and_is_told_to_leave(bench: Bench) -> None:
    party = Party(bench, LINKED)
    party.start(1, "alone")
    party.until(lambda: party.heard.broke)
    assert party.heard.broke == [(10, 1, False)]
    why = {"slot": 10, "round": 1, "fails": False, "why": "the others are gone"}
    assert party.events("worker.broken") == [why]
    party.leave()
    party.until(lambda: party.heard.waits)
    assert not party.exits


def test_a_failing_worker_has_as_long_to_end_as_a_stopped_one(bench: Bench, tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    party = Party(bench, LINKED)
    party.start(1, "fails", LINGER=str(fifo))
    party.until(lambda: party.heard.broke == [(10, 1, True)])
    party.procs.leave(False, SIGTERM, 0.0, LONG_S)
    party.until(lambda: party.exits)
    killed = [(exit.code, exit.message) for _, exit in party.exits]
    assert killed == [(-SIGKILL, "the others are gone")], "the error that the worker announced is not lost"


@pytest.mark.parametrize("last", ["Broken(1, True, 'its own')", "Waiting(7, 7, Holds.NONE)"])
def test_all_that_a_worker_said_before_its_end_is_heard_though_both_are_there_at_once(
    bench: Bench, last: str
) -> None:
    program = f"""{CALL}
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
link = call()
link.send(Hello(os.getpid()))
link.send(Waiting(0, 0, Holds.NONE))
link.receive()
print("up", flush=True)
signal.sigwait([signal.SIGUSR1])
link.send(Entered(1, 0, 0.0, 0.0))
for number in range(99):
    link.send(Checkpointed(str(number)))
link.send({last})
sys.exit(5)
"""
    party = Party(bench, [sys.executable, "-c", program])
    party.start(1, "")
    bench.console.wait_for(b"up")
    busy, go_on = threading.Event(), threading.Event()

    def keep_busy() -> None:
        busy.set()
        go_on.wait(PATIENCE_S)

    bench.warden.call_soon(keep_busy)
    assert busy.wait(PATIENCE_S)
    pid = party.procs.pids()[10]
    os.kill(pid, signal.SIGUSR1)
    party.until(lambda: not Path(f"/proc/{pid}").exists())  # the warden reports the end next
    go_on.set()
    party.until(lambda: party.exits)
    assert [exit.code for _, exit in party.exits] == [5]
    assert sum(isinstance(news, WorkerCheckpointed) for news in party.heard.news) == 99
    assert party.heard.broke == ([(10, 1, True)] if "Broken" in last else [])


def test_a_worker_that_is_being_stopped_is_not_said_to_wait(bench: Bench) -> None:
    program = f"""{CALL}
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
link = call()
link.send(Hello(1))
print("up", flush=True)
signal.sigtimedwait([signal.SIGUSR1], 100)
link.send(Waiting(0, 0, Holds.NONE))
print("said", flush=True)
time.sleep(1000)
"""
    party = Party(bench, [sys.executable, "-c", program])
    party.start(1, "")
    bench.console.wait_for(b"up")
    party.until(lambda: party.heard.linked)
    party.procs.stop(SIGTERM, LONG_S)
    os.kill(party.procs.pids()[10], signal.SIGUSR1)
    bench.console.wait_for(b"said")
    party.procs.stop(SIGKILL, 0.0)
    party.until(lambda: party.exits)
    assert party.heard.waits == []


def test_a_standby_may_be_forked_from_the_zygote(bench: Bench) -> None:
    party = Party(bench, LINKED, zygote=True)
    party.start(1, "obeys")
    party.until(lambda: party.events("zygote.ready"))
    party.procs.standby((Assignment(12, 1, 1, {"RANK": "1", "BEHAVE": "obeys"}),), party._exited)
    party.until(lambda: party.heard.waits)
    assert party.heard.waits == [(12, 0, 0, None)]
    bench.console.wait_for(b"started, forked")
    party.leave()
    party.until(lambda: len(party.heard.waits) == 2)
    party.procs.start(2, (Assignment(12, 0, 0, {"RANK": "0"}),), party._exited)
    party.until(lambda: party.procs.steps()[12] > 0)


# ---------------------------------------------------------------- workers that break the protocol


@pytest.mark.parametrize("how", ["garbage", "nested", "endless", "floods", "lies", "another version"])
def test_a_worker_that_breaks_the_rules_is_cut_off_and_the_others_go_on(bench: Bench, how: str) -> None:
    party = Party(bench, LINKED)
    party.start(1, how, "obeys")
    bench.console.wait_for(b"unlinked")
    party.until(lambda: party.events("worker.unlinked") and party.procs.steps()[11] > 0)
    (told,) = party.events("worker.unlinked")
    assert told["slot"] == 10
    assert told["why"]
    party.leave()  # the worker cannot be told to leave, so it is stopped like a worker without a link
    party.until(lambda: party.exits and party.heard.waits)
    assert [exit.code for _, exit in party.exits] == [-SIGTERM]
    assert [(slot, number) for slot, number, _, _ in party.heard.waits] == [(11, 1)]


def test_a_standby_whose_link_is_cut_is_killed(bench: Bench) -> None:
    party = Party(bench, LINKED)
    party.standby("floods")
    party.until(lambda: party.exits)
    assert [(number, exit.code) for number, exit in party.exits] == [(0, -SIGKILL)]


def test_a_worker_that_never_reads_delays_no_other_and_loses_its_link(bench: Bench) -> None:
    party = Party(bench, LINKED)
    party.start(1, "never reads")
    party.until(lambda: party.procs._workers[10].protocol.last is Enter)
    for _ in range(100_000):  # as much as its socket takes
        party.leave(planned=True)
        if party.exits:
            break
    party.until(lambda: party.exits)
    assert party.exits[0][1].code == -SIGTERM


# ---------------------------------------------------------------- processes that are not workers


def test_neither_children_of_a_worker_nor_a_second_call_of_its_own_are_let_in(bench: Bench) -> None:
    program = f"""{CALL}
def is_let_in():
    try:
        return bool(call().receive())
    except OSError:
        return False
link = call()
link.send(Hello(os.getpid()))
link.send(Waiting(0, 0, Holds.NONE))
assert isinstance(link.receive()[0], Enter)
print("a second one:", is_let_in(), flush=True)
if not (child := os.fork()):
    print("a child's:", is_let_in(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    party = Party(bench, [sys.executable, "-c", program])
    party.start(1, "")
    party.until(lambda: party.exits)
    assert bench.console.lines() == [b"a second one: False", b"a child's: False"]
    assert party.heard.linked == [10]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_worker_that_became_another_user_is_not_let_in(bench: Bench) -> None:
    program = """
import os, socket
os.setuid(65534)
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect("\\0" + os.environ["ELASTICD_LINK"])
link.settimeout(100)
print("let in:", bool(link.recv(1)), flush=True)
"""
    party = Party(bench, [sys.executable, "-c", program])
    party.start(1, "")
    party.until(lambda: party.exits)
    assert bench.console.lines() == [b"let in: False"]


@pytest.fixture
def listener() -> Iterator[LinkListener]:
    with Warden.start() as warden:
        listener = LinkListener(warden)
        yield listener
        listener.close()


class _Ear:
    """Collects the messages of a connection."""

    def __init__(self, listener: LinkListener) -> None:
        self.messages: list[WorkerToAgent] = []
        self.changed = threading.Event()
        self.link = listener.new_link(self._heard, lambda why: None)

    def _heard(self, message: WorkerToAgent) -> None:
        self.messages.append(message)
        self.changed.set()


def _call(listener: LinkListener) -> Channel[WorkerToAgent, AgentToWorker]:
    return Channel(connect(listener.address), WORKER_TO_AGENT, AGENT_TO_WORKER)


def _is_refused(link: Channel[WorkerToAgent, AgentToWorker]) -> bool:
    try:
        link.poll(PATIENCE_S)
    except ChannelClosed:
        return True
    return False


def test_a_stranger_is_refused(listener: LinkListener) -> None:
    with closing(_call(listener)) as link:
        assert _is_refused(link)


def test_a_worker_that_connects_before_its_start_is_known_is_accepted_once_it_is(
    listener: LinkListener,
) -> None:
    ear = _Ear(listener)
    with closing(_call(listener)) as link:
        link.send(Hello(1))
        listener._warden.call_soon(lambda: ear.link.started(os.getpid()))
        assert ear.changed.wait(PATIENCE_S)
        assert ear.messages == [Hello(1)]
        ear.link.close()
        assert _is_refused(link)


def test_a_stranger_that_connects_meanwhile_is_refused_later(listener: LinkListener) -> None:
    ear = _Ear(listener)
    with closing(_call(listener)) as link:
        listener._warden.call_soon(lambda: ear.link.started(os.getppid()))
        assert _is_refused(link)


def test_a_stranger_is_refused_when_the_worker_it_might_have_been_could_not_be_started(
    listener: LinkListener,
) -> None:
    ear = _Ear(listener)
    with closing(_call(listener)) as link:
        ear.link.close()
        assert _is_refused(link)


def test_a_call_without_a_descriptor_for_it_is_answered_later_and_costs_little_meanwhile(
    listener: LinkListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear, accepts = _Ear(listener), Accepts(monkeypatch)
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(Channel(caller, WORKER_TO_AGENT, AGENT_TO_WORKER)) as link:
        with descriptors(0):
            caller.connect(f"\0{listener.address}")
            assert accepts.time_of(21) > 0.19
        link.send(Hello(1))
        listener._warden.call_soon(lambda: ear.link.started(os.getpid()))
        assert ear.changed.wait(PATIENCE_S)
        ear.link.close()


def test_a_process_that_got_the_number_of_a_worker_is_refused(listener: LinkListener) -> None:
    ear = _Ear(listener)
    known = threading.Event()

    def started() -> None:
        ear.link.started(os.getpid())
        ear.link._started_at -= 1
        known.set()

    listener._warden.call_soon(started)
    assert known.wait(PATIENCE_S)
    with closing(_call(listener)) as link:
        assert _is_refused(link)


def test_a_worker_that_reports_a_save_after_it_was_told_to_end_is_not_held(bench: Bench) -> None:
    program = f"""{CALL}
import signal, time
link = call()
def save(*_):
    link.send(Checkpointed("x"))
    print("told", link.receive()[0], flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.01)  # the handler of a signal that came just before pause() would not run
"""
    exit = bench.stopped(program, b"ready")
    assert exit.code == 0 and any(b"Leave" in line for line in bench.console.lines())
