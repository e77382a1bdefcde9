"""Workers keep their process, their CUDA context and their tensors on the GPU, while NCCL's communicators are
aborted and made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticd.channel.worker_messages import Source
from tests.gpu.jobs import STEPS, alone, alone_consistently, shard, work, work_consistently
from tests.worker.crew import Crew, Hand
from tests.worker.jobs import Gate, reads


def has_ended_well(crew: Crew, folder: Path, name: str, hand: Hand) -> None:
    crew.until(lambda: hand.status is not None)
    assert hand.status == 0, (folder / f"{name}.err").read_text()


def outcome_of(job: Callable[[str, str], None], folder: Path) -> Any:
    """Return the result of one worker that loses no peer."""
    folder.mkdir()
    with Crew() as crew:
        has_ended_well(crew, folder, "alone", crew.start(job, str(folder)))
    return reads(folder, "alone", "outcome")


def test_a_survivor_alone_in_a_sum_on_the_gpu_goes_on_at_once_and_takes_in_a_newcomer(
    crew: Crew, tmp_path: Path
) -> None:
    expected = outcome_of(alone, tmp_path / "alone")
    gate = Gate(tmp_path / "gate")
    stays = crew.start(work, str(tmp_path), "0", waits_at=6)
    goes = crew.start(work, str(tmp_path), "1", dies_at=3)
    crew.form(stays, goes)
    crew.until(lambda: len(crew.settled) == 2)
    assert goes.status == -9 and crew.settled[1] == (2, 1)
    gate.until_somebody_waits()
    comes = crew.start(work, str(tmp_path), "2")
    crew.grow(comes)
    gate.open()
    for name, hand in (("0", stays), ("2", comes)):
        has_ended_well(crew, tmp_path, name, hand)
        assert reads(tmp_path, name, "outcome") == expected, "bit by bit"
    assert reads(tmp_path, "0", "committed") == list(range(1, STEPS + 1)), "each step once"
    assert reads(tmp_path, "0", "world") == [2, 1, 2]
    assert reads(tmp_path, "2", "entered") == [7], "what it needs is in the survivor's memory"
    assert set(reads(tmp_path, "0", "backend")) == {"ProcessGroupNCCL"}
    assert reads(tmp_path, "0", "there") == [1.0], "in the same CUDA context"


@pytest.mark.parametrize(
    ("gloo", "built_on"),
    [(True, "cuda"), (False, "cuda"), (False, "cpu")],
    ids=["gloo", "nccl", "from the CPU"],
)
def test_a_survivor_of_a_sharded_model_goes_on_with_the_lost_shard_and_takes_in_a_newcomer(
    crew: Crew, tmp_path: Path, gloo: bool, built_on: str
) -> None:
    """The losses and the weights are those of one worker that has the whole model, within rounding."""
    expected = outcome_of(alone, tmp_path / "alone")
    losses = reads(tmp_path / "alone", "alone", "losses")
    more = {"gloo": gloo, "built_on": built_on, "shard": shard}
    gate = Gate(tmp_path / "gate")
    stays = crew.start(work, str(tmp_path), "0", waits_at=6, **more)
    goes = crew.start(work, str(tmp_path), "1", dies_at=3, **more)
    crew.form(stays, goes)
    crew.until(lambda: len(crew.settled) == 2)
    assert goes.status == -9 and crew.settled[1] == (2, 1)
    gate.until_somebody_waits()
    comes = crew.start(work, str(tmp_path), "2", **more)
    crew.grow(comes)
    gate.open()
    for name, hand in (("0", stays), ("2", comes)):
        has_ended_well(crew, tmp_path, name, hand)
        for step, loss in reads(tmp_path, name, "losses"):
            assert [step, loss] == pytest.approx(losses[step], rel=1e-4)
        [weights] = reads(tmp_path, name, "outcome")
        for mine, whole in zip(weights, expected[0], strict=True):
            assert mine == pytest.approx(whole, rel=1e-4, abs=1e-5)
    assert reads(tmp_path, "0", "committed") == list(range(1, STEPS + 1)), "each step once"
    assert reads(tmp_path, "0", "world") == [2, 1, 2]
    assert [told.source for told in stays.entered] == [Source.SCRIPT, Source.COPY, Source.SURVIVOR]
    assert reads(tmp_path, "0", "there") == [1.0], "in the same CUDA context"
    assert set(reads(tmp_path, "0", "backend")) == {"ProcessGroupGloo" if gloo else "ProcessGroupNCCL"}


def test_a_communicator_of_one_is_made_anew_as_often_as_need_be(crew: Crew, tmp_path: Path) -> None:
    expected = outcome_of(alone, tmp_path / "alone")
    gate = Gate(tmp_path / "gate")
    hand = crew.start(work, str(tmp_path), "0", waits_at=2)
    crew.form(hand)
    gate.until_somebody_waits()
    crew.close()  # as after a failure: operations under way are aborted
    gate.open()
    has_ended_well(crew, tmp_path, "0", hand)
    assert crew.settled == [(1, 1), (2, 1)]
    assert reads(tmp_path, "0", "committed") == list(range(1, STEPS + 1))
    assert reads(tmp_path, "0", "outcome") == expected


def test_consistent_mode_comes_to_the_same_on_a_gpu_with_one_rank_and_with_two(
    crew: Crew, tmp_path: Path
) -> None:
    expected = outcome_of(alone_consistently, tmp_path / "alone")
    pair = [crew.start(work_consistently, str(tmp_path), str(n)) for n in range(2)]
    crew.form(*pair)
    for n, hand in enumerate(pair):
        has_ended_well(crew, tmp_path, str(n), hand)
        assert reads(tmp_path, str(n), "outcome") == expected, "bit by bit"
