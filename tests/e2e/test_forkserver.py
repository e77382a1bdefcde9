"""The tests' own server of commands."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

from tests.forkserver import _NUMBER

SERVER = """
import socket, sys, time
from tests.forkserver import _serve
if _serve(socket.socket(fileno=int(sys.argv[1]))) is not None:
    time.sleep(1000)  # the command
"""


def test_the_commands_of_interrupted_tests_are_killed() -> None:
    tests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line, told = socket.socketpair()
    with tests, theirs, line, told:
        argv = [sys.executable, "-c", SERVER, str(theirs.fileno())]
        server = subprocess.Popen(argv, cwd=Path(__file__).parents[2], pass_fds=[theirs.fileno()])
        theirs.close()
        socket.send_fds(tests, [b'{"argv": []}'], [0, 1, 2, told.fileno()])
        (pid,) = _NUMBER.unpack(line.recv(_NUMBER.size))
        command = os.pidfd_open(pid)
        tests.close()
        assert select.select([command], [], [], 60.0)[0], "the command outlives the tests"
        os.close(command)
        server.wait(60.0)
