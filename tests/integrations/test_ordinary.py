"""A DDP script with a loop of its own counts samples, and continues with those that are left."""

from __future__ import annotations

import pytest

from tests.e2e.harness import Cluster
from tests.integrations import jobs

SAMPLES = 48  # a number that each world can share evenly, so that DistributedSampler repeats no sample
ARGUMENTS = ("1", "3", str(jobs.EPOCHS), str(SAMPLES))


@pytest.mark.parametrize("sizes", [(2, 3), pytest.param((3, 2), marks=pytest.mark.slow)])
def test_after_a_resize_in_the_middle_of_an_epoch_no_sample_is_lost_or_repeated(
    cluster: Cluster, sizes: tuple[int, int]
) -> None:
    output = str(cluster.folder / "output")
    trained = jobs.resized(cluster, "ordinary.py", "elastic", output, *ARGUMENTS, sizes=sizes)
    assert trained.ledger.judge(SAMPLES, jobs.EPOCHS) == "exact"
    assert [trained.ledger.worlds[step] for step in (0, 6)] == [*sizes]
    assert trained.ledger.again == 0, "the world is resized right after a snapshot"
    assert not trained.agent.find("data.batches_changed")
