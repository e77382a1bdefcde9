"""Available memory: of the machine, and within the memory limits of the container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

_RECLAIMED: Final = ("inactive_file", "active_file")  # page cache, which the kernel frees under pressure


def available(groups: str | None = None, root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that can be allocated without swapping and without the out-of-memory killer.
    ``groups``: the content of /proc/self/cgroup, by default of this process; ``root``: where the control
    groups are mounted."""
    if groups is None:
        try:
            groups = Path("/proc/self/cgroup").read_text()  # psutil knows no control groups
        except OSError:
            groups = ""
    of_machine: int = psutil.virtual_memory().available
    return max(0, min([of_machine, *_of_groups(groups, root)]))


def _of_groups(groups: str, root: Path) -> Iterator[int]:
    """Yield the bytes left in each control group (version 1 or 2) that has a limit, parent groups
    included."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, usage, total = root, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top, limit, usage, total = (
                root / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_",
            )
        else:
            continue
        here = top / path.lstrip("/")
        for group in (here, *here.parents[: len(here.parts) - len(top.parts)]):
            try:
                most = (group / limit).read_text().strip()
                if most != "max":
                    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                    freed = sum(int(stat.get(total + kind, 0)) for kind in _RECLAIMED)
                    yield int(most) - int((group / usage).read_text()) + freed
            except (OSError, ValueError):
                continue  # a container may not see its parent groups
