"""The Linux control groups of this process, in which containers and units have their limits. psutil knows no
control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")


def control_groups(
    controller: str, groups: str | None = None, root: Path = ROOT
) -> Iterator[tuple[int, Path]]:
    """Yield the folder of each control group of this process that has the controller (such as ``memory``),
    and of its parents. With each comes the version of control groups, 1 or 2. A folder may be invisible in a
    container.

    ``groups``: the content of /proc/self/cgroup, by default of this process. ``root``: where the groups are
    mounted.
    """
    if groups is None:
        try:
            groups = Path("/proc/self/cgroup").read_text()
        except OSError:
            groups = ""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # a line without controllers is of version 2
            version, top = 2, root
        elif controller in controllers.split(","):
            version, top = 1, root / controller
        else:
            continue
        here = top / path.lstrip("/")
        for group in (here, *here.parents[: len(here.parts) - len(top.parts)]):
            yield version, group
