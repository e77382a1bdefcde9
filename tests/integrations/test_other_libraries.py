"""Scripts of libraries that elasticd has no module for continue from their own checkpoints."""

from __future__ import annotations

import pytest

from tests.e2e.harness import Cluster
from tests.integrations import jobs
from tests.integrations.jobs import EPOCHS, SAMPLES, Trained

PROGRAMS = {"ignite": "ignited.py", "deepspeed": "deepsped.py", "torchtitan": "titan.py"}
SLOW = pytest.mark.slow


@pytest.fixture
def program(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return PROGRAMS[request.param]


def use_all_samples(trained: Trained) -> bool:
    """Whether each sample was used in each epoch. DistributedSampler may repeat some to fill the last batch
    up."""
    used = [sample for step in trained.ledger.made.values() for sample in step]
    return all(used.count(sample) >= EPOCHS for sample in range(SAMPLES)) and len(used) <= EPOCHS * 54


@pytest.mark.parametrize("program", PROGRAMS, indirect=True)
def test_after_a_kill_it_continues_from_its_newest_checkpoint(program: str, cluster: Cluster) -> None:
    trained = jobs.killed(cluster, program, "plain", str(cluster.folder / "output"), "1", "4", str(EPOCHS))
    assert use_all_samples(trained)
    assert trained.ledger.again <= 3, "steps 4, 5 and 6, after the checkpoint of step 4"
    assert not trained.agent.find("training.began_again")


@SLOW
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
@pytest.mark.parametrize("program", PROGRAMS, indirect=True)
def test_after_a_resize_no_sample_is_lost(program: str, sizes: tuple[int, int], cluster: Cluster) -> None:
    output = str(cluster.folder / "output")
    trained = jobs.resized(cluster, program, "plain", output, "1", "4", str(EPOCHS), sizes=sizes)
    assert use_all_samples(trained)
    assert set(trained.ledger.worlds.values()) == {2, 3}
