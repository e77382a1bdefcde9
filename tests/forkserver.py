"""Starts commands by forking a process that has imported elasticd and torch already.

A start of Python with these imports takes about two and a half seconds of CPU time, and most end-to-end tests
start two or three agents. A command that is forked is a process of its own in every other respect: it has its
own session, folder, environment, files and signals, and runs ``elasticd.cli.begin`` as the script does.

``LD_PRELOAD`` and other variables that are read before the first line of Python have no effect on a fork, but
``PYTHONPATH`` has. /proc/PID/environ and /proc/PID/cmdline show those of the server.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from elasticd.cli.main import _COMMANDS

ELASTICD: Final = "elasticd.cli.begin:main"
TORCHRUN: Final = "torch.distributed.run:main"
PROGRAM: Final = "tests.forkserver:execute"  # the text of a Python program, and its arguments

_IMPORTED: Final = (
    "elasticd.cli.begin",
    "elasticd.daemon.logs",
    "elasticd.daemon.run_agent",
    "elasticd.torchrun.backend",
    "torch.distributed.run",
)
_NUMBER: Final = struct.Struct("i")


class Forked:
    """A command that runs, with the part of ``subprocess.Popen``'s interface that tests use."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdout: int,
        stderr: int,
        stdin: int | None = None,
        entry: str = ELASTICD,
    ) -> None:
        """Start the command. The caller keeps the files ``stdin``, ``stdout`` and ``stderr``; stdin may be
        empty."""
        self._line, theirs = socket.socketpair()
        request = {"entry": entry, "argv": list(argv), "env": dict(env), "cwd": str(cwd)}
        with theirs, open(os.devnull) as nothing:
            given = [nothing.fileno() if stdin is None else stdin, stdout, stderr, theirs.fileno()]
            socket.send_fds(_server(), [json.dumps(request).encode()], given)
        self.returncode: int | None = None
        self.pid = self._number()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked command", timeout or 0.0)
            self.returncode = self._number()
            self._line.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        heard = self._line.recv(_NUMBER.size, socket.MSG_WAITALL)
        assert heard, "the fork server is gone"
        number: int
        (number,) = _NUMBER.unpack(heard)
        return number


def run(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout_s: float, entry: str = ELASTICD
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Raises subprocess.TimeoutExpired."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = {"stdout": out.fileno(), "stderr": err.fileno()}
        command = Forked(argv, env=env, cwd=cwd, entry=entry, **files)
        code = command.wait(timeout_s)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(argv, code, out.read(), err.read())


@functools.cache
def _server() -> socket.socket:
    """Return the connection to the server, which ends once this process has ended."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "ELASTICD_"))}
    subprocess.Popen(
        [sys.executable, "-m", "tests.forkserver", str(theirs.fileno())],
        # a process that forks must have no threads
        env=env | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[1],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    return ours


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Returns the request in the child; None in the server, once the client ends."""
    # for each pidfd: the pid, and the connection that gets the exit code
    running: dict[int, tuple[int, int]] = {}
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not requests:
                pid, line = running.pop(key.fd)
                selector.unregister(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _tell(line, code)
                os.close(line)
                os.close(key.fd)
                continue
            message, fds, _, _ = socket.recv_fds(requests, 1 << 20, 4)
            if not message:
                for pid, _ in running.values():  # the tests were interrupted
                    os.kill(pid, signal.SIGKILL)
                return None
            if (pid := os.fork()) == 0:
                os.setsid()
                for number, fd in enumerate(fds[:3]):
                    os.dup2(fd, number)
                selector.close()  # otherwise the object would later close another file of this number
                requests.detach()
                os.closerange(3, 1 << 16)
                request: dict[str, Any] = json.loads(message)
                return request
            _tell(fds[3], pid)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, fds[3]
            selector.register(pidfd, selectors.EVENT_READ)
            for fd in fds[:3]:
                os.close(fd)


def _tell(line: int, number: int) -> None:
    try:
        os.write(line, _NUMBER.pack(number))
    except OSError:
        pass  # the test is over


def execute() -> None:
    exec(sys.argv.pop(1), {"__name__": "__main__"})


def main() -> None:
    for name in (*_IMPORTED, *(place.partition(":")[0] for place in _COMMANDS.values())):
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1 == threading.active_count(), "a thread would not be forked"
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # an import may have chosen a folder already
    sys.argv = request["argv"]
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [str(Path(sys.executable).parent), *given]  # as the script ``elasticd`` does
    module, _, name = request["entry"].partition(":")
    sys.exit(getattr(importlib.import_module(module), name)())


if __name__ == "__main__":
    main()
