"""Whichever process is killed, stopped or interrupted, nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elasticd.channel.warden_messages import Ended
from elasticd.procs.warden_client import Warden
from tests.procs.agents import (
    CALL,
    PATIENCE_S,
    PROGRAMS,
    Agent,
    is_running,
    wait_until,
    wait_until_gone,
)

FAMILY = [sys.executable, str(PROGRAMS / "family.py")]
STUBBORN = [*FAMILY, "ignore"]

Start = Callable[..., Agent]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    agents: list[Agent] = []

    def start(command: list[str], **how: Any) -> Agent:
        agents.append(Agent(tmp_path, command, **how))
        return agents[-1]

    yield start
    for agent in agents:
        agent.close()


def _all(families: list[dict[str, int]]) -> list[int]:
    return [pid for family in families for pid in family.values()]


def test_a_killed_agent_leaves_no_worker_descendant_service_or_file(start: Start) -> None:
    agent = start([*FAMILY, "ignore,child,setsid,daemon,forgetful"])
    families = agent.hear_families(2)
    (ready,) = agent.hear("ready")
    pids = [*_all(families), ready["service"], ready["warden"]]
    assert len(pids) == 2 * 5 + 2
    assert all(map(is_running, pids))
    assert all(map(os.path.exists, ready["paths"]))
    agent.signal(signal.SIGKILL)
    wait_until_gone(pids)
    wait_until(lambda: not any(map(os.path.exists, ready["paths"])), "its files are gone")


def test_a_process_forked_from_the_agent_does_not_hide_its_death(start: Start) -> None:
    agent = start(FAMILY, workers=1, fork=True)
    families = agent.hear_families(1)
    (ready,) = agent.hear("ready")
    try:
        agent.signal(signal.SIGKILL)
        wait_until_gone([*_all(families), ready["warden"]])
        assert is_running(ready["fork"]), "it still holds the socket"
    finally:
        os.kill(ready["fork"], signal.SIGKILL)


def test_a_linked_worker_sees_that_its_agent_is_gone_even_if_the_warden_is_stopped(start: Start) -> None:
    program = f"""{CALL}
import json
link = call()
link.send(Hello(1))
link.send(Waiting(0, 0, Holds.NONE))
assert isinstance(link.receive()[0], Enter)
print("family", json.dumps(dict(worker=os.getpid())), flush=True)
link.receive()
"""
    agent = start([sys.executable, "-c", program], workers=1)
    families = agent.hear_families(1)
    (ready,) = agent.hear("ready")
    os.kill(ready["warden"], signal.SIGSTOP)
    try:
        agent.signal(signal.SIGKILL)
        wait_until_gone(_all(families))
    finally:
        os.kill(ready["warden"], signal.SIGCONT)


def test_a_killed_warden_ends_its_workers_and_the_agent_learns_of_it(start: Start) -> None:
    agent = start(FAMILY)
    families = agent.hear_families(2)
    (ready,) = agent.hear("ready")
    os.kill(ready["warden"], signal.SIGKILL)
    exits = agent.hear("exited", 2)
    agent.hear("lost")
    assert [line["exit"]["code"] for line in exits] == [-9, -9]
    assert "warden" in exits[0]["exit"]["message"]
    assert all(line["exit"]["fenced"] for line in exits), "nobody is charged, also if this is heard first"
    wait_until_gone([ready["service"]])
    # A daemon that hides its origin cannot be told from children of the agent itself.
    wait_until_gone(pid for family in families for kind, pid in family.items() if kind != "forgetful")
    for family in families:
        os.kill(family["forgetful"], signal.SIGKILL)
    assert agent.process.poll() is None


def test_what_is_watched_as_the_warden_dies_may_have_the_number_that_its_line_had(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = threading.Event()
    with Warden.start() as warden, ExitStack() as opened:
        line = warden._channel.fileno()

        def ended(_: Ended) -> None:
            while (one := opened.enter_context(socket.socket())).fileno() < line:
                pass
            if one.fileno() == line:
                warden.watch(one, lambda: None)
                warden.call_soon(told.set)

        warden.spawn_service(["sleep", "1000"], ended=ended)
        os.kill(warden.pid, signal.SIGKILL)
        assert told.wait(PATIENCE_S)
    assert not caplog.messages


def test_workers_of_a_stopped_agent_die_with_their_warden(start: Start) -> None:
    agent = start(STUBBORN)
    families = agent.hear_families(2)
    (ready,) = agent.hear("ready")
    agent.signal(signal.SIGSTOP)
    os.kill(ready["warden"], signal.SIGKILL)
    wait_until_gone([*_all(families), ready["service"]])


def test_workers_of_a_stopped_agent_die_when_the_fence_passes(start: Start) -> None:
    agent = start(STUBBORN, fence_s=3.0)
    families = agent.hear_families(2)
    (ready,) = agent.hear("ready")
    agent.signal(signal.SIGSTOP)
    wait_until_gone(_all(families))
    assert is_running(ready["service"]), "the fence is for workers"
    agent.signal(signal.SIGCONT)
    exits = agent.hear("exited", 2)
    assert [(line["exit"]["code"], line["exit"]["fenced"]) for line in exits] == [(-9, True)] * 2


def test_ctrl_c_reaches_the_agent_but_neither_warden_nor_workers(start: Start) -> None:
    agent = start(FAMILY)
    families = agent.hear_families(2)
    (ready,) = agent.hear("ready")
    os.killpg(agent.pid, signal.SIGINT)
    agent.hear("interrupted")
    assert all(map(is_running, [*_all(families), ready["warden"], ready["service"]]))


def test_the_warden_ignores_the_signals_that_end_a_job(start: Start) -> None:
    agent = start(FAMILY, workers=1)
    (family,) = agent.hear_families(1)
    (ready,) = agent.hear("ready")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(ready["warden"], number)
    os.kill(family["worker"], signal.SIGKILL)
    agent.hear("exited")  # so the daemon still runs, and has made sure of that
    assert is_running(ready["warden"])


def test_the_end_of_a_service_is_reported(start: Start) -> None:
    agent = start(FAMILY, workers=1)
    (ready,) = agent.hear("ready")
    os.kill(ready["service"], signal.SIGKILL)
    assert agent.hear("service ended")[0]["code"] == -9
