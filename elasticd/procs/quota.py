"""For how long a control group's quota of processor time has held up this process and its like."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def throttled_s(groups: str | None = None, root: Path = Path("/sys/fs/cgroup")) -> float:
    """So far, in this process's groups and those around them, added up over their processors. ``groups``: as
    /proc/self/cgroup has them, which are below ``root``."""
    if groups is None:
        try:
            groups = Path("/proc/self/cgroup").read_text()
        except OSError:
            groups = ""
    return sum(_each(groups, root))


def _each(groups: str, root: Path) -> Iterator[float]:
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            top, key, unit_s = root, "throttled_usec", 1e-6
        elif "cpu" in controllers.split(","):
            top, key, unit_s = root / "cpu", "throttled_time", 1e-9
        else:
            continue
        here = top / path.lstrip("/")
        for group in (here, *here.parents[: len(here.parts) - len(top.parts)]):
            try:
                stat = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
                yield int(stat.get(key, 0)) * unit_s
            except (OSError, ValueError):
                continue  # a container may see nothing of those around it
