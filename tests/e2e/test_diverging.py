"""Real runs with losses that are NaN: steps that are repeated, checkpoints that are loaded, and jobs that
end."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticd.telemetry import events, runs
from tests.e2e.harness import Cluster

PROGRAM = str(Path(__file__).parent / "programs" / "diverging.py")
ASTRAY = str(Path(__file__).parent / "programs" / "astray.py")
APART = str(Path(__file__).parent / "programs" / "apart.py")


@pytest.fixture
def standalone(clusters: Callable[[str | None], Cluster]) -> Cluster:
    made = clusters(None)
    made.limits = (1, 1)
    return made


def test_a_job_that_is_to_stop_at_a_loss_that_is_no_number_does_and_its_ledger_knows_what_was_repeated(
    standalone: Cluster, tmp_path: Path
) -> None:
    (a,) = standalone.start("a", options=("--on-nonfinite=stop",), program=(PROGRAM, str(tmp_path)))
    assert a.end() == 6, a.said()
    assert "loss is nan; the job stops (--on-nonfinite=stop)" in a.screen
    assert (tmp_path / "began").read_text().split() == ["0", "30"], "nobody started it again"
    made = [line.split() for line in (tmp_path / "steps").read_text().splitlines()]
    assert [int(step) for _, step, _ in made] == [*range(1, 36), *range(31, 51)]
    (part,) = runs.of_job(standalone.folder / "state" / "elasticd", standalone.job)
    told = events.read([part.folder])
    saved = [e["step"] for e in told if e["event"] == "checkpoint.committed"]
    assert saved[:3] == [10, 20, 30]  # the worker may hear of the last one too late
    ended = told[-1]
    assert (ended["event"], ended["code"], ended["outcome"]) == ("agent.ended", 6, "diverged")
    spent = ended["time"]["a"]
    times = [float(at) for _, _, at in made]
    # Steps 31 to 35 were made twice: the second time after the first step 35, and before step 36.
    assert 0 < spent["replayed"] < times[40] - times[34], spent
    assert spent["checkpoint"] > 0 and spent["productive"] > 0, spent


@pytest.mark.slow
def test_a_job_that_is_to_go_back_at_a_loss_that_is_no_number_goes_on_from_its_checkpoint(
    standalone: Cluster, tmp_path: Path
) -> None:
    (a,) = standalone.start("a", options=("--on-nonfinite=rollback",), program=(PROGRAM, str(tmp_path), "1"))
    assert a.end() == 0, a.said()
    assert (tmp_path / "began").read_text().split() == ["0", "30", "40"], (
        "once for the death, once for the loss"
    )
    made = [int(line.split()[1]) for line in (tmp_path / "steps").read_text().splitlines()]
    assert made == [*range(1, 36), *range(31, 51), *range(41, 61)]
    _, loss = a.find("failure.charged")
    assert loss["message"].endswith(
        "loss is nan; going back to the last checkpoint (--on-nonfinite=rollback)"
    )
    (part,) = runs.of_job(standalone.folder / "state" / "elasticd", standalone.job)
    (ended,) = [e for e in events.read([part.folder]) if e["event"] == "agent.ended"]
    assert (ended["code"], ended["outcome"]) == (0, "succeeded")
    assert ended["time"]["a"]["replayed"] > 0


@pytest.mark.slow
def test_a_job_that_goes_back_to_the_same_loss_again_and_again_ends_in_a_sentence(
    standalone: Cluster, tmp_path: Path
) -> None:
    (a,) = standalone.start("a", options=("--on-nonfinite=rollback",), program=(PROGRAM, str(tmp_path)))
    assert a.end() == 6, a.said()
    assert (tmp_path / "began").read_text().split() == ["0", "30", "40", "40"]
    assert (
        "3 times the training came to a value that is NaN or infinite, and never beyond step 50: going back "
        "to the last checkpoint does not help (--on-nonfinite=rollback)." in a.screen
    )


@pytest.mark.slow
def test_all_workers_go_back_to_the_checkpoint_though_one_alone_has_a_loss_that_is_no_number(
    standalone: Cluster, tmp_path: Path
) -> None:
    """Workers go back that could keep their process, and that have made the step in which the loss of the
    other was NaN."""
    standalone.limits = (2, 2)
    options = ("--on-nonfinite=rollback", "--spares=1")
    (a,) = standalone.start("a", slots=3, options=options, program=(ASTRAY, str(tmp_path)))
    assert a.end() == 0, a.said()
    began = [tuple(map(int, line.split())) for line in (tmp_path / "began").read_text().splitlines()]
    assert [step for _, _, step in began] == [0, 0, 10, 10], began
    assert len({pid for pid, _, _ in began}) == 4, "nobody has what it had in memory"
    (charged,) = a.find("failure.charged")
    assert charged["rank"] == 1 and "going back to the last checkpoint" in charged["message"]
    losses = {float((tmp_path / f"loss-{rank}").read_text()) for rank in (0, 1)}
    assert len(losses) == 1 and math.isfinite(*losses)


def test_going_back_is_refused_in_a_sentence_where_there_are_no_checkpoints(
    standalone: Cluster, tmp_path: Path
) -> None:
    program = tmp_path / "job.py"
    program.write_text("from elasticd import worker\nworker.report(loss=float('inf'))\n")
    (a,) = standalone.start("a", options=("--on-nonfinite=rollback",), program=(str(program),))
    assert a.end() == 6, a.said()
    assert "--on-nonfinite=rollback needs a script that loads worker.Checkpoints" in a.screen


def test_a_job_whose_workers_train_apart_ends_and_says_which_parameter_differs(standalone: Cluster) -> None:
    standalone.limits = (2, 2)
    (a,) = standalone.start("a", slots=2, program=(APART,))
    assert a.end() == 2, a.said()
    assert "head.weight (and 1 more) of worker 1 differs from the other workers'" in a.screen
