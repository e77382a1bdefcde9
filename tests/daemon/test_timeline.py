"""The timeline of a run is read as it was written."""

from __future__ import annotations

from pathlib import Path

from elasticd.core.ledger import Kind, Ledger
from elasticd.daemon.timeline import Timeline
from elasticd.telemetry.events import EventFile, read_timeline
from elasticd.telemetry.metrics import Metrics
from tests.telemetry import madeup


def test_each_line_is_read_with_the_steps_and_the_times_of_the_slots(tmp_path: Path) -> None:
    ledger, metrics = Ledger(), Metrics()
    with EventFile(lambda: tmp_path, lambda folder: None) as file:
        timeline = Timeline(file, madeup.AT)
        for second, status in enumerate((madeup.job(), madeup.job(limits=None, step=None, steps_per_s=None))):
            ledger = ledger.see({0: Kind.PRODUCTIVE, 1: Kind.IDLE}, madeup.AT + 10 * second)
            metrics.add("elasticd_worker_steps_total", 20, 0)
            timeline.note(status, ledger, metrics, last=True)
    lines = read_timeline(tmp_path)
    assert [line["slots"]["0"]["steps"] for line in lines] == [20, 40]
    assert [line["slots"]["0"]["spent"] for line in lines] == [{}, {"productive": 10.0}]
