import os
import subprocess
import sys

import psutil

from elasticd.procs.usage import own_usage, usage

HUNGRY = """
import subprocess, sys
block = bytearray(64 << 20); block[::4096] = b"x" * len(block[::4096])
if len(sys.argv) > 1:
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-c", sys.stdin.read()], **streams)
    child.stdout.read(1)
n = sum(i * i for i in range(2_000_000))
print("x", end="", flush=True)
sys.stdin.read() if len(sys.argv) == 1 else child.wait()
"""


def test_a_process_is_counted_with_what_it_started() -> None:
    inner = HUNGRY.replace("sys.stdin.read() if", "__import__('signal').pause() if")
    both: list[psutil.Process] = []
    parent = subprocess.Popen(
        [sys.executable, "-c", HUNGRY, "parent"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdin and parent.stdout
    try:
        parent.stdin.write(inner.encode())
        parent.stdin.close()
        assert parent.stdout.read(1) == b"x"
        (child,) = psutil.Process(parent.pid).children()
        both = [psutil.Process(parent.pid), child]
        used = usage(parent.pid)
        assert used is not None
        resident = sum(p.memory_info().rss for p in both)
        assert abs(used.resident_bytes - resident) < 0.05 * resident
        assert used.resident_bytes > 128 << 20
        alone = usage(child.pid)
        assert alone is not None and 0 < alone.cpu_s < used.cpu_s
    finally:
        for process in both:
            process.kill()
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert usage(parent.pid) is None


def test_a_process_knows_its_own_use() -> None:
    mine = own_usage()
    assert (
        abs(mine.resident_bytes - psutil.Process(os.getpid()).memory_info().rss) < 0.2 * mine.resident_bytes
    )
    assert mine.cpu_s > 0
