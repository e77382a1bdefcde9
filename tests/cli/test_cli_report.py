"""What ``elasticd status`` makes of the facts in etcd."""

from __future__ import annotations

import json
from dataclasses import fields, replace

from elasticd.cli.fitting import fitted
from elasticd.cli.report import JobReport, Need, StepRate, as_text, report
from elasticd.core.facts import (
    Budget,
    Cause,
    Charge,
    Checkpoint,
    Exit,
    Fact,
    Failure,
    Laggard,
    Leadership,
    Limits,
    Member,
    Node,
    Outcome,
    Phase,
    Policy,
    Progress,
    Quarantine,
    Round,
    Saved,
    SlotProgress,
    Spec,
    Stragglers,
)
from elasticd.core.naming import folder_name
from elasticd.telemetry.snapshot import SlotState

NOW = 1000.0


def node(name: str, slots: int = 2, **more: object) -> Node:
    basic = Node(name, f"{name}-1", f"10.0.0.{ord(name[-1])}", tuple(range(slots)), 0, 1, 2, "host")
    return replace(basic, **more)  # type: ignore[arg-type]


SPEC = Spec(Limits(2, 8), Limits(2, 4), "job.py", "f", Policy(restarts_max=5))
LIVE = Round(
    3,
    Phase.LIVE,
    (Member("b", "b-1", (0, 1), 0), Member("a", "a-1", (1,), 2)),
    "x:1",
    Cause.NODE_LOST,
    NOW - 100,
    restarts=1,
)
FACTS: dict[str, Fact] = {
    "spec": SPEC,
    "round": LIVE,
    "leader": Leadership("b", "b-1"),
    "nodes/a": node("a"),
    "nodes/b": node("b"),
    "nodes/c": node("c"),
    "progress/b": Progress("b", 3, (SlotProgress(0, 0, 71, 50, NOW), SlotProgress(1, 1, 72, 40, NOW))),
    "budget": Budget((Charge(NOW - 9, "a", 0, True),), 1, (Quarantine("a", 0, NOW + 30, 1),)),
}


def test_a_live_job_is_told_whole() -> None:
    r = report("j", FACTS, NOW)
    assert (r.phase, r.round, r.world_size, r.limits, r.asked) == ("live", 3, 3, Limits(2, 4), Limits(2, 8))
    assert (r.step, r.steps_per_s, r.leader, r.cause) == (50, 0.4, "b", "node_lost")
    assert (r.restarts, r.budget_left) == (1, 4)
    assert [(n.node, n.state) for n in r.nodes] == [("b", "member"), ("a", "member"), ("c", "waiting")]
    assert [(s.state, s.rank) for n in r.nodes for s in n.slots] == [
        ("running", 0),
        ("running", 1),
        ("quarantined", None),
        ("starting", 2),
        ("idle", None),
        ("idle", None),
    ]
    assert r.last_failure is not None and (r.last_failure.node, r.last_failure.slot) == ("a", 0)
    assert r.waiting_for is None and not r.ended


def test_a_slot_is_said_to_be_in_the_state_that_the_live_view_says() -> None:
    def first_slot(facts: dict[str, Fact]) -> str:
        lines = as_text(report("j", facts, NOW), NOW)
        return next(line.strip() for line in lines if line.strip().startswith("slot 0"))

    assert first_slot(FACTS) == "slot 0  rank 0  running  step 50  0.50/s  pid 71"
    closing = replace(LIVE, phase=Phase.CLOSING, closing=Cause.GREW)
    assert first_slot({**FACTS, "round": closing}) == "slot 0  rank 0  stopping  step 50  pid 71"
    waiting = replace(LIVE, phase=Phase.WAITING)  # below its minimum: its members' workers are gone
    assert first_slot({**FACTS, "round": waiting}) == "slot 0  rank 0  idle  step 50"
    ended = replace(LIVE, phase=Phase.ENDED, outcome=Outcome.SUCCEEDED)
    states = {s.state for n in report("j", {**FACTS, "round": ended}, NOW).nodes for s in n.slots}
    assert states == {SlotState.IDLE, SlotState.QUARANTINED}


