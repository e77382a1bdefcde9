"""A small process beside the agent that kills the agent's workers when the agent cannot.

Torch's agent starts workers in their own sessions, so they outlive a killed agent. Workers of a stopped agent
(SIGSTOP, a debugger, swapping) train on, although the node's lease has expired and the other nodes have
formed a world without this node. The agent tells the guard until when the node is sure to be a member. The
guard kills the agent's workers when that time passes, or when the agent ends without ``bye``. It finds the
workers by a mark in their environment, which every descendant inherits.

As a program (``python guard.py <pid> <mark>``) the guard imports the standard library only, not even psutil.
So it starts at once, and does not depend on packages that may be broken or replaced. Each line on stdin is a
deadline in seconds of CLOCK_BOOTTIME, or ``bye``.
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
    """Return the seconds since boot, including suspended time. All processes of the machine share this
    clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Guard:
    """The agent's side. The guard covers workers that this process starts from now on."""

    def __init__(self) -> None:
        self.mark = f"{_MARK}{uuid.uuid4().hex}"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), self.mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C on the terminal must not reach the guard
            env={name: value for name, value in os.environ.items() if not name.startswith(_MARK)},
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        os.environ[self.mark] = "1"

    def member_until(self, deadline_s: float) -> None:
        """Let the workers run until ``deadline_s`` (boot time). Never blocks."""
        self._say(f"{deadline_s}\n")

    def close(self) -> None:
        """End the guard. From now on only the agent stops its workers."""
        os.environ.pop(self.mark, None)
        self._say("bye\n")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        try:
            os.write(self._pipe, line.encode())
        except OSError:
            pass  # the guard was killed, or is stuck; the agent works without it


def watch_over(agent_pid: int, mark: str) -> None:
    """Run the guard until the agent ends or says ``bye``."""
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
            _tell(kill_marked(mark, spare={agent_pid}), "the agent has ended")
            return
        if boot_time_s() >= deadline_s:
            _tell(
                kill_marked(mark, spare={agent_pid}),
                "the agent did not renew the node's lease in time",
            )
            deadline_s = float("inf")


def kill_marked(mark: str, spare: set[int]) -> int:
    """SIGKILL every process with the mark until none is left. Return how many were killed."""
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
    except OSError:  # the process has exited, or belongs to another user
        return b""


if __name__ == "__main__":
    watch_over(int(sys.argv[1]), sys.argv[2])
