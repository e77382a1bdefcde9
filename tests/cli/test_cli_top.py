from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.text import Text

from elasticd.cli.complaint import Complaint
from elasticd.cli.report import CheckpointReport, JobReport, Need, NodeReport, SlotReport
from elasticd.cli.top import snapshot, top
from elasticd.core.facts import Laggard, Limits
from elasticd.telemetry import footer
from elasticd.telemetry.snapshot import SlotState

NOW = 1_000_000.0


def report(nodes: int = 40) -> JobReport:
    return JobReport(
        job="train",
        phase="live",
        round=3,
        cause="grew",
        since=NOW - 60,
        world_size=nodes * 8,
        limits=Limits(8, 512),
        asked=None,
        script="job.py",
        step=1234,
        steps_per_s=2.5,
        restarts=1,
        budget_left=9,
        leader="node-00",
        stopping=False,
        waiting_for=None,
        outcome=None,
        why=None,
        last_failure=None,
        nodes=tuple(
            NodeReport(
                f"node-{n:02}",
                "member",
                None,
                None,
                tuple(SlotReport(s, SlotState.RUNNING, n * 8 + s, 99, 1234, 2.5) for s in range(8)),
            )
            for n in range(nodes)
        ),
        time={"productive": 900.0, "restarting": 100.0},
        goodput=0.9,
    )


@pytest.mark.parametrize(("width", "height"), [(200, 50), (80, 24), (40, 10)])
def test_all_nodes_are_shown_as_far_as_the_terminal_has_room(width: int, height: int) -> None:
    lines = footer.render(snapshot(report(), NOW), width, 2 * height, rows_max=height)
    assert len(lines) <= height
    plain = [Text.from_ansi(line) for line in lines]
    assert all(line.cell_len < width for line in plain)
    shown = "\n".join(line.plain for line in plain)
    assert "train" in shown and "world 320" in shown
    assert "node-00/0" in shown and "more slots" in shown
    assert "productive" in shown


@pytest.mark.parametrize(("width", "height", "whole"), [(60, 20, True), (60, 7, False), (200, 7, True)])
def test_what_happened_is_told_to_its_end_where_there_is_room(width: int, height: int, whole: bool) -> None:
    seen = snapshot(replace(report(1), time={"productive": 900.0, "restarting": 60.0, "hung": 40.0}), NOW)
    lines = footer.render(seen, width, 2 * height, rows_max=height, fold=True)
    plain = [Text.from_ansi(line) for line in lines]
    assert len(lines) <= height and all(line.cell_len < width for line in plain)
    told = " ".join(" ".join(line.plain for line in plain).split())
    assert "90.0 % productive of 16 min 40 s of worker time" in told
    assert ("1 min starting and losing workers, 40 s hung" in told) == whole


def test_the_newest_checkpoint_is_shown_with_its_age() -> None:
    saved = CheckpointReport("s", 1200, NOW - 45, 45.0, 1_000)
    shown = "\n".join(footer.render(snapshot(replace(report(1), checkpoint=saved), NOW), 80, 48))
    assert "step 1200 is the newest checkpoint, 45 s old" in Text.from_ansi(shown).plain


def test_who_lags_behind_is_named() -> None:
    lag = (Laggard("node-00", 3, 3, 1.31), Laggard("node-00", 5, 5, 0.0, "its driver reports XID 79"))
    seen = footer.render(snapshot(replace(report(1), stragglers=lag), NOW), 240, 48)
    told = Text.from_ansi("\n".join(seen)).plain
    assert "rank 3 (slot 3 on node-00) takes 31 % longer for a step than its peers; " in told
    assert "; the GPU of rank 5 (slot 5 on node-00) is not to be relied on: its driver reports XID 79" in told


def test_what_the_job_waits_for_and_what_became_of_it_are_shown() -> None:
    waits = snapshot(replace(report(1), waiting_for=Need(6, 8), world_size=0), NOW)
    assert "2 more workers" in "\n".join(footer.render(waits, 80, 48))
    ended = snapshot(replace(report(1), outcome="failed"), NOW)
    assert ended.phase == "failed"


def test_without_a_terminal_it_says_what_to_use_instead() -> None:
    result = CliRunner().invoke(top, ["train"], standalone_mode=False)
    assert isinstance(result.exception, Complaint)
    assert "status --watch" in result.exception.sentence
