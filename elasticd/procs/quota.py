"""How long the processor quota of a control group has stopped this process and others of the group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def throttled_s(groups: str | None = None, root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the seconds so far, in this process's groups and their parents, added up over processors.
    ``groups``: the content of /proc/self/cgroup; ``root``: where the groups are mounted."""
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
                continue  # a container may not see its parent groups