def test_who_lags_behind_in_this_round_is_named() -> None:
    found = Stragglers(3, 0.5, (Laggard("b", 1, 1, 1.31),))
    r = report("j", {**FACTS, "stragglers": found}, NOW)
    assert json.loads(json.dumps(r.as_json()))["stragglers"] == [
        {"node": "b", "slot": 1, "rank": 1, "ratio": 1.31, "why": ""}
    ]
    assert "  lags      rank 1 (slot 1 on b) takes 31 % longer for a step than its peers" in as_text(r, NOW)
    assert not report("j", {**FACTS, "stragglers": replace(found, round=2)}, NOW).stragglers


def test_a_member_whose_lease_ran_out_is_lost() -> None:
    facts = {k: f for k, f in FACTS.items() if k != "nodes/a"}
    assert ("a", "lost") in [(n.node, n.state) for n in report("j", facts, NOW).nodes]


def test_a_round_that_was_closing_when_its_last_node_left_waits_for_others() -> None:
    closing = replace(LIVE, phase=Phase.CLOSING, closing=Cause.NODE_DRAINED)
    left = {k: f for k, f in FACTS.items() if not k.startswith("nodes/")}
    assert report("j", {**FACTS, "round": closing}, NOW).phase == "closing"
    r = report("j", {**left, "round": closing}, NOW)
    assert (r.phase, r.world_size, r.waiting_for) == ("waiting", 0, Need(have=0, need=2))
    assert {s.state for n in r.nodes for s in n.slots} == {"idle"}


def test_a_member_that_came_back_as_somebody_new_waits() -> None:
    facts = {**FACTS, "nodes/a": node("a", incarnation="a-2")}
    assert ("a", "waiting") in [(n.node, n.state) for n in report("j", facts, NOW).nodes]


def test_a_draining_node_is_told() -> None:
    facts = {**FACTS, "nodes/c": node("c", draining=True)}
    assert ("c", "draining") in [(n.node, n.state) for n in report("j", facts, NOW).nodes]


def test_progress_of_an_earlier_round_does_not_count() -> None:
    facts = {**FACTS, "progress/b": Progress("b", 2, (SlotProgress(0, 0, 71, 999, NOW),))}
    assert report("j", facts, NOW).step is None


def test_the_step_is_the_jobs_where_its_script_tells_it() -> None:
    told = (SlotProgress(0, 0, 71, 50, NOW, committed=250), SlotProgress(1, 1, 72, 40, NOW, committed=249))
    r = report("j", {**FACTS, "progress/b": Progress("b", 3, told)}, NOW)
    assert (r.step, r.steps_per_s) == (250, 0.4), "the pace is that of this round"


def test_the_step_after_a_restart_is_the_jobs_before_anything_is_committed_again() -> None:
    told = (SlotProgress(0, 0, 71, 15, NOW, base=45), SlotProgress(1, 1, 72, 15, NOW, base=45))
    r = report("j", {**FACTS, "progress/b": Progress("b", 3, told)}, NOW)
    assert (r.step, r.step_told) == (60, True) and ", step 60," in as_text(r, NOW)[0]


def test_the_step_of_a_script_that_does_not_tell_it_is_said_to_be_counted() -> None:
    r = report("j", FACTS, NOW)
    assert (r.step, r.step_told) == (50, False) and ", step 50 of this round," in as_text(r, NOW)[0]


def test_a_job_below_its_minimum_says_how_many_workers_it_has_and_needs() -> None:
    facts: dict[str, Fact] = {
        "spec": replace(SPEC, limits=Limits(3, 4)),
        "nodes/a": node("a"),
        "budget": FACTS["budget"],
    }
    for waiting in (None, Round(2, Phase.WAITING, (), "", Cause.NODE_LOST, NOW)):
        r = report("j", facts if waiting is None else {**facts, "round": waiting}, NOW)
        assert r.waiting_for == Need(have=1, need=3)
        assert "2 more workers: 1 of at least 3" in "\n".join(as_text(r, NOW))


def test_an_ended_job_says_how_and_who_failed() -> None:
    exit = Exit(1, 2, -9, NOW - 5, "it broke\nbadly", "Traceback ...", "/logs/2")
    ended = replace(
        LIVE,
        phase=Phase.ENDED,
        outcome=Outcome.FAILED,
        why="the restart budget is spent",
        failure=Failure("a", exit),
    )
    r = report("j", {"spec": SPEC, "round": ended}, NOW)
    assert r.ended and r.world_size == 0 and r.nodes == ()
    assert r.last_failure is not None and r.last_failure.code == -9
    text = "\n".join(as_text(r, NOW))
    assert (
        "SIGKILL" in text
        and "it broke" in text
        and "/logs/2" in text
        and "the restart budget is spent" in text
    )


