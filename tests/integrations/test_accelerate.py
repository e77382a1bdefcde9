"""A loop with Accelerate keeps its place in the data through kills, resizes and stops."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.e2e.harness import Cluster
from tests.integrations import jobs

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = pytest.mark.timeout(600)


def test_after_a_kill_it_continues_from_the_newest_whole_checkpoint(
    clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    cluster = clusters(shared_etcd)
    output = cluster.folder / "output"
    (output / "step-9999.unfinished").mkdir(parents=True)
    trained = jobs.killed(cluster, "accelerated.py", "elastic", str(output), "1", "4", "2")
    assert trained.outcome == "exact"
    assert trained.ledger.again == 2, "steps 4 and 5, after the checkpoint of step 4"
    assert not trained.agent.find("training.began_again")


@pytest.mark.slow
def test_after_a_resize_no_sample_is_lost_or_repeated(
    clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    cluster = clusters(shared_etcd)
    output = str(cluster.folder / "output")
    trained = jobs.resized(cluster, "accelerated.py", "elastic", output, "2", "4", "2", sizes=(3, 2))
    assert trained.outcome == "exact"
    assert set(trained.ledger.worlds.values()) == {2, 3}
    assert trained.ledger.again == 0, "the world is resized right after a checkpoint"
    assert not trained.agent.find("data.batches_changed")


@pytest.mark.slow
def test_a_job_that_is_stopped_saves_a_checkpoint_and_continues_from_it(
    clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    cluster = clusters(shared_etcd)
    arguments = ("accelerated.py", "elastic", str(cluster.folder / "output"), "1", "1000", "2")
    assert jobs.stopped(cluster, *arguments) == 128 + signal.SIGTERM
    trained = jobs.ended(cluster, jobs.start(cluster, *arguments))
    assert trained.outcome == "exact"
    assert trained.ledger.again == 0


def test_a_loader_whose_order_is_not_known_is_refused() -> None:
    from torch.utils.data import DataLoader, IterableDataset

    from elasticd.integrations.accelerate import ElasticLoader

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from range(3)

    with pytest.raises(TypeError, match="give a map-style dataset"):
        ElasticLoader(accelerate.Accelerator(cpu=True), DataLoader(Stream()), "nowhere", every=1)
