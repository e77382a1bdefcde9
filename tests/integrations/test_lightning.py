"""Lightning keeps its place in the data through kills, resizes and stops."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Cluster
from tests.integrations import jobs

pytest.importorskip("lightning", reason="lightning is not installed")
pytestmark = pytest.mark.timeout(600)


def test_after_a_kill_it_continues_from_the_newest_whole_checkpoint(
    clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    cluster = clusters(shared_etcd)
    output = cluster.folder / "output"
    output.mkdir()
    (output / "step-9999.unfinished").touch()
    trained = jobs.killed(cluster, "lightened.py", "elastic", str(output), "1", "4", "2")
    assert trained.outcome == "exact"
    assert trained.ledger.again == 2, "steps 4 and 5, after the checkpoint of step 4"
    assert not trained.agent.find("training.began_again")


@pytest.mark.slow
def test_after_a_resize_no_sample_is_lost_or_repeated(
    clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    cluster = clusters(shared_etcd)
    trained = jobs.resized(
        cluster, "lightened.py", "elastic", str(cluster.folder / "output"), "1", "4", "2", sizes=(3, 2)
    )
    assert trained.outcome == "exact"
    assert set(trained.ledger.worlds.values()) == {2, 3}
    assert trained.ledger.again == 0, "the world is resized right after a checkpoint"
    assert not trained.agent.find("data.batches_changed")


@pytest.mark.slow
def test_a_job_that_is_stopped_saves_a_checkpoint_and_continues_from_it(
    clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    cluster = clusters(shared_etcd)
    arguments = ("lightened.py", "elastic", str(cluster.folder / "output"), "2", "1000", "2")
    assert jobs.stopped(cluster, *arguments) == 128 + signal.SIGTERM
    trained = jobs.ended(cluster, jobs.start(cluster, *arguments))
    assert trained.outcome == "exact"
    assert trained.ledger.again == 0


def test_without_a_loader_it_says_what_to_do(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from elasticd.integrations.lightning import ElasticFit

    trainer = Trainer(
        accelerator="cpu", max_steps=1, callbacks=[ElasticFit(tmp_path, every=1)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"fit with elastic.loader\(loader\)"):
        trainer.fit(BoringModel())
