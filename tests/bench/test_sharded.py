"""What the measurements of a sharded model are compared with. Also: they print no table in which a time is
missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench.launch import Launched, spawn
from tests.bench.sharded import (
    LAYERS,
    STATE_BYTES,
    NoFigure,
    cost,
    moved_bytes,
    require_figures,
    sent_bytes,
)


def test_after_a_loss_only_bytes_that_their_new_owner_lacks_must_move() -> None:
    assert moved_bytes(2) == {}, "the survivor has the copy of all that is lost"
    whole = sum(rows * row for rows, row in LAYERS) * STATE_BYTES
    moved = moved_bytes(4)
    assert all(sender != receiver and max(sender, receiver) < 3 for sender, receiver in moved)
    assert 0 < sum(moved.values()) < whole


def test_a_commit_sends_each_shard_to_as_many_workers_as_there_are_copies() -> None:
    whole = sum(rows * row for rows, row in LAYERS) * STATE_BYTES
    assert [sent_bytes(3, copies) for copies in (0, 1, 2)] == [0, whole, 2 * whole]


def test_a_row_without_a_time_is_an_error() -> None:
    require_figures({"one": [None, 0.5]})
    with pytest.raises(NoFigure, match="there is no time of 'two'"):
        require_figures({"one": [0.5], "two": [None, None]})


def test_a_job_that_ends_before_its_steps_are_made_is_an_error() -> None:
    def ends(workers: int, steps: Path, log: Path) -> Launched:
        return Launched([spawn([sys.executable, "-c", "raise SystemExit('no such model')"], steps, log)])

    with pytest.raises(NoFigure, match="no such model"):
        cost(ends, 1, 10, within_s=1.0)
