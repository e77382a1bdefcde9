"""A worker that is slower than its peers, in real processes: the steps of all take as long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Cluster

PROGRAM = str(Path(__file__).parent / "programs" / "uneven.py")
pytestmark = pytest.mark.timeout(240)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "gpu", "fsdp2"])
def test_the_rank_that_is_a_fifth_slower_is_named_and_its_slot_left_out_without_charge(
    clusters: Callable[[str | None], Cluster], tmp_path: Path, how: str
) -> None:
    standalone = clusters(None)
    standalone.limits = (2, 3)
    (tmp_path / "slow").touch()
    (a,) = standalone.start(
        "a",
        slots=3,
        options=("--stragglers=drain", "--straggler-window=8"),
        program=(PROGRAM, how, "1", "1.2", str(tmp_path)),
    )
    standalone.until(lambda: a.find("round.formed", cause="slot_drained"), "it goes on without", 180.0)
    (named,) = a.find("worker.straggling")
    assert (named["slot"], named["rank"]) == (1, 1) and 1.1 <= named["ratio"] < 1.5
    (drained,) = a.find("slot.drained")
    assert drained["slot"] == 1
    assert a.find("round.formed", cause="slot_drained")[0]["world_size"] == 2
    (tmp_path / "end").touch()
    assert a.end() == 0, a.said()
    assert not a.find("failure.charged")
    report = standalone.command("report", standalone.job, etcd=False)
    assert "Stragglers and bad slots: 1" in report.out and "longer for a step than its peers" in report.out
