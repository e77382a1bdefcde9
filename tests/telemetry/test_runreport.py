"""The report of a run, from made-up lines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.core.facts import Cause, Exit, Failure, Outcome
from elasticd.core.reasons import FailureCharged, JobEnded, Reason, RoundClosing, RoundFormed
from elasticd.telemetry import events, runreportpage, runreporttext
from elasticd.telemetry.events import ENDED, STARTED, Event, event, of_agent
from elasticd.telemetry.runreport import AgentFiles, RunReport, run_report

FAILURE = Failure("a", Exit(1, 1, -9, 20.0, "<b>boom</b>", log="/logs/1"))


def started(node: str = "a", at: float = 0.0) -> Event:
    return of_agent(STARTED, at, "train", node, "here", script="job.py", slots=2, min=1, max=4, version="1")


def told(at: float, reason: Reason, node: str = "a") -> Event:
    return event(reason, at, "train", node)


def line(at: float, round: int, world: int, *slots: Mapping[str, Any], phase: str = "live") -> dict[str, Any]:
    named = {str(n): dict(s) for n, s in enumerate(slots)}
    limits = {"min": 1, "max": 4}
    return {"at": at, "round": round, "phase": phase, "world_size": world, "limits": limits, "slots": named}


def slot(steps: int, **spent: float) -> dict[str, Any]:
    return {"steps": steps, "spent": spent}


def two_rounds(*more: Event) -> AgentFiles:
    """Write a run of two rounds. The first lives from 2 to 20, the second from 25 to 40. The second costs 5 s
    of each slot to begin."""
    events = [
        started(),
        told(2, RoundFormed(1, 2, 1, Cause.START)),
        told(20, RoundClosing(1, Cause.WORKER_FAILED, failure=FAILURE)),
        told(20.1, FailureCharged(FAILURE, 1, 10)),
        told(25, RoundFormed(2, 2, 1, Cause.WORKER_FAILED)),
        *more,
    ]
    timeline = [
        line(1, 0, 0, slot(0, rendezvous=1), slot(0, rendezvous=1), phase="waiting"),
        line(5, 1, 2, slot(20, rendezvous=2, productive=3), slot(20, rendezvous=2, productive=3)),
        line(19, 1, 2, slot(160, rendezvous=2, productive=17), slot(160, rendezvous=2, productive=17)),
        line(
            26,
            2,
            2,
            slot(170, rendezvous=2, productive=19, restarting=5),
            slot(170, rendezvous=2, productive=19, restarting=5),
        ),
        line(
            40,
            2,
            2,
            slot(310, rendezvous=2, productive=33, restarting=5),
            slot(300, rendezvous=2, productive=33, restarting=5),
        ),
    ]
    return AgentFiles(events, timeline)


def ended(time: dict[str, dict[str, float]]) -> Event:
    return of_agent(ENDED, 40, "train", "a", "it ended.", code=0, outcome="succeeded", time=time)


def test_what_was_lost_is_told_by_the_round_whose_beginning_cost_it() -> None:
    found = run_report([two_rounds(told(39, JobEnded(Outcome.SUCCEEDED, "every worker finished")))])
    assert [(r.number, r.began_at, r.ended_at, r.world) for r in found.rounds] == [
        (1, 2, 20, 2),
        (2, 25, 40, 2),
    ]
    assert [r.lost_s for r in found.rounds] == [4.0, 10.0]
    assert sum(r.lost_s or 0 for r in found.rounds) == sum(found.spent.values()) - found.spent["productive"]
    assert found.rounds[0].ended_by == "a worker failed: rank 1 on a"
    assert [f.cost_s for f in found.failures] == [10.0]
    assert found.goodput == pytest.approx(66 / 80)
    assert found.outcome == "the job finished: every worker finished" and found.went_well


def test_what_is_lost_while_a_round_closes_is_the_cost_of_why_it_closes_and_told_once() -> None:
    part, other = two_rounds(), replace(FAILURE, exit=replace(FAILURE.exit, slot=0, rank=0))
    closing = slot(165, rendezvous=2, productive=17.5, restarting=4)
    part.timeline.insert(-2, line(24, 1, 0, closing, closing, phase="closing"))
    part.events.append(told(20.2, FailureCharged(other, 2, 10)))
    found = run_report([part])
    assert [r.lost_s for r in found.rounds] == [4.0, 10.0]
    assert [(f.cost_s, f.shared) for f in found.failures] == [(10.0, False), (10.0, True)]
    assert page(found).count("<td>10.0 s") == 3, "of the kind, of the round, of the first of two failures"
    assert page(found).count("<td>counted above") == 1


def test_steps_and_their_times_are_told_by_slot() -> None:
    found = run_report([two_rounds()])
    assert [(s.slot, s.steps) for s in found.slots] == [(0, 310), (1, 300)]
    assert found.slots[0].step_s == pytest.approx(33 / 310)
    (first, _) = found.step_times
    known = [value for _, value in first.points if value is not None]
    assert known and all(value == pytest.approx(0.1, rel=0.4) for value in known)


def test_the_size_of_the_world_is_told_over_time() -> None:
    assert run_report([two_rounds()]).world.points == ((1.0, 0.0), (5.0, 2.0), (40.0, 2.0))


def test_an_agent_that_does_not_know_the_round_yet_adds_no_world_size() -> None:
    late = AgentFiles(
        [started("b", 28.0)], [line(29, 0, 0, phase="starting"), line(30, 1, 2), line(31, 2, 2)]
    )
    assert run_report([two_rounds(), late]).world.points == ((1.0, 0.0), (5.0, 2.0), (40.0, 2.0))


def test_a_lost_node_is_a_failure_with_its_cost_though_no_charge_is_made() -> None:
    part = two_rounds()
    lost = told(20, RoundClosing(1, Cause.NODE_LOST, nodes=("b",)))
    part.events[2:4] = [lost, {**lost, "node": "b"}]
    found = run_report([part])
    assert [(f.event["text"], f.cost_s) for f in found.failures] == [
        ("round 1 ends: a node was lost (b)", 10.0)
    ]


def test_a_run_that_crashed_is_told_as_far_as_it_went() -> None:
    found = run_report([two_rounds()])
    assert not found.went_well and "the agent on a died unexpectedly" in found.outcome
    assert found.ended_at == 40 and found.agents[0].fate == "died unexpectedly"
    assert any("died unexpectedly" in text for text in runreporttext.lines(found))
    still = run_report([AgentFiles(two_rounds().events, two_rounds().timeline, alive=True)])
    assert still.outcome == "the job still runs" and still.agents[0].fate == "still runs"


def test_a_run_without_a_single_number_is_told_all_the_same() -> None:
    found = run_report([AgentFiles([started(), told(2, RoundFormed(1, 2, 1, Cause.START))], [])])
    assert len(found.rounds) == 1 and found.goodput is None
    assert "nothing was measured" in runreportpage.render(found, "1", 0)
    with pytest.raises(ValueError, match="no agent has written"):
        run_report([AgentFiles([], [])])


def test_what_other_nodes_told_at_the_end_is_in_the_sums() -> None:
    time = {"a": {"productive": 66.0}, "b": {"productive": 14.0, "hung": 20.0}}
    found = run_report([two_rounds(ended(time))])
    assert found.spent["productive"] == 80 and found.spent["hung"] == 20 and found.unseen == ("b",)
    assert any("Of b the report has only the sums" in text for text in runreportpage.notes(found))


def test_an_agent_that_came_back_counts_its_steps_on() -> None:
    part = two_rounds()
    again = AgentFiles(
        [started(at=41)], [line(44, 3, 1, slot(10, productive=34)), line(50, 3, 1, slot(70, productive=40))]
    )
    found = run_report([part, again])
    assert found.slots[0].steps == 310 + 70 and found.slots[0].spent == {"productive": 40.0}
    assert len(found.agents) == 2


def test_what_all_nodes_noted_is_told_once() -> None:
    hung = {"event": "workers.hung", "at": 30, "round": 2, "conclusion": "rank 1", "text": "t", "node": "a"}
    found = run_report([two_rounds(hung), AgentFiles([{**hung, "node": "b"}], [])])
    assert len(found.hangs) == 1


def page(found: RunReport) -> str:
    return runreportpage.render(found, "1.2", 50.0)


def test_the_page_needs_nothing_but_itself_and_shows_no_markup_of_others() -> None:
    text = page(run_report([two_rounds()]))
    assert not re.search(r"(src|href)=|<script|@import|url\(|https?:", text)
    assert "<b>boom</b>" not in text and "&lt;b&gt;boom&lt;/b&gt;" in text
    assert text.count("<svg class=plot") == 3 and "job.py" in text


def test_the_page_of_very_many_rounds_leaves_some_out_and_says_so() -> None:
    events = [started(), *(told(n, RoundFormed(n, 2, 1, Cause.GREW)) for n in range(1, 1001))]
    text = page(run_report([AgentFiles(events, [])]))
    assert "800 more in between are left out" in text and len(text) < 100_000


def test_the_text_says_it_in_a_screenful() -> None:
    found = run_report([two_rounds(ended({}))])
    lines = runreporttext.lines(found)
    assert len(lines) < 40 and lines[0] == "train: it ended"
    assert any(re.search(r"starting and losing workers +10.0 s", text) for text in lines)


JUNK = (None, True, -1, 1e20, 2**70, "", "x", [], {}, ["a"], {"a": 1})


@settings(max_examples=300)
@given(st.data())
def test_a_line_that_is_damaged_is_left_out_and_the_run_is_told_all_the_same(data: st.DataObject) -> None:
    run = two_rounds(ended({"a": {"productive": 1.0}}))
    lines: list[Any] = data.draw(st.sampled_from([run.events, run.timeline]))
    place = lines[data.draw(st.integers(0, len(lines) - 1))]
    while True:
        name = data.draw(st.sampled_from(sorted(place)))
        if not (isinstance(place[name], dict) and place[name] and data.draw(st.booleans())):
            break
        place = place[name]
    place[name] = data.draw(st.sampled_from(JUNK))
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file, its in ((events.FILE, run.events), (events.TIMELINE, run.timeline)):
            (folder / file).write_text("".join(f"{json.dumps(line)}\n" for line in its))
        read = AgentFiles(events.read([folder]), events.read_timeline(folder))
    assert len(read.events) + len(read.timeline) >= len(run.events) + len(run.timeline) - 1
    assert runreporttext.lines(run_report([read]))
