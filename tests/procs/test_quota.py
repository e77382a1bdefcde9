"""What a quota of processor time has held up, read from files as the kernel has them, and from the kernel."""

from __future__ import annotations

from pathlib import Path

from elasticd.procs.usage import throttled_s

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
