from __future__ import annotations

import os
import subprocess
import sys

from elasticd.daemon.identity import process_alive


def test_a_process_is_alive_until_it_has_ended_reaped_or_not() -> None:
    assert process_alive(os.getpid())
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert not process_alive(ended.pid)
    ended.wait()
    assert not process_alive(ended.pid)
