"""Processes that a worker forks to load its data, after others have died."""

import pytest

from tests.worker.forking import train_with_a_loader, work_with_a_stream
from tests.worker.jobs import NOTHING, STEPS, Accident, reads

OPTIONS = {"loader": {"body": train_with_a_loader, "exact": False}, "stream": {"job": work_with_a_stream}}


@pytest.mark.parametrize("kind", OPTIONS)
def test_data_is_loaded_by_forked_processes_in_each_world_after_a_kill(crew, tmp_path, kind):
    accidents = [NOTHING, Accident("forward", 8), Accident("start", 5), Accident("forward", 2)]
    crew.begin(tmp_path, *accidents, **OPTIONS[kind])
    crew.all_ended()
    assert [hand.status for hand in crew.hands] == [0, -9, -9, -9], (tmp_path / "0.err").read_text()
    assert reads(tmp_path, "0", "committed") == list(range(1, STEPS + 1))
    assert reads(tmp_path, "0", "entered") == [0, 2, 5, 8]
    assert kind == "loader" or reads(tmp_path, "0", "kept") == [[]] * 3, "nothing is left of the last world"
    assert crew.settled == [(1, 4), (2, 3), (3, 2), (4, 1)]
