"""A loop with Accelerate: what it refuses, its evaluations and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.harness import Cluster
from tests.integrations import jobs


@pytest.fixture(autouse=True)
def _needs_accelerate() -> None:
    """Import the library here, not in each process that collects tests."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")


@pytest.mark.parametrize("kind", ["a stream", "a sampler with weights"])
def test_a_loader_whose_order_is_not_known_is_refused(kind: str) -> None:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

    from elasticd.integrations.accelerate import ElasticLoader

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from range(3)

    loader = {
        "a stream": lambda: DataLoader(Stream()),
        "a sampler with weights": lambda: DataLoader(range(3), sampler=WeightedRandomSampler([1, 2, 3], 3)),
    }[kind]()
    with pytest.raises(TypeError, match="is not known ahead"):
        ElasticLoader(Accelerator(cpu=True), loader, "nowhere", every=1)


def test_a_sharded_model_is_not_kept_in_place() -> None:
    from elasticd.integrations.accelerate import refuse_sharded

    accelerator: Any = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=object()))
    with pytest.raises(ValueError, match="leave it out with FSDP"):
        refuse_sharded(accelerator)


@pytest.mark.parametrize("kind", ["in_place", "elastic"])
def test_an_evaluation_in_which_a_worker_dies_comes_again(kind: str, cluster: Cluster) -> None:
    trained = jobs.killed_in_an_evaluation(cluster, "accelerated.py", kind)
    assert trained.outcome == "exact" and trained.ledger.again == 0
    if kind == "in_place":
        committed = int((cluster.folder / "committed").read_text())
        assert committed == len(trained.ledger.made), "what is no step does not count as one"


def test_the_next_save_removes_what_was_never_finished(tmp_path: Path) -> None:
    from elasticd.integrations.checkpoint_folder import CheckpointFolder

    folder = CheckpointFolder(tmp_path, last=2, suffix=".ckpt")
    (tmp_path / "step-3.ckpt.unfinished").touch()
    (tmp_path / "other.unfinished").touch()
    folder.save(4, Path.touch, is_main=True, barrier=lambda: None)
    assert {path.name for path in tmp_path.iterdir()} == {"step-4.ckpt", "other.unfinished"}


def test_a_step_that_is_saved_again_has_a_checkpoint_at_any_instant_but_one(tmp_path: Path) -> None:
    """The folder of before is removed once the new one has its name."""
    from elasticd.integrations import checkpoint_folder

    folder = checkpoint_folder.CheckpointFolder(tmp_path, last=1)
    whole = tmp_path / "step-4"

    def write(path: Path) -> None:
        path.mkdir()
        (path / "model").write_text(f"{len([*tmp_path.iterdir()])}")

    folder.save(4, write, is_main=True, barrier=lambda: None)
    first = (whole / "model").read_text()
    there: list[bool] = []
    remove = checkpoint_folder._remove

    def removes(path: Path) -> None:
        there.append((whole / "model").exists())
        remove(path)

    checkpoint_folder._remove = removes
    try:
        folder.save(4, write, is_main=True, barrier=lambda: None)
    finally:
        checkpoint_folder._remove = remove
    assert there and all(there) and (whole / "model").read_text() != first
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
