"""A small process beside the agent that ends its workers when the agent no longer can.

Torch's agent starts workers in sessions of their own: when it is killed they live on, and when it
is stopped (SIGSTOP, a frozen debugger, swapping) they train on, though the node's lease has run
out and others have formed a world without it. The guard is told until when the node is sure to be
a member; it kills what the agent has started once that time passes without news, or as soon as
the agent is gone without a word. It finds those processes by a mark in their environment, which
every descendant inherits.

Run as a program (``python guard.py <pid> <mark>``) it imports the standard library only, not even psutil: it
starts at once, and no package that is broken or replaced keeps it from its work. The
protocol on its stdin: a line is a deadline in seconds of CLOCK_BOOTTIME, or ``bye``.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid

_MARK = "ELASTICD_GUARD_"


def boot_time_s() -> float:
    """A clock that all processes of the machine share and that counts time asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Guard:
    """The agent's side. Workers started after this, by this process, are in its care."""

    def __init__(self) -> None:
        self.mark = f"{_MARK}{uuid.uuid4().hex}"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), self.mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the terminal's foreground must not reach it first
            env={name: value for name, value in os.environ.items() if not name.startswith(_MARK)},
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        os.environ[self.mark] = "1"

    def member_until(self, deadline_s: float) -> None:
        """``deadline_s``: boot time; the workers may run until then. Never blocks."""
        self._say(f"{deadline_s}\n")

    def close(self) -> None:
        """The workers are the agent's own business again."""
        os.environ.pop(self.mark, None)
        self._say("bye\n")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        try:
            os.write(self._pipe, line.encode())
        except OSError:
            pass  # it was killed, or is stuck; nothing that is done here depends on it


def watch_over(agent_pid: int, mark: str) -> None:
    """The guard's whole life."""
    agent = os.pidfd_open(agent_pid)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(agent, select.POLLIN)
    deadline_s = float("inf")
    unread = b""
    while True:
        left_s = deadline_s - boot_time_s()
        ready = poll.poll(None if left_s == float("inf") else max(left_s, 0) * 1000)
        said = os.read(0, 65536) if any(fd == 0 for fd, _ in ready) else None
        if said:
            *lines, unread = (unread + said).split(b"\n")
            for line in lines:
                if line == b"bye":
                    return
                deadline_s = float(line)
        elif said == b"" or any(fd == agent for fd, _ in ready):
            _tell(kill_marked(mark, spare={agent_pid}), "the agent is gone")
            return
        if boot_time_s() >= deadline_s:
            _tell(
                kill_marked(mark, spare={agent_pid}),
                "the agent did not renew the node's lease in time",
            )
            deadline_s = float("inf")


def kill_marked(mark: str, spare: set[int]) -> int:
    """SIGKILL for every process that carries the mark, until none is left to find; how many."""
    needle = f"{mark}=".encode()
    killed: set[int] = set()
    while True:
        found = [pid for pid in _pids() if pid not in spare | killed and needle in _environment(pid)]
        if not found:
            return len(killed)
        for pid in found:
            killed.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def _tell(killed: int, why: str) -> None:
    if killed:
        print(
            f"elasticd: killed {killed} worker processes of this node, because {why}",
            file=sys.stderr,
        )


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _environment(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:  # gone, or somebody else's
        return b""


if __name__ == "__main__":
    watch_over(int(sys.argv[1]), sys.argv[2])