def test_the_newest_checkpoint_is_told_with_its_age() -> None:
    def of(*saved: Saved) -> dict[str, Fact]:
        return {**FACTS, "checkpoint": Checkpoint("/run", saved)}

    names = {step: folder_name(step, 2, "0000000a", 1) for step in (50, 90)}
    saved = [Saved(names[n], n, 2, 4, NOW - ago, 1_200, "d") for n, ago in ((50, 400.0), (90, 200.0))]
    r = report("j", of(*saved), NOW)
    told = json.loads(json.dumps(r.as_json()))["checkpoint"]
    assert told == {"name": names[90], "step": 90, "at": NOW - 200.0, "age_s": 200.0, "size": 1_200}
    assert "  saved     step 90 is the newest checkpoint, 3 min 20 s old" in as_text(r, NOW)
    for facts in (FACTS, of()):
        r = report("j", facts, NOW)
        assert r.checkpoint is None and "checkpoint" not in "\n".join(as_text(r, NOW))


def test_nothing_but_a_node_is_a_job_that_starts() -> None:
    r = report("j", {"nodes/a": node("a")}, NOW)
    assert (r.phase, r.limits, r.budget_left) == ("starting", None, None)
    assert as_text(r, NOW)


def test_the_pace_is_that_between_two_heartbeats_once_there_were_two() -> None:
    pace = StepRate()
    assert pace.of("a", SlotProgress(0, 0, 7, 0, 0.0), 10.0) is None  # no heartbeat yet
    assert pace.of("a", SlotProgress(0, 0, 7, 10, 20.0), 10.0) == 1.0  # on average
    assert pace.of("a", SlotProgress(0, 0, 7, 30, 25.0), 10.0) == 4.0
    assert pace.of("a", SlotProgress(0, 0, 7, 30, 26.0), 10.0) == 4.0  # no step since
    assert pace.of("a", SlotProgress(0, 0, 8, 5, 30.0), 25.0) == 1.0  # another worker


def test_the_json_form_keeps_its_fields() -> None:
    """Programs rely on these: add to them, never take away (else raise ``schema``)."""
    told = json.loads(json.dumps(report("j", FACTS, NOW).as_json()))
    assert told["schema"] == 1
    assert set(told) == {f.name for f in fields(JobReport)}
    assert set(told) >= {
        "job", "phase", "round", "cause", "since", "world_size", "limits", "asked", "script", "step",
        "steps_per_s", "restarts", "budget_left", "leader", "stopping", "waiting_for", "outcome", "why",
        "last_failure", "nodes",
    }  # fmt: skip
    assert set(told["nodes"][0]) >= {"node", "state", "address", "host", "slots"}
    assert set(told["nodes"][0]["slots"][0]) >= {
        "slot", "state", "rank", "pid", "step", "steps_per_s", "quarantined_until",
    }  # fmt: skip
    assert told["limits"] == {"min": 2, "max": 4}


def test_on_a_narrow_terminal_lines_are_broken_between_words_and_stay_below_what_they_tell_of() -> None:
    lines = [
        "train: round 1 live for 30 s, world 4 (2..6), step 591",
        "  goodput   83.3 % productive of 2 min of worker time; lost: 18 s forming worlds",
        "  its log   /home/somebody/.local/state/elasticd/logs/train_1/attempt_0/1 (on a)",
        "    slot 0  rank 0  running  step 589  19.77/s  pid 25595",
    ]
    assert fitted(lines, 40) == [
        "train: round 1 live for 30 s, world 4",
        "  (2..6), step 591",
        "  goodput   83.3 % productive of 2 min",
        "            of worker time; lost: 18 s",
        "            forming worlds",
        "  its log",
        "            /home/somebody/.local/state/elasticd/logs/train_1/attempt_0/1",
        "            (on a)",
        "    slot 0  rank 0  running  step 589",
        "      19.77/s  pid 25595",
    ]
    assert fitted(["", *lines], 160) == ["", *lines]
