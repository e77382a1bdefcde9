"""The status of a job, from made-up facts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from elasticd.core import leader
from elasticd.core.checkpoint_names import folder_name
from elasticd.core.facts import (
    Budget,
    Cause,
    Charge,
    Checkpoint,
    Drained,
    Exit,
    Fact,
    Failure,
    Laggard,
    Leadership,
    Limits,
    Member,
    Node,
    NodeLedger,
    NodeTelemetry,
    Outcome,
    Phase,
    Policy,
    Progress,
    Quarantine,
    Round,
    Saved,
    SlotProgress,
    SlotTime,
    Spec,
    Stragglers,
    Summary,
)
from elasticd.core.ports import Entry, Listing
from elasticd.core.reasons import BelowMemory, BelowMinimum, Wait
from elasticd.core.state_memory import StateMemory
from elasticd.telemetry import describe
from elasticd.telemetry.status import AgentStatus, JobStatus, LocalFacts, Need, Shown, SlotState, job_status
from elasticd.telemetry.steprate import WINDOW_S, StepRates

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
FACTS: dict[str, Shown] = {
    "spec": SPEC,
    "round": LIVE,
    "leader": Leadership("b", "b-1"),
    "nodes/a": node("a"),
    "nodes/b": node("b"),
    "nodes/c": node("c"),
    "progress/b": Progress("b", 3, (SlotProgress(0, 0, 71, 50, NOW), SlotProgress(1, 1, 72, 40, NOW))),
    "budget": Budget((Charge(NOW - 9, "a", 0, True),), 1, (Quarantine("a", 0, NOW + 30, 1),)),
}


SLOW = Laggard("a", 0, 0, 1.6)
HOT = Laggard("a", 0, 0, 0.0, "it is hot", strained=True)
BAD = Laggard("a", 0, 0, 0.0, "its driver reports XID 79")


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        ((), "it keeps failing alone"),
        ((BAD,), "its GPU is unreliable: its driver reports XID 79"),
        (
            (SLOW, HOT),
            "its worker took 60 % longer for a step than its peers; its GPU is strained: it is hot",
        ),
    ],
)
def test_a_slot_that_is_left_out_says_why(faults: tuple[Laggard, ...], why: str) -> None:
    budget = Budget(quarantines=(Quarantine("a", 0, NOW + 30, 1, faults),))
    r = job_status("j", {**FACTS, "budget": budget}, NOW)
    assert [s.why for n in r.nodes for s in n.slots if s.state == "quarantined"] == [why]


@pytest.mark.parametrize(
    ("asked", "why"), [("c-1", "`elasticd drain` asked for it"), ("c-0", "a signal asked for it")]
)
def test_a_node_that_leaves_says_who_asked_for_it(asked: str, why: str) -> None:
    spec = replace(SPEC, drain=(Drained("c", asked),))
    r = job_status("j", {**FACTS, "spec": spec, "nodes/c": replace(node("c"), draining=True)}, NOW)
    assert [(n.state, n.why) for n in r.nodes if n.node == "c"] == [("draining", why)]


def test_a_live_job_is_told_whole() -> None:
    r = job_status("j", FACTS, NOW)
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


@pytest.mark.parametrize(
    ("phase", "states"),
    [
        (Phase.LIVE, ["running", "running", "quarantined", "starting", "idle", "idle"]),
        (Phase.CLOSING, ["stopping", "stopping", "quarantined", "stopping", "idle", "idle"]),
        (Phase.WAITING, ["idle", "idle", "quarantined", "idle", "idle", "idle"]),  # its workers have ended
        (Phase.ENDED, ["quarantined", "idle", "idle", "idle", "idle", "idle"]),
    ],
)
def test_the_phase_says_what_workers_do(phase: Phase, states: list[str]) -> None:
    r = job_status("j", {**FACTS, "round": replace(LIVE, phase=phase, closing=Cause.GREW)}, NOW)
    assert [s.state for n in r.nodes for s in n.slots] == states


LOCAL = LocalFacts(AgentStatus("b", True, "", ()), complete=False)


def test_an_agent_among_others_shows_its_own_node_and_the_nodes_whose_heartbeats_it_follows() -> None:
    known = {k: f for k, f in FACTS.items() if k not in ("nodes/a", "nodes/c", "budget")}
    r = job_status("j", known, NOW, local=LOCAL)
    assert [(n.node, n.state) for n in r.nodes] == [("b", "member")] and r.own is r.nodes[0]
    assert (r.complete, r.budget_left, r.waiting_for) == (False, None, None)
    followed = {**known, "progress/a": Progress("a", 3, (SlotProgress(1, 2, 73, 0, 0.0),))}
    r = job_status("j", followed, NOW, local=LOCAL)
    assert [(n.node, n.state) for n in r.nodes] == [("b", "member"), ("a", "member")]
    assert job_status("j", {}, NOW, local=LOCAL).own is None


def test_what_an_agent_knows_of_its_workers_is_newer_than_what_etcd_knows() -> None:
    local = replace(LOCAL, states={1: SlotState.FAILED}, waits=("waiting for b to come back",))
    r = job_status("j", FACTS, NOW, local=local)
    assert r.own is not None and [(s.state, s.rank) for s in r.own.slots] == [("running", 0), ("failed", 1)]
    assert r.waiting == "waiting for b to come back"


def test_slots_that_the_job_can_never_use_are_not_listed() -> None:
    facts = {**FACTS, "nodes/c": node("c", slots=64)}
    assert [len(n.slots) for n in job_status("j", facts, NOW).nodes] == [2, 2, SPEC.limits.max]
    ready = {**FACTS, "nodes/c": node("c", slots=64, ready=(0, 63))}
    assert [s.slot for s in job_status("j", ready, NOW).nodes[2].slots] == [0, 1, 2, 3, 63]


def test_the_time_of_a_node_is_its_ledgers_and_the_jobs_is_that_of_all() -> None:
    times = {
        f"ledger/{n}": NodeLedger(n, NOW, (SlotTime(0, {"productive": s}),))
        for n, s in (("a", 30.0), ("gone", 10.0))
    }
    r = job_status("j", {**FACTS, **times}, NOW)
    assert r.time is not None and r.time["productive"] == 40.0 and r.goodput == 1.0
    assert [n.time and n.time["productive"] for n in r.nodes] == [None, 30.0, None]
    alone = job_status("j", {**FACTS, **times}, NOW, local=LOCAL)
    assert alone.time is None and alone.goodput is None, "the other nodes' are not known"


TOLD = Progress("b", 3, (SlotProgress(0, 0, 71, 50, NOW - 20), SlotProgress(1, 1, 72, 40, NOW - 20)))
SUMMARY = Summary(
    1,
    NOW - 20,
    {"productive": 70.0, "restarting": 30.0},
    nodes=(
        NodeTelemetry("b", "b-1", progress=TOLD, ledger=NodeLedger("b", NOW - 20, run=1)),
        NodeTelemetry("gone", "gone-1", progress=Progress("gone", 3, (SlotProgress(0, 2, 73, 999, NOW),))),
    ),
)


def test_what_the_leader_has_summed_up_stands_in_for_what_it_does_not_answer() -> None:
    in_etcd = {**{k: f for k, f in FACTS.items() if k != "progress/b"}, "summary": SUMMARY}
    r = job_status("j", in_etcd, NOW)
    assert (r.step, r.steps_per_s) == (50, 0.5), "40 steps in the 80 s up to the summary"
    assert r.time is not None and r.time["productive"] == 70.0 and r.goodput == 0.7
    assert r.nodes[0].slots[0].pid == 71
    newer = Progress("b", 3, (SlotProgress(0, 0, 71, 60, NOW), SlotProgress(1, 1, 72, 60, NOW)))
    assert job_status("j", {**in_etcd, "progress/b": newer}, NOW).step == 60, "the leader has answered"


def test_a_straggler_of_this_round_is_named() -> None:
    found = Stragglers(3, 0.5, (Laggard("b", 1, 1, 1.31),))
    r = job_status("j", {**FACTS, "stragglers": found}, NOW)
    assert json.loads(json.dumps(r.as_json()))["stragglers"] == [
        {"node": "b", "slot": 1, "rank": 1, "ratio": 1.31, "why": "", "strained": False}
    ]
    assert not job_status("j", {**FACTS, "stragglers": replace(found, round=2)}, NOW).stragglers


def test_a_member_whose_lease_ran_out_is_lost() -> None:
    facts = {k: f for k, f in FACTS.items() if k != "nodes/a"}
    assert ("a", "lost") in [(n.node, n.state) for n in job_status("j", facts, NOW).nodes]


def test_a_round_that_was_closing_when_its_last_node_left_waits_for_others() -> None:
    closing = replace(LIVE, phase=Phase.CLOSING, closing=Cause.NODE_DRAINED)
    left = {k: f for k, f in FACTS.items() if not k.startswith("nodes/")}
    assert job_status("j", {**FACTS, "round": closing}, NOW).phase == "closing"
    r = job_status("j", {**left, "round": closing}, NOW)
    assert (r.phase, r.world_size, r.waiting_for) == ("waiting", 0, Need(have=0, need=2))
    assert {s.state for n in r.nodes for s in n.slots} == {"idle"}


def test_a_member_that_came_back_as_another_incarnation_waits() -> None:
    facts = {**FACTS, "nodes/a": node("a", incarnation="a-2")}
    assert ("a", "waiting") in [(n.node, n.state) for n in job_status("j", facts, NOW).nodes]


def test_a_draining_node_is_shown() -> None:
    facts = {**FACTS, "nodes/c": node("c", draining=True)}
    assert ("c", "draining") in [(n.node, n.state) for n in job_status("j", facts, NOW).nodes]


def test_progress_of_an_earlier_round_does_not_count() -> None:
    facts = {**FACTS, "progress/b": Progress("b", 2, (SlotProgress(0, 0, 71, 999, NOW),))}
    assert job_status("j", facts, NOW).step is None


def test_the_step_is_the_jobs_where_its_script_tells_it() -> None:
    told = (SlotProgress(0, 0, 71, 50, NOW, committed=250), SlotProgress(1, 1, 72, 40, NOW, committed=249))
    r = job_status("j", {**FACTS, "progress/b": Progress("b", 3, told)}, NOW)
    assert (r.step, r.steps_per_s) == (250, 0.4), "the pace is that of this round"


def test_the_step_after_a_restart_is_the_jobs_before_anything_is_committed_again() -> None:
    told = (SlotProgress(0, 0, 71, 15, NOW, base=45), SlotProgress(1, 1, 72, 15, NOW, base=45))
    r = job_status("j", {**FACTS, "progress/b": Progress("b", 3, told)}, NOW)
    assert (r.step, r.step_told) == (60, True)


def test_the_status_says_whether_the_script_reports_its_step() -> None:
    r = job_status("j", FACTS, NOW)
    assert (r.step, r.step_told) == (50, False)


def test_a_job_below_its_minimum_says_how_many_workers_it_has_and_needs() -> None:
    facts: dict[str, Fact] = {
        "spec": replace(SPEC, limits=Limits(3, 4)),
        "nodes/a": node("a"),
        "budget": FACTS["budget"],
    }
    for waiting in (None, Round(2, Phase.WAITING, (), "", Cause.NODE_LOST, NOW)):
        r = job_status("j", facts if waiting is None else {**facts, "round": waiting}, NOW)
        assert r.waiting_for == Need(have=1, need=3)
        assert r.waiting.startswith("waiting for 2 more workers: 1 of at least 3")


def _what_the_leader_waits_for(facts: Mapping[str, Fact]) -> Wait:
    view = leader.View()
    for scope in ("spec", "round", "budget", "nodes/", "reports/"):
        entries = tuple(Entry(k, f, 1, 1) for k, f in facts.items() if k.startswith(scope))
        view = leader.see(view, Listing(entries, 1), scope, NOW)
    (wait,) = leader.decide(view, NOW).reasons
    return wait  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("nodes", "inplace", "have"),
    [
        ((node("a"), node("b", draining=True)), False, 1),  # one slot is in quarantine
        ((node("a"), node("c", ready=(1,), released=1)), True, 1),  # other slots have no process that waits
        ((node("b"), node("c", released=1)), False, 2),  # b has not released the last round
    ],
)
def test_a_job_waits_for_what_its_leader_says(nodes: tuple[Node, ...], inplace: bool, have: int) -> None:
    spec = replace(SPEC, limits=Limits(3, 4), inplace=inplace)
    members = (Member("b", "b-1", (0, 1), 0), Member("c", "c-1", (0, 1), 2))
    facts: dict[str, Fact] = {
        "spec": spec,
        "round": Round(1, Phase.WAITING, members, "", Cause.NODE_LOST, NOW - 5),
        "budget": FACTS["budget"],
        **{f"nodes/{n.name}": n for n in nodes},
    }
    wait = _what_the_leader_waits_for(facts)
    assert isinstance(wait, BelowMinimum) and (wait.have, wait.need) == (have, 3)
    r = job_status("j", facts, NOW)
    assert (r.waiting_for, r.waiting) == (Need(have, 3), describe.waiting(wait, NOW))


def test_a_job_without_memory_for_its_sharded_state_waits_as_its_leader_says() -> None:
    nodes = [replace(node(n, slots=1), ready=(0,), memory=24, state=StateMemory(96)) for n in "abc"]
    facts: dict[str, Fact] = {
        "spec": replace(SPEC, limits=Limits(1, 3), inplace=True),
        "round": Round(1, Phase.WAITING, (), "", Cause.NODE_LOST, NOW - 5),
        "budget": Budget(),
        **{f"nodes/{node.name}": node for node in nodes},
    }
    wait = _what_the_leader_waits_for(facts)
    assert wait == BelowMemory(3, 4, 96, 24, 3, NOW - 5 + SPEC.policy.join_timeout_s)
    r = job_status("j", facts, NOW)
    assert (r.waiting_for, r.waiting) == (Need(3, 4), describe.waiting(wait, NOW))


def test_an_ended_job_says_how_and_who_failed() -> None:
    exit = Exit(1, 2, -9, NOW - 5, "it broke\nbadly", "Traceback ...", "/logs/2")
    ended = replace(
        LIVE,
        phase=Phase.ENDED,
        outcome=Outcome.FAILED,
        why="the restart budget is spent",
        failure=Failure("a", exit),
    )
    r = job_status("j", {"spec": SPEC, "round": ended}, NOW)
    assert r.ended and r.world_size == 0 and r.nodes == ()
    assert r.last_failure is not None and r.last_failure.code == -9
    assert "SIGKILL" in r.last_failure.text and r.last_failure.text.endswith(": it broke")
    assert (r.last_failure.log, r.condition, r.why) == ("/logs/2", "failed", "the restart budget is spent")


def test_the_newest_checkpoint_is_told_with_its_age() -> None:
    def of(*saved: Saved) -> dict[str, Fact]:
        return {**FACTS, "checkpoint": Checkpoint("/run", saved)}

    names = {step: folder_name(step, 2, "0000000a", 1) for step in (50, 90)}
    saved = [Saved(names[n], n, 2, 4, NOW - ago, 1_200, "d") for n, ago in ((50, 400.0), (90, 200.0))]
    r = job_status("j", of(*saved), NOW)
    told = json.loads(json.dumps(r.as_json()))["checkpoint"]
    assert told == {"name": names[90], "step": 90, "at": NOW - 200.0, "age_s": 200.0, "size": 1_200}
    assert r.checkpoint is not None and r.checkpoint.text.endswith("newest checkpoint, 3 min 20 s old")
    for facts in (FACTS, of()):
        assert job_status("j", facts, NOW).checkpoint is None


def test_nothing_but_a_node_is_a_job_that_starts() -> None:
    r = job_status("j", {"nodes/a": node("a")}, NOW)
    assert (r.phase, r.limits, r.budget_left) == ("starting", None, None)


# ---------------------------------------------------------------- steps per second


def paces(*beats: tuple[SlotProgress, float], round: int = 1, formed_at: float = 10.0) -> list[float | None]:
    """Return the pace after each heartbeat, read at these times."""
    rates = StepRates()
    return [rates.of("a", beat, round, formed_at, now) for beat, now in beats]


def beat(step: int, at: float, pid: int = 7) -> SlotProgress:
    return SlotProgress(0, 0, pid, step, at)


@pytest.mark.parametrize(
    ("beats", "last"),
    [
        ([(beat(0, 0.0), 12.0)], None),  # no step yet
        ([(beat(10, 20.0), 20.0)], 1.0),  # on average since the round formed
        ([(beat(10, 20.0), 20.0), (beat(30, 25.0), 25.5)], 4.0),  # since the heartbeat before
        ([(beat(10, 20.0), 20.0), (beat(30, 25.0), 25.0), (beat(30, 25.0), 26.0)], 4.0),  # no step since
        ([(beat(10, 20.0), 20.0), (beat(30, 25.0), 25.0), (beat(30, 25.0), 50.0)], 0.04),  # none for long
        ([(beat(10, 20.0), 20.0), (beat(11, 80.0), 80.0), (beat(11, 80.0), 110.0)], 1 / 60),  # long steps
        (
            [(beat(1, 20.0), 20.0), (beat(2, 21.0), 21.0), (beat(62, 31.5), 31.5)],
            60 / 10.5,
        ),  # the last window
        ([(beat(10, 20.0), 20.0), (beat(5, 30.0, pid=8), 30.0)], 0.25),  # another worker
    ],
)
def test_the_pace_of_a_worker(beats: list[tuple[SlotProgress, float]], last: float | None) -> None:
    assert paces(*beats)[-1] == (None if last is None else pytest.approx(last))


def test_the_pace_of_a_process_that_goes_on_begins_anew_with_the_round() -> None:
    rates = StepRates()
    rates.of("a", beat(10, 20.0), 1, 10.0, 20.0)
    assert rates.of("a", beat(40, 45.0), 2, 25.0, 45.0) == 2.0
    assert WINDOW_S == 10.0


# ---------------------------------------------------------------- the JSON form

DOCS = Path(__file__).parents[2] / "docs"


def test_the_schema_is_that_of_the_status() -> None:
    """Programs rely on the fields. Add fields, but never remove one without raising ``SCHEMA``. ``python -m
    tests.telemetry.test_status`` writes the file again."""
    assert json.loads((DOCS / "status.schema.json").read_text()) == schema()


@pytest.mark.parametrize("local", [None, LOCAL])
def test_the_json_form_fits_the_schema_and_can_be_read_back(local: LocalFacts | None) -> None:
    status = job_status("j", FACTS, NOW, local=local)
    told = json.loads(json.dumps(status.as_json()))
    jsonschema.validate(told, schema())
    assert msgspec.convert(told, JobStatus) == status
    assert (told["schema"], told["limits"]["min"], told["limits"]["max"]) == (2, 2, 4)


def test_the_page_about_the_status_names_every_field() -> None:
    page = (DOCS / "status.md").read_text()
    missing = [
        name
        for d in schema()["$defs"].values()
        for name in d.get("properties", ())
        if f"`{name}`" not in page
    ]
    assert missing == []


def schema() -> dict[str, Any]:
    made = msgspec.json.schema(JobStatus)
    made["title"] = "The status of a job, as `elasticd status --json` and an agent's /status tell it"
    for of in made["$defs"].values():
        of.pop("description", None)  # docs/status.md explains the fields
        if "properties" in of:
            of["required"] = list(of["properties"])
            for field in of["properties"].values():
                field.pop("default", None)
    return made


if __name__ == "__main__":
    (DOCS / "status.schema.json").write_text(json.dumps(schema(), indent=1) + "\n")
