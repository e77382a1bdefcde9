"""A worker sees the same environment whether torchrun or elasticd started it."""

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import PROGRAMS, Launcher

# Variables that both set, and whose values differ from run to run, also with torchrun.
PER_RUN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}

# Variables that only elasticd sets.
OURS = {
    f"ELASTICD_{name}"
    for name in (
        "BEGAN",
        "FAILURES",
        "JOB_NAME",
        "LINK",
        "PAGE",
        "ROUND",
        "SAVER",
        "SLOT",
        "UNIT",
        "WORLD_MAX",
    )
}


def described(launcher: Launcher, way: str) -> list[dict[str, Any]]:
    folder = launcher.folder / launcher.name
    folder.mkdir()
    target: list[str | Path] = ["-m", "describe"] if way == "module" else [PROGRAMS / "describe.py"]
    ended = launcher.run(*target, folder, "--flag", "two words", restarts=1)
    assert ended.status == 0, ended.err
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    for one in found:
        assert one["argv"].pop(1) == str(folder)
    return found


@pytest.mark.parametrize("way", ["path", pytest.param("module", marks=pytest.mark.slow)])
def test_a_worker_cannot_tell_who_started_it(launchers: tuple[Launcher, Launcher], way: str) -> None:
    theirs, ours = (described(launcher, way) for launcher in launchers)
    for their, our in zip(theirs, ours, strict=True):
        expected, found = their.pop("environment"), our.pop("environment")
        assert set(found) - set(expected) == OURS
        assert set(expected) - set(found) == set()
        same = set(expected) - PER_RUN
        assert {k: found[k] for k in same} == {k: expected[k] for k in same}
        # Before Python 3.13 a mapping keeps a descriptor open: that of the heartbeat's page.
        our["open files"] = [path for path in our["open files"] if path != found["ELASTICD_PAGE"]]
        assert our == their


def test_each_run_has_an_id_of_its_own_which_outlives_its_restarts(launcher: Launcher) -> None:
    """Scripts name sockets and shared memory by the id. An earlier run may have left some."""
    runs = [launcher.run(PROGRAMS / "run_id.py", restarts=1) for _ in range(2)]
    assert [run.status for run in runs] == [0, 0], runs
    (first,), (second,) = ({*run.out.split()} for run in runs)
    # Two workers are started twice: one may be ended by the other's failure before it prints anything.
    assert all(len(run.out.split()) in (3, 4) for run in runs), runs
    assert first != second
