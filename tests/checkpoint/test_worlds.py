"""A checkpoint of one world size and sharding is loaded at any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from elasticd.checkpoint.format.manifest import MANIFEST, METADATA
from elasticd.checkpoint.storage.disk import Disk
from elasticd.checkpoint.storage.reading import open_manifest, verify, whole_in
from elasticd.worker.checkpoints import Checkpoints
from tests.checkpoint.faults import check, commit, filled
from tests.worker.worlds import in_world

PROGRAM = Path(__file__).parent / "programs" / "worlds.py"
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_what_any_world_saved_any_other_resumes_and_so_does_plain_dcp(tmp_path):
    world = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = world.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(world.pid, signal.SIGKILL)
        world.wait()
    assert world.returncode == 0, said
    assert said.count("stage") == 3 + 2 + 3 + 1 + 3 + 2 + 3, said


def loaded_with_reads(folder: str) -> tuple[str, list[str]]:
    """Load the checkpoint. Return where it came from, and the files that were read as a whole."""
    names: list[str] = []
    read = Disk.read

    def noted(store: Disk, name: str) -> bytes:
        names.append(name)
        return read(store, name)

    Disk.read = noted  # type: ignore[method-assign]
    state, checkpoints = filled(0), Checkpoints(folder)
    checkpoints.load(state)
    check(state, 1)
    tier = checkpoints.tier
    checkpoints.close()
    return tier, names


def test_rank_0_reads_the_manifest_for_all_ranks(forker, tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICD_SAVER", forker.saver()[0])
    checkpoints = Checkpoints(tmp_path / "run")
    commit(checkpoints, 1)
    checkpoints.close()
    (tier, first), *others = in_world(3, tmp_path, loaded_with_reads, str(tmp_path / "run"))
    assert tier == "disk" and sum(MANIFEST in name for name in first) == 1
    assert others == [("disk", [])] * 2


def saved_and_loaded(saver: str, folder: str) -> int:
    """Save a state with so little data that one rank writes all of it. Return the step that is loaded."""
    os.environ["ELASTICD_SAVER"] = saver
    checkpoints = Checkpoints(folder)
    assert checkpoints.save({"w": torch.ones(3)}, 1)
    assert checkpoints.wait() and not checkpoints.failed, checkpoints.last_error
    checkpoints.close()
    os.environ["ELASTICD_SAVER"] = ""
    after = Checkpoints(folder)
    step = after.load(state := {"w": torch.zeros(3)})
    assert after.tier == "disk" and state["w"].sum() == 3
    after.close()
    return step


def test_a_rank_that_has_nothing_to_write_makes_no_file(forker, tmp_path):
    assert in_world(3, tmp_path, saved_and_loaded, forker.saver()[0], str(tmp_path / "run")) == [1] * 3
    store = Disk(tmp_path / "run")
    [saved] = whole_in(store)
    manifest = open_manifest(store, saved)
    [shard] = {file.name for file in manifest.files if file.size} - {METADATA}
    assert set(store.files(saved.name)) == {shard, METADATA, MANIFEST}
    assert len(manifest.files) == 3 + 1
    assert [wrong for _, wrong in verify(store, manifest)] == [[], []]
