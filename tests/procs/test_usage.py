import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elasticd.procs.usage import memory_limit, own_usage, throttled_s, usage

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


# ---------------------------------------------------------------- quotas and limits, in the kernel's files

V1 = "nr_periods 33\nnr_throttled 31\nthrottled_time 2240163710\nnr_bursts 0\nburst_time 0\n"
V2 = "usage_usec 5\nuser_usec 4\nsystem_usec 1\nnr_periods 3\nnr_throttled 2\nthrottled_usec 1500000\n"
V2_TOP = "usage_usec 5\nuser_usec 4\nsystem_usec 1\n"


def write(folder: Path, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.stat").write_text(stat)


def test_the_quotas_of_all_groups_around_a_process_count(tmp_path: Path) -> None:
    write(tmp_path, V2_TOP)
    write(tmp_path / "pods", V2)
    write(tmp_path / "pods" / "mine", V2)
    write(tmp_path / "pods" / "others", V2)
    assert throttled_s("0::/pods/mine\n", tmp_path) == 3.0
    assert throttled_s("0::/\n", tmp_path) == 0.0


def test_a_container_that_sees_no_group_around_it_has_its_own_at_the_top(tmp_path: Path) -> None:
    write(tmp_path / "cpu", V1)
    groups = "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/docker/abc\n"
    assert throttled_s(groups, tmp_path) == 2.24016371


def test_where_nothing_is_told_nothing_is_held_up(tmp_path: Path) -> None:
    write(tmp_path / "broken", "throttled_usec many\n")
    for groups in ("", "0::/nowhere\n", "0::/broken\n"):
        assert throttled_s(groups, tmp_path) == 0.0
    assert throttled_s() >= 0.0


@pytest.mark.parametrize(
    ("groups", "folder", "name"),
    [
        ("0::/pods/mine\n", "pods", "memory.max"),
        ("4:memory:/docker/abc\n", "memory", "memory.limit_in_bytes"),
    ],
)
def test_the_smallest_limit_of_the_groups_around_a_process_is_its_memory(
    tmp_path: Path, groups: str, folder: str, name: str
) -> None:
    there = psutil.virtual_memory().total
    assert memory_limit(groups, tmp_path) == there
    (tmp_path / folder / "mine").mkdir(parents=True)
    (tmp_path / folder / name).write_text("2000000\n")
    (tmp_path / folder / "mine" / name).write_text("max\n")
    assert memory_limit(groups, tmp_path) == 2_000_000
    (tmp_path / folder / name).write_text(f"{2**63 - 4096}\n")  # no limit, in control groups of version 1
    assert memory_limit(groups, tmp_path) == there
    assert 0 < memory_limit() <= there
