"""When agent and warden are killed together, the next agent cleans up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from elasticd.procs.cleanup import make_owned_dir, sweep
from elasticd.procs.linux import started_at

MAKE = """
import sys
from elasticd.procs.cleanup import make_owned_dir
print(make_owned_dir(sys.argv[1], "ELASTICD_PAGE"), flush=True)
sys.stdin.read()
"""


def owner(place: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_owner_left_goes_and_what_a_living_one_has_stays(tmp_path: Path) -> None:
    dead, gone = owner(tmp_path)
    alive, kept = owner(tmp_path)
    stranger = tmp_path / "elasticd-of-somebody-else"
    stranger.mkdir()
    env = {**os.environ, "ELASTICD_PAGE": str(gone / "round1-slot0")}
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert orphan.stdout is not None
        orphan.stdout.readline()  # /proc shows the environment of a process only some time after the start
        dead.kill()
        dead.wait()
        sweep(tmp_path, "ELASTICD_PAGE")
        assert orphan.wait(30) == -9
        assert not gone.exists() and kept.is_dir() and stranger.is_dir()
    finally:
        for process in (dead, alive, orphan):
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream:
                    stream.close()


def test_a_number_that_was_given_again_is_not_its_old_owner(tmp_path: Path) -> None:
    mine = make_owned_dir(str(tmp_path), "ELASTICD_PAGE")
    pid = os.getpid()
    older = tmp_path / mine.name.replace(f"-{pid}-{started_at(pid)}-", f"-{pid}-{started_at(pid) - 1}-")
    older.mkdir()
    sweep(tmp_path, "ELASTICD_PAGE")
    assert mine.is_dir() and not older.exists()
