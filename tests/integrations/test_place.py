"""A training with another framework's loop keeps its place in the data through kills, resizes and stops."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.harness import Cluster
from tests.integrations import jobs


@dataclass(frozen=True)
class Framework:
    """``program``: in ``programs``. ``unfinished``: the name of a checkpoint in its folder that was not
    finished; the name ends with a slash for a folder. ``sizes``: of the worlds before and after a resize
    that loses samples of a script as it is."""

    module: str
    program: str
    unfinished: str
    sizes: tuple[int, int]


FRAMEWORKS = {
    framework.module: framework
    for framework in (
        Framework("transformers", "trainer.py", "checkpoint-9999/checkpoint-is-incomplete.txt", (2, 3)),
        Framework("accelerate", "accelerated.py", "step-9999.unfinished/", (3, 2)),
        Framework("lightning", "lightened.py", "step-9999.ckpt.unfinished", (3, 2)),
    )
}
SLOW = pytest.mark.slow


def each(*, slow: tuple[str, ...]) -> pytest.MarkDecorator:
    """Run a test with each framework. Slow frameworks have slow tests."""
    names = [pytest.param(name, marks=[SLOW] if name in slow else []) for name in FRAMEWORKS]
    return pytest.mark.parametrize("framework", names, indirect=True)


@pytest.fixture
def framework(request: pytest.FixtureRequest) -> Framework:
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return FRAMEWORKS[request.param]


@pytest.fixture
def output(cluster: Cluster) -> str:
    return str(cluster.folder / "output")


@each(slow=("accelerate", "lightning"))
def test_after_a_kill_it_continues_from_the_newest_whole_checkpoint(
    framework: Framework, cluster: Cluster, output: str
) -> None:
    unfinished = Path(output, framework.unfinished)
    unfinished.parent.mkdir(parents=True)
    unfinished.mkdir() if framework.unfinished.endswith("/") else unfinished.touch()
    trained = jobs.killed(cluster, framework.program, "elastic", output, "1", "4", "2")
    assert trained.outcome == "exact"
    assert trained.ledger.again == 2, "steps 4 and 5, after the checkpoint of step 4"
    assert not trained.agent.find("training.began_again")


@each(slow=("transformers", "lightning"))
def test_after_a_resize_no_sample_is_lost_or_repeated(
    framework: Framework, cluster: Cluster, output: str
) -> None:
    trained = jobs.resized(cluster, framework.program, "elastic", output, "2", "4", "2", sizes=(2, 3))
    assert trained.outcome == "exact"
    assert set(trained.ledger.worlds.values()) == {2, 3}
    assert trained.ledger.again == 0, "the world is resized right after a checkpoint"
    assert not trained.agent.find("data.batches_changed")


@pytest.mark.parametrize("kind", ["elastic", "in_place"])
@each(slow=("transformers", "accelerate", "lightning"))
def test_a_job_that_is_stopped_saves_a_checkpoint_and_continues_from_it(
    framework: Framework, kind: str, cluster: Cluster, output: str
) -> None:
    arguments = (framework.program, kind, output, "1", "1000", "2")
    assert jobs.stopped(cluster, *arguments) == 128 + signal.SIGTERM
    trained = jobs.ended(cluster, jobs.start(cluster, *arguments))
    assert trained.outcome == "exact"
    assert trained.ledger.again == 0


@each(slow=tuple(FRAMEWORKS))
def test_a_script_as_it_is_does_not_lose_its_place_silently(
    framework: Framework, cluster: Cluster, output: str
) -> None:
    epochs = "30"  # for the agent looks at a round that lasts a second
    trained = jobs.resized(
        cluster, framework.program, "plain", output, "1", "4", epochs, sizes=framework.sizes
    )
    assert trained.outcome != "exact", "otherwise nothing need be said"
    assert trained.agent.find("data.batches_changed")


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["lightning"], indirect=True)
def test_lightning_itself_says_where_a_kill_loses_samples(
    framework: Framework, cluster: Cluster, output: str
) -> None:
    trained = jobs.killed(cluster, framework.program, "plain", output, "1", "4", "2")
    assert trained.outcome != "exact"
    assert "your dataloader is not resumable" in " ".join(trained.agent.said().split())


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["transformers", "accelerate"], indirect=True)
class TestInPlace:
    def test_a_worker_that_is_not_killed_keeps_its_process_and_every_committed_step(
        self, framework: Framework, cluster: Cluster, output: str
    ) -> None:
        trained = jobs.killed(cluster, framework.program, "in_place", output, "1", "1000", "2")
        assert trained.outcome == "exact"
        assert trained.ledger.again <= 1, "the step that was not committed"
        assert trained.processes == 3, "a replacement, and no other process, is started"

    def test_a_resize_repeats_no_step(self, framework: Framework, cluster: Cluster, output: str) -> None:
        trained = jobs.resized(cluster, framework.program, "in_place", output, "2", "1000", "2")
        assert trained.outcome == "exact"
        assert set(trained.ledger.worlds.values()) == {2, 3}
        assert trained.ledger.again == 0
        assert trained.processes == 3
        assert "copied at each commit" not in trained.agent.said(), "only an optimizer changes the weights"


@pytest.mark.parametrize(
    ("framework", "size"),
    [
        ("accelerate", 3),
        ("lightning", 2),  # each process imports Lightning for itself, which takes seconds
        pytest.param("lightning", 3, marks=SLOW),
        pytest.param("transformers", 3, marks=SLOW),
    ],
    indirect=["framework"],
)
def test_in_place_the_survivors_of_a_kill_go_on_in_a_smaller_world(
    framework: Framework, size: int, cluster: Cluster, output: str
) -> None:
    trained = jobs.killed(cluster, framework.program, "in_place", output, "1", "1000", "2", limits=(1, size))
    assert trained.outcome == "exact"
    assert trained.ledger.again <= 1, "the step that was not committed"
    assert {size - 1, size} <= {*trained.ledger.worlds.values()}
    assert trained.processes <= size + 1, f"more than a replacement is started: {trained.agent.said()}"
    assert "copied at each commit" not in trained.agent.said(), "only an optimizer changes the weights"
