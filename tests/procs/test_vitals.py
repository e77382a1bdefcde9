"""The figures of a process, as the kernel reports them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from elasticd.procs.vitals import vitals
from tests.procs.agents import wait_until

TWO_GROUPS = """
import datetime, time
import torch.distributed as dist
second = datetime.timedelta(seconds=1)
groups = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1, second) for _ in range(2)]
print("here", flush=True)
time.sleep(3600)
"""


def wakes_of_event_loops(pid: int) -> list[int]:
    """Return how often each of Gloo's event loops has continued after a wait."""
    threads = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    fields = [dict(line.split(":\t", 1) for line in text.splitlines()) for text in threads]
    return [int(f["voluntary_ctxt_switches"]) for f in fields if f["Name"] == "gloo_tcp_loop"]


def test_the_event_loops_of_groups_do_not_make_a_sleeping_worker_look_busy() -> None:
    process = subprocess.Popen([sys.executable, "-c", TWO_GROUPS], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        wait_until(lambda: len(wakes_of_event_loops(process.pid)) == 2, "both threads have their names")
        before, loops = vitals(process.pid), wakes_of_event_loops(process.pid)
        while sum(wakes_of_event_loops(process.pid)) < sum(loops) + 50:
            time.sleep(0.01)  # nothing tells that a thread has continued
        assert vitals(process.pid).all_wakes < before.all_wakes + 5
    finally:
        process.kill()
        process.communicate()
