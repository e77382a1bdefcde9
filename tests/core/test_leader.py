"""What the leader decides, transition by transition of the diagram in ``core.leader``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.core import leader, seating
from elasticd.core.age import Age
from elasticd.core.facts import (
    Budget,
    Cause,
    Charge,
    Drained,
    Exit,
    Fact,
    Failure,
    Laggard,
    Limits,
    Node,
    Outcome,
    Phase,
    Policy,
    Quarantine,
    RankRange,
    Report,
    Resume,
    RollbackCount,
    Round,
    Spec,
    Stragglers,
)
from elasticd.core.leader import Plan, View, decide, forming
from elasticd.core.leader.roll import Registered
from elasticd.core.persistent_map import PersistentMap
from elasticd.core.ports import Changes, Delete, Entry, Listing, Put, Unchanged
from elasticd.core.reasons import (
    AwaitingRelease,
    FailureCharged,
    RoundClosing,
    RoundFormed,
)
from elasticd.core.round_parts import PartSizes
from tests.core.build import (
    NOW,
    ROUND_REVISION,
    SPEC_REVISION,
    charges,
    exit,
    next_round,
    node,
    not_listed,
    report,
    round,
    spec,
    view,
    written,
)
from tests.core.by_hand import put

POLICY = Policy(settle_s=1.0, grow_cooldown_s=30.0, join_timeout_s=600.0)
ROUND_AS_SEEN = Unchanged("round", ROUND_REVISION)


def waiting(number: int = 0, *, since: float = NOW - 5) -> Round:
    return round(number, {}, Phase.WAITING, since=since)


def sizes(round: Round) -> dict[str, int]:
    return {m.node: len(m.slots) for m in round.members}


# ---------------------------------------------------------------- before anything is known


@pytest.mark.parametrize("unknown", ["spec", "round", "budget", "nodes", "reports"])
def test_nothing_is_decided_on_half_a_view(unknown: str) -> None:
    whole = view(spec(), waiting(), [node("a", 8)])
    assert decide(whole, NOW).writes
    lacking: dict[str, Any] = {unknown: None}
    half = not_listed(whole, unknown) if unknown in ("round", "budget") else replace(whole, **lacking)
    assert decide(half, NOW) == Plan()


# ---------------------------------------------------------------- a job begins, or begins again


def test_an_ended_job_that_is_run_again_keeps_its_number_and_nothing_else() -> None:
    ended = round(9, {"a": 2}, Phase.ENDED, outcome=Outcome.FAILED, restarts=3, failure=Failure("a", exit()))
    plan = decide(view(spec(), ended, [node("a")], budget=charges(("a", 0))), NOW)
    assert next_round(plan) == Round(9, Phase.WAITING, (), "", Cause.START, NOW)
    assert written(plan, "budget") == Budget()
    assert {Delete("reports/", prefix=True), Delete("summary")} <= set(plan.writes)


def test_the_old_spec_and_the_end_of_its_job_are_not_a_new_job() -> None:
    """The two keys are watched separately. The guard makes etcd refuse a write that would start the job
    again."""
    ended = round(9, {"a": 2}, Phase.ENDED, outcome=Outcome.SUCCEEDED)
    plan = decide(view(spec(), ended), NOW)
    assert Unchanged("spec", SPEC_REVISION) in plan.guards
    assert ROUND_AS_SEEN in plan.guards


# ---------------------------------------------------------------- waiting -> live


def test_a_node_that_may_not_take_part_does_not_prolong_the_settling() -> None:
    starting = view(spec(2, 8, policy=POLICY), waiting(), [node("a", 3), node("b", draining=True)])
    late = replace(starting.nodes["b"], seen_at=NOW)  # type: ignore[index]
    starting = replace(starting, nodes=starting.nodes.updated({"b": late}))  # type: ignore[union-attr]
    assert next_round(decide(starting, NOW)).world_size == 3


def test_workers_that_come_in_the_last_moment_are_taken() -> None:
    plan = decide(view(spec(4, 4, policy=POLICY), waiting(since=NOW), [node("a", 4)]), NOW + 600)
    assert next_round(plan).phase is Phase.LIVE


def test_a_waiting_job_wakes_when_a_quarantine_ends() -> None:
    budget = Budget(quarantines=(Quarantine("a", 0, NOW + 20, 1),))
    starved = view(spec(2, 2, policy=POLICY), waiting(since=NOW), [node("a", 2)], budget=budget)
    assert decide(starved, NOW).wake_at == NOW + 20
    assert next_round(decide(starved, NOW + 20)).world_size == 2


# ---------------------------------------------------------------- live


def live(sizes: dict[str, int], nodes: Sequence[Node], reports: Sequence[Report] = (), **more: Any) -> View:
    """Return round 5, with these nodes and reports. ``more``: fields of the spec, the round or the view."""
    of_round = {k: more.pop(k) for k in ("since", "lived_s", "restarts") if k in more}
    of_view = {k: more.pop(k) for k in ("budget", "absence_counts_from", "seen_at") if k in more}
    wanted = spec(**{"min": 2, "max": 8, "policy": POLICY, **more})
    return view(wanted, round(5, sizes, **of_round), nodes, reports, **of_view)


def test_a_restarted_agent_means_its_old_node_is_lost_even_while_absence_does_not_count() -> None:
    seen = live({"a": 2, "b": 2}, [node("a"), node("b", life_number=2)], absence_counts_from=NOW + 5)
    assert next_round(decide(seen, NOW)).closing is Cause.NODE_LOST


def test_a_node_that_let_go_of_a_live_round_is_as_good_as_lost() -> None:
    """The node's workers were fenced, or their warden died. The node is there, and has no worker in the
    round."""
    plan = decide(live({"a": 2, "b": 2}, [node("a", released=5), node("b")]), NOW)
    assert plan.reasons == (RoundClosing(5, Cause.NODE_LOST, ("a",)),)


@pytest.mark.parametrize(
    ("failed", "after_s", "cause"),
    [(False, 0.0, None), (False, 6.0, Cause.NODE_LOST), (True, 0.0, Cause.WORKER_FAILED)],
)
def test_a_node_that_left_a_live_round_for_a_failure_is_not_lost_before_its_report_is_here(
    failed: bool, after_s: float, cause: Cause | None
) -> None:
    """The release and the report are watched separately."""
    nodes = {"a": node("a", released=5, told=1), "b": node("b")}
    seen = live({"a": 2, "b": 2}, [], [report("a", 5, exit(0, 0))] if failed else [])
    seen = replace(seen, nodes=PersistentMap({n: Registered(one, 100, 0.0, NOW) for n, one in nodes.items()}))
    plan = decide(seen, NOW + after_s)
    if cause is None:
        assert not plan.writes and plan.wake_at is not None and plan.wake_at > NOW
    else:
        assert next_round(plan).closing is cause


def resizing(wish: str, **more: Any) -> View:
    """Return a live round of a script that reports its checkpoints, and a reason to resize it."""
    nodes = {"grow": [node("a"), node("b")], "scale": [node("a")], "drain": [node("a", draining=True)]}
    low, high = (1, 1) if wish == "scale" else (1, 8)
    seen = live({"a": 2}, nodes[wish], since=NOW - 100, min=low, max=high, **more)
    assert seen.spec is not None
    return replace(seen, spec=replace(seen.spec, checkpointed=True))


def test_a_node_that_leaves_hurries_a_resize_that_waits_for_a_checkpoint() -> None:
    seen = resizing("drain")
    assert seen.round is not None
    seen = replace(seen, round=replace(seen.round, resizes_by=NOW + 500))
    assert next_round(decide(seen, NOW)).resizes_by == NOW + POLICY.shutdown_s / 2


@pytest.mark.parametrize("wish", ["grow", "scale", "drain"])
def test_with_no_checkpoint_wait_a_resize_waits_for_no_checkpoint(wish: str) -> None:
    seen = resizing(wish, policy=replace(POLICY, checkpoint_wait_s=0.0))
    assert next_round(decide(seen, NOW)).phase is Phase.CLOSING


@pytest.mark.parametrize(
    ("newcomer", "more"),
    [
        pytest.param(node("b"), {"max": 2}, id="already at max"),
        pytest.param(node("b", draining=True), {}, id="about to leave"),
        pytest.param(node("b"), {"drain": ["b"]}, id="asked to leave"),
        pytest.param(
            node("b"),
            {"budget": Budget(quarantines=tuple(Quarantine("b", s, NOW + 99, 1) for s in (0, 1)))},
            id="in quarantine",
        ),
    ],
)
def test_a_world_does_not_grow_for_a_node_it_cannot_use(newcomer: Node, more: dict[str, Any]) -> None:
    assert not decide(live({"a": 2}, [node("a"), newcomer], since=0, **more), NOW).writes


@pytest.mark.parametrize(
    ("cause", "took_s", "waits_s"),
    [
        pytest.param(Cause.GREW, 12.0, 12.0, id="growing took long"),
        pytest.param(Cause.GREW, 0.1, 0.1, id="growing was quick"),
        pytest.param(Cause.GREW, 900.0, POLICY.grow_cooldown_s, id="no longer than others"),
        pytest.param(Cause.WORKER_FAILED, 12.0, 0.0, id="after a failure"),
    ],
)
def test_in_place_a_world_that_has_grown_trains_for_as_long_as_that_took_before_it_grows_again(
    cause: Cause, took_s: float, waits_s: float
) -> None:
    """Else a worker that is killed at each change would have the job grow for ever."""
    nodes = [replace(node(name), ready=(0, 1)) for name in "ab"]
    grown = replace(round(5, {"a": 2}, since=NOW, cause=cause), took_s=took_s)
    seen = view(replace(spec(2, 8, policy=POLICY), inplace=True), grown, nodes)
    if waits_s:
        early = decide(seen, NOW + waits_s - 0.05)
        assert not early.writes
        assert early.wake_at == NOW + waits_s
    assert next_round(decide(seen, NOW + waits_s)).closing is Cause.GREW


def test_a_round_knows_how_long_the_change_to_it_took() -> None:
    nodes = [node("a", released=5), node("b", released=5)]
    ending = replace(round(5, {"a": 2, "b": 2}, Phase.CLOSING, since=NOW - 7), closing=Cause.GREW)
    assert next_round(decide(view(spec(2, 8, policy=POLICY), ending, nodes), NOW)).took_s == 7.0


def test_a_job_succeeds_even_if_its_agents_are_gone_by_then_or_it_is_being_stopped() -> None:
    done = [report("a", 5, finished=True), report("b", 5, finished=True)]
    assert next_round(decide(live({"a": 2, "b": 2}, [], done), NOW)).outcome is Outcome.SUCCEEDED
    seen = live({"a": 2, "b": 2}, [node("a")], done, stop=True)
    assert next_round(decide(seen, NOW)).outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize(
    "stale", [report("b", 4, finished=True), report("b", 5, finished=True, life_number=2)]
)
def test_only_the_members_of_this_round_can_finish_it(stale: Report) -> None:
    seen = live({"a": 2, "b": 2}, [node("a"), node("b")], [report("a", 5, finished=True), stale])
    assert not decide(seen, NOW).writes


def lagging(number: int, *slow: Laggard, drain: bool = True, low: int = 2, nodes: int = 2) -> View:
    wanted = spec(low, 8, policy=replace(POLICY, straggler_drain=drain))
    there = [node(name) for name in "abc"[:nodes]]
    world = round(5, {n.name: 2 for n in there}, since=NOW - 100)
    return replace(view(wanted, world, there), stragglers=Stragglers(number, 0.1, slow))


SLOW = Laggard("a", 1, 1, 1.2)


@pytest.mark.parametrize(
    "seen",
    [
        lagging(5, SLOW, drain=False),
        lagging(4, SLOW),
        lagging(5, SLOW, low=4),
        lagging(5, Laggard("z", 0, 9, 2.0)),
        lagging(5, Laggard("a", 1, 1, 0.0, "its memory is nearly full", strained=True)),
        lagging(5),
    ],
    ids=["only to be reported", "of another round", "too few without it", "no member", "strained", "none"],
)
def test_a_slot_that_lags_behind_stays(seen: View) -> None:
    assert not decide(seen, NOW).writes


@pytest.mark.parametrize(
    ("inplace", "most", "leaving", "out"),
    [
        (True, 1, "", (RankRange(1, 4),)),
        (True, 4, "b", (RankRange(2, 4),)),
        (False, 1, "", ()),
    ],
)
def test_a_round_that_closes_as_planned_names_the_workers_that_the_next_round_leaves_out(
    inplace: bool, most: int, leaving: str, out: tuple[RankRange, ...]
) -> None:
    """These workers hand over what they alone hold, such as their part of a sharded model."""
    nodes = [node(name, draining=name == leaving) for name in "ab"]
    wanted = replace(spec(1, most, policy=POLICY), inplace=inplace)
    plan = decide(view(wanted, round(5, {"a": 2, "b": 2}, since=NOW - 100), nodes), NOW)
    closes = next_round(plan)
    assert (closes.phase, closes.planned, closes.left_out) == (Phase.CLOSING, True, out)


# ---------------------------------------------------------------- live -> closing -> what next, at once


def out_of_round(nodes: Sequence[str] = "ab", *, astray: int | None = None, **more: Any) -> View:
    """Return a live round of nodes a and b, in which a worker of a failed, and which these nodes have
    released."""
    there = [node(name, released=5 if name in nodes else 0, told=name == "a") for name in "ab"]
    failed = replace(exit(0, 0), astray=astray)
    return live({"a": 2, "b": 2}, there, [report("a", 5, failed)], **more)


def test_a_round_that_no_member_is_in_is_closed_and_followed_in_one_transaction() -> None:
    seen = out_of_round()
    both = leader.decide_and_go_on(seen, NOW)
    formed = next_round(both)
    assert (formed.number, formed.phase, formed.cause) == (6, Phase.LIVE, Cause.WORKER_FAILED)
    assert [type(reason) for reason in both.reasons] == [RoundClosing, FailureCharged, RoundFormed]
    assert ROUND_AS_SEEN in both.guards and len(set(both.guards)) == len(both.guards)


@given(spent=st.integers(0, 9), workers=st.integers(1, 5))
def test_one_transaction_leads_to_what_two_would_lead_to(spent: int, workers: int) -> None:
    seen = out_of_round(budget=charges(*[("b", 0)] * spent, progressed=True), min=workers)
    closes = decide(seen, NOW)
    closed = leader.see(seen, Changes(tuple(Entry(w.key, put(w), 99, 1) for w in closes.writes)), "", NOW)
    follows = decide(closed, NOW)
    both = leader.decide_and_go_on(seen, NOW)
    assert {w.key: put(w) for w in both.writes} == {w.key: put(w) for w in (*closes.writes, *follows.writes)}
    assert both.reasons == (*closes.reasons, *follows.reasons)


@pytest.mark.parametrize(
    "seen",
    [
        out_of_round("a"),  # b is in the round
        out_of_round(astray=7),  # agents that are not in the round must see this, too
        replace(out_of_round(), part_sizes=PartSizes(members=1)),
        out_of_round(policy=replace(POLICY, restarts_max=0)),  # the end deletes what an agent writes
        live({"a": 2, "b": 2}, [node("a"), node("b")]),  # nothing is to be closed
        view(spec(policy=POLICY), waiting(), [node("a", 8)]),  # what follows a round that begins comes later
    ],
    ids=[
        "not all are out",
        "back to a checkpoint",
        "a round in parts",
        "the job ends",
        "all train",
        "a round begins",
    ],
)
def test_any_other_step_is_made_alone(seen: View) -> None:
    alone, both = decide(seen, NOW), leader.decide_and_go_on(seen, NOW)
    assert [type(w) for w in both.writes] == [type(w) for w in alone.writes]
    assert both.reasons == alone.reasons
    if both.writes:
        assert next_round(both).phase is next_round(alone).phase


# ---------------------------------------------------------------- closing -> what next


def closing(
    cause: Cause,
    sizes: dict[str, int],
    nodes: Sequence[Node],
    reports: Sequence[Report] = (),
    *,
    wanted: Spec | None = None,
    began_for: Cause = Cause.START,
    **more: Any,
) -> View:
    of_round = {k: more.pop(k) for k in ("restarts", "lived_s", "failure") if k in more}
    ending = round(5, sizes, Phase.CLOSING, cause=began_for, closing=cause, **of_round)
    return view(wanted or spec(policy=POLICY), ending, nodes, reports, **more)


def test_the_next_round_waits_for_nothing_else() -> None:
    """There is no settle window: all members of the round have answered, and newcomers can join later."""
    nodes = [node("a", released=5), node("b", released=5), node("c")]
    plan = decide(closing(Cause.GREW, {"a": 2, "b": 2}, nodes, seen_at=NOW), NOW)
    formed = next_round(plan)
    assert (formed.number, formed.phase, formed.cause) == (6, Phase.LIVE, Cause.GREW)
    assert sizes(formed) == {"a": 2, "b": 2, "c": 2}
    assert formed.closing is None and not formed.planned
    assert not [w for w in plan.writes if w.key == "budget"]


def test_a_large_job_finds_its_members_first_and_writes_them_in_the_next_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = view(spec(2, 12), waiting(), [node(name, 4) for name in "abc"])
    at_once = decide(seen, NOW)
    monkeypatch.setattr(forming, "SEATED_AT_ONCE", 2)
    first = decide(seen, NOW)
    assert (first.writes, first.wake_at) == ((), NOW)
    found = replace(seen, seated=first.seated)
    assert decide(found, NOW) == at_once
    fewer = leader.see(found, Changes((Entry("nodes/c", None, 99, 0),)), "nodes/", NOW)
    monkeypatch.undo()
    later = decide(fewer, NOW + 2)
    assert later == decide(replace(fewer, seated=leader.NOT_SEATED), NOW + 2)
    assert sizes(next_round(later)) == {"a": 4, "b": 4}


@pytest.mark.parametrize("cause", Cause)
def test_the_next_round_knows_when_the_job_began_and_how_often_it_was_cut_short(cause: Cause) -> None:
    nodes = [node("a", released=5), node("b", released=5)]
    seen = closing(cause, {"a": 2, "b": 2}, nodes)
    assert seen.round is not None
    seen = replace(seen, round=replace(seen.round, began=NOW - 1000, failures=3))
    formed = next_round(decide(seen, NOW))
    broke = {Cause.WORKER_FAILED, Cause.WORKER_HUNG, Cause.NODE_LOST, Cause.NODE_FAULT, Cause.WORLD_BROKEN}
    unplanned = cause in broke
    assert (formed.began, formed.failures) == (NOW - 1000, 4 if unplanned else 3)


def test_the_first_round_begins_the_job() -> None:
    formed = next_round(decide(view(spec(policy=POLICY), waiting(), [node("a")]), NOW + 100))
    assert (formed.phase, formed.began, formed.failures) == (Phase.LIVE, NOW + 100, 0)


@pytest.mark.parametrize(
    ("code", "before", "stepped", "counts"),
    [
        pytest.param(1, None, False, True, id="the first error may come each time"),
        pytest.param(1, "boom", False, True, id="the same error"),
        pytest.param(1, "bang", False, False, id="another error"),
        pytest.param(-9, "boom", False, False, id="a kill"),
        pytest.param(1, "bang", True, True, id="another error where steps are seen"),
        pytest.param(-9, "boom", True, True, id="a kill where steps are seen"),
    ],
)
def test_where_no_step_was_ever_seen_only_the_same_error_again_counts_as_futile(
    code: int, before: str | None, stepped: bool, counts: bool
) -> None:
    """A script without an optimizer may have made progress that nobody can see."""
    last = None if before is None else Failure("b", replace(exit(2), message=before))
    seen = closing(
        Cause.WORKER_FAILED,
        {"a": 2},
        [node("a", released=5)],
        [report("a", 5, exit(1, 1, code=code))],
        budget=Budget(stepped=stepped, total=1),
        failure=last,
    )
    charged = written(decide(seen, NOW), "budget")
    assert isinstance(charged, Budget) and charged.charges[-1].progressed is not counts
    assert charged.stepped is stepped


MISSING = "ModuleNotFoundError: No module named 'flash_attn'"


@pytest.mark.parametrize(
    ("messages", "more", "ends"),
    [
        pytest.param([MISSING], {}, True, id="on the only node"),
        pytest.param([MISSING, MISSING], {}, True, id="on both nodes"),
        pytest.param(["SyntaxError: invalid syntax"] * 2, {}, True, id="a syntax error"),
        pytest.param([MISSING, None], {}, False, id="on one of two nodes"),
        pytest.param([MISSING, "ImportError: libcuda.so.1"], {}, False, id="two errors"),
        pytest.param(["ValueError: no"], {}, False, id="another error"),
        pytest.param([f"last output: {MISSING}"], {}, False, id="only printed"),
        pytest.param([MISSING], {"began_for": Cause.GREW}, False, id="not in the first round"),
        pytest.param([MISSING], {"budget": Budget(total=1)}, False, id="not the first failure"),
        pytest.param([MISSING], {"lived_s": 100.0}, False, id="after a while"),
        pytest.param([MISSING], {"steps": 1}, False, id="after a step"),
    ],
)
def test_a_script_that_cannot_be_imported_is_not_tried_again(
    messages: list[str | None], more: dict[str, Any], ends: bool
) -> None:
    names = ["a", "b"][: len(messages)]
    steps = more.get("steps", 0)
    more = {name: value for name, value in more.items() if name != "steps"}
    exits = [() if m is None else (replace(exit(0, n), message=m),) for n, m in enumerate(messages)]
    seen = closing(
        Cause.WORKER_FAILED,
        dict.fromkeys(names, 1),
        [node(name, released=5) for name in names],
        [report(name, 5, *of, steps=steps) for name, of in zip(names, exits, strict=True)],
        **more,
    )
    after = written(decide(seen, NOW), "round")
    assert isinstance(after, Round) and (after.phase is Phase.ENDED) is ends
    if ends:
        assert (after.outcome, after.why) == (Outcome.FAILED, f"the script cannot be run: {messages[0]}")


@pytest.mark.parametrize(
    ("codes", "steps", "ends"),
    [
        pytest.param([2, 2], 0, True, id="on both nodes"),
        pytest.param([2, None], 0, False, id="on one of two nodes"),
        pytest.param([2, 1], 0, False, id="another error beside it"),
        pytest.param([2, 2], 1, False, id="after a step"),
    ],
)
def test_a_script_that_refuses_its_input_is_not_tried_again(
    codes: list[int | None], steps: int, ends: bool
) -> None:
    exits = [() if c is None else (replace(exit(0, n), code=c, message=f"{n}"),) for n, c in enumerate(codes)]
    seen = closing(
        Cause.WORKER_FAILED,
        {"a": 1, "b": 1},
        [node(name, released=5) for name in "ab"],
        [report(name, 5, *of, steps=steps) for name, of in zip("ab", exits, strict=True)],
    )
    after = written(decide(seen, NOW), "round")
    assert isinstance(after, Round) and (after.phase is Phase.ENDED) is ends
    assert not ends or after.why == "the script refuses its input: it ended with exit code 2"


@pytest.mark.parametrize("closing_for", [Cause.GREW, Cause.SCALED])
def test_a_worker_that_raised_is_charged_though_its_round_closed_for_a_newcomer(
    closing_for: Cause,
) -> None:
    """Otherwise newcomers that fail at once could join one after the other for ever, without a charge."""
    killed, found = exit(0, 0, at=NOW - 2), replace(exit(1, 1), raised=True)
    reports = [report("a", 5, killed, found)]
    nodes = [node("a", released=5), node("b", released=5)]
    plan = decide(closing(closing_for, {"a": 2, "b": 2}, nodes, reports), NOW)
    assert plan.reasons[0] == FailureCharged(Failure("a", found), 1, 10)
    assert next_round(plan).cause == Cause.WORKER_FAILED

    asked_to_leave = decide(closing(closing_for, {"a": 2, "b": 2}, nodes, [report("a", 5, killed)]), NOW)
    assert not any(isinstance(reason, FailureCharged) for reason in asked_to_leave.reasons)
    lost_too = decide(closing(closing_for, {"a": 2, "b": 2}, nodes[:1], reports), NOW + 100)
    assert not any(isinstance(reason, FailureCharged) for reason in lost_too.reasons)


def test_going_back_from_what_is_no_number_ends_once_it_has_often_enough_led_no_further() -> None:
    echo, told = exit(0, 0, at=NOW - 3), replace(exit(0, 2), astray=50)
    reports = [report("a", 5, echo, steps=7), report("b", 5, told)]
    nodes = [node("a", released=5), node("b", released=5)]
    seen = closing(Cause.WORKER_FAILED, {"a": 2, "b": 2}, nodes, reports)
    assert next_round(decide(seen, NOW)).anew, "if it was closed for something else"
    seen = replace(seen, round=replace(seen.round, anew=True))
    kept = replace(node("a", released=5), ready=(0,), age=Age(5, 7), holders=(0,))
    waits = decide(replace(seen, nodes=seen.nodes.updated({"a": Registered(kept, 100, 0.0)})), NOW)
    assert waits.reasons == (AwaitingRelease(("a",)),) and not waits.writes, "until that worker has ended"
    again = decide(seen, NOW)
    assert (next_round(again).phase, next_round(again).anew) == (Phase.LIVE, False)
    went_back = written(again, "budget")
    assert isinstance(went_back, Budget) and went_back.astray == RollbackCount(50, 1)
    seen = replace(seen, budget=replace(seen.budget, astray=RollbackCount(50, 2)))
    ended = next_round(decide(seen, NOW))
    assert (ended.phase, ended.outcome) == (Phase.ENDED, Outcome.DIVERGED)
    assert ended.why.startswith("3 times the training came to a value that is NaN or infinite")


def test_a_fenced_node_is_not_charged_though_its_peers_workers_failed_first() -> None:
    """The node was cut off or stopped, so the collectives of its peers failed. It is back before they have
    ended."""
    reports = [report("a", 5, exit(0, 0))]
    nodes = [node("a", released=5), node("b", released=5, fenced=5)]
    formed = next_round(decide(closing(Cause.WORKER_FAILED, {"a": 2, "b": 2}, nodes, reports), NOW))
    assert (formed.cause, formed.restarts, formed.failure) == (Cause.NODE_LOST, 0, None)


@pytest.mark.parametrize("cause", sorted({c for c in Cause if not c.charged} - {Cause.WORLD_BROKEN}))
def test_what_is_not_the_users_fault_costs_nothing(cause: Cause) -> None:
    """Not even if workers fail while they are being stopped."""
    reports = [report("a", 5, exit(0, 0))]
    plan = decide(closing(cause, {"a": 2}, [node("a", released=5)], reports), NOW)
    assert next_round(plan).restarts == 0
    assert not [w for w in plan.writes if w.key == "budget"]


def test_a_job_waits_for_workers_and_hands_nothing_over_meanwhile() -> None:
    """A handover failed. Nodes start no workers for a round that only hands over."""
    seen = closing(Cause.WORKER_FAILED, {"a": 2, "b": 2}, [node("a", released=5)], wanted=spec(3, 8))
    assert seen.round is not None
    plan = decide(replace(seen, round=replace(seen.round, handover=True)), NOW)
    assert (next_round(plan).phase, next_round(plan).handover) == (Phase.WAITING, False)


def test_a_job_that_is_not_to_resume_forgets_what_a_former_one_committed_and_no_other_does() -> None:
    for resume in Resume:
        plan = decide(view(spec(policy=replace(POLICY, resume=resume)), None, [node("a", 8)]), NOW)
        assert (Delete("checkpoint") in plan.writes) == (resume is Resume.NEVER)


@pytest.mark.parametrize(("inplace", "ends"), [(True, True), (False, False)])
def test_where_workers_commit_a_round_that_lived_long_is_of_no_use_by_that(inplace: bool, ends: bool) -> None:
    seen = closing(
        Cause.WORKER_FAILED,
        {"a": 2},
        [node("a", released=5)],
        [report("a", 5, exit(0, 0))],
        wanted=replace(spec(), inplace=inplace),
        budget=charges(("a", 0), ("a", 1), ("a", 0)),
    )
    assert seen.round is not None
    seen = replace(seen, round=replace(seen.round, lived_s=1000.0))
    assert (next_round(decide(seen, NOW)).phase is Phase.ENDED) == ends


@pytest.mark.parametrize(("finished", "cause"), [("a", Cause.NODE_LOST), ("b", Cause.WORKER_FAILED)])
def test_a_failure_after_a_node_has_finished_and_left_is_the_scripts_unless_its_store_went_too(
    finished: str, cause: Cause
) -> None:
    failed = report("c", 5, exit(0, 2), steps=3)
    there = [node(name, released=5, told=1) for name in ("a", "b", "c") if name != finished]
    seen = closing(
        Cause.WORKER_FAILED,
        {"a": 1, "b": 1, "c": 1},
        there,
        [report(finished, 5, finished=True), failed],
    )
    assert next_round(decide(seen, NOW)).cause is cause


def test_workers_that_leave_in_good_order_may_save_though_a_node_has_finished_and_left() -> None:
    nodes = [node("a"), node("c")]
    done = [report("b", 5, finished=True)]
    seen = closing(Cause.NODE_DRAINED, {"a": 1, "b": 1, "c": 1}, nodes, done)
    assert seen.round is not None
    seen = replace(seen, round=replace(seen.round, planned=True))
    assert not decide(seen, NOW).writes


def test_the_steps_that_a_node_tells_with_its_release_are_waited_for() -> None:
    failed = charges(("a", 0), at=NOW - 3)
    nodes = [node("a", released=5, told=1)]
    seen = closing(Cause.GREW, {"a": 2}, nodes, budget=failed)
    seen = replace(seen, nodes=PersistentMap({"a": Registered(nodes[0], 100, 0.0, NOW)}))
    assert not decide(seen, NOW).writes
    spent = written(
        decide(replace(seen, reports=PersistentMap({"a": report("a", 5, steps=9)})), NOW), "budget"
    )
    assert isinstance(spent, Budget) and spent.charges[-1].progressed


def test_what_survivors_have_committed_since_the_last_failure_is_progress() -> None:
    """The node reports the commits, though no step of the failed round was reported."""
    keeps = replace(node("a", released=5), ready=(0, 1), age=Age(4, 31))
    seen = closing(
        Cause.WORKER_FAILED,
        {"a": 2},
        [keeps],
        [report("a", 5, exit(0, 0))],
        wanted=replace(spec(), inplace=True),
        budget=Budget((Charge(NOW - 3, "a", 0, False), Charge(NOW - 2, "a", 0, False, 30)), 2),
    )
    spent = written(decide(seen, NOW), "budget")
    assert isinstance(spent, Budget) and (spent.charges[-1].progressed, spent.charges[-1].step) == (True, 31)


def test_a_drained_node_is_not_in_the_next_round_and_leaves_the_spec_once_it_is_gone() -> None:
    wanted = spec(policy=POLICY, drain=["b"])
    nodes = [node("a", released=5), node("b", released=5)]
    still_there = decide(closing(Cause.NODE_DRAINED, {"a": 2, "b": 2}, nodes, wanted=wanted), NOW)
    assert sizes(next_round(still_there)) == {"a": 2}
    assert not [w for w in still_there.writes if w.key == "spec"], "or it would be taken back"
    gone = decide(closing(Cause.NODE_DRAINED, {"a": 2, "b": 2}, nodes[:1], wanted=wanted), NOW)
    assert written(gone, "spec") == replace(wanted, drain=())
    assert Unchanged("spec", SPEC_REVISION) in gone.guards, "someone may be scaling it"


# ---------------------------------------------------------------- what a view is made of


def entry(key: str, fact: Fact | None, revision: int = 50, created: int = 40) -> Entry:
    return Entry(key, fact, revision, created)


def test_a_view_is_complete_once_every_scope_has_been_listed_even_if_empty() -> None:
    seen = View()
    for scope, entries in [
        ("spec", (entry("spec", spec()),)),
        ("round", ()),
        ("budget", ()),
        ("nodes/", ()),
        ("reports/", ()),
    ]:
        assert not seen.complete
        seen = leader.see(seen, Listing(entries, 60), scope, NOW)
    assert seen.complete
    assert seen.revisions == {"round": 0, "budget": 0, "spec": 50}


def test_what_a_listing_does_not_name_does_not_exist() -> None:
    seen = view(spec(), waiting(), [node("a"), node("b")], [report("a", 1)], charges(("a", 0)))
    seen = leader.see(seen, Listing((entry("nodes/b", node("b")),), 60), "nodes/", NOW)
    seen = leader.see(seen, Listing((), 60), "reports/", NOW)
    seen = leader.see(seen, Listing((), 60), "budget", NOW)
    assert set(seen.nodes or ()) == {"b"} and seen.reports == {}
    assert (seen.budget, seen.revisions["budget"]) == (Budget(), 0)


def test_changes_come_one_by_one() -> None:
    seen = view(spec(), waiting(), [node("a")])
    news = Changes((entry("nodes/b", node("b")), entry("nodes/a", None), entry("reports/b", report("b", 3))))
    seen = leader.see(seen, news, "nodes/", NOW)
    assert set(seen.nodes or ()) == {"b"} and set(seen.reports or ()) == {"b"}


def test_a_node_is_new_when_its_incarnation_is_not_when_its_record_changes() -> None:
    seen = view(spec(), waiting(), [node("a")], seen_at=1.0)
    same = leader.see(seen, Changes((entry("nodes/a", node("a", released=3)),)), "nodes/", NOW)
    other = leader.see(seen, Changes((entry("nodes/a", node("a", life_number=2)),)), "nodes/", NOW)
    assert same.nodes and same.nodes["a"].seen_at == 1.0 and same.nodes["a"].node.released == 3
    assert other.nodes and other.nodes["a"].seen_at == NOW


# ---------------------------------------------------------------- properties

NAMES = "abcd"
slots_ = st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True).map(sorted)
exits_ = st.builds(
    Exit,
    slot=st.integers(0, 4),
    rank=st.integers(0, 9),
    code=st.sampled_from([0, 1, -9]),
    at=st.floats(NOW - 100, NOW),
)


@st.composite
def views(draw: st.DrawFn) -> View:
    """Any view that a leader may have, and many that it should never have."""
    policy = Policy(
        restarts_max=draw(st.integers(0, 4)),
        futile_max=draw(st.integers(0, 4)),
        quarantine_after=draw(st.integers(0, 3)),
        grow_cooldown_s=draw(st.sampled_from([0.0, 30.0])),
        settle_s=draw(st.sampled_from([0.0, 1.0])),
    )
    min_ = draw(st.integers(1, 6))
    wanted = spec(
        min_,
        min_ + draw(st.integers(0, 6)),
        policy=policy,
        stop=draw(st.sampled_from([False, False, False, True])),
        drain=draw(st.lists(st.sampled_from(NAMES), max_size=1)),
    )
    number = draw(st.integers(0, 5))
    phase = draw(st.sampled_from(Phase))
    crew = draw(st.dictionaries(st.sampled_from(NAMES), st.integers(1, 4), min_size=1)) if number else {}
    if number == 0 and phase is not Phase.ENDED:
        phase = Phase.WAITING
    now_round = round(
        number,
        crew,
        phase,
        since=draw(st.sampled_from([NOW - 1000, NOW - 10, NOW])),
        closing=draw(st.sampled_from(Cause)) if phase is Phase.CLOSING else None,
        outcome=draw(st.sampled_from(Outcome)) if phase is Phase.ENDED else None,
        restarts=draw(st.integers(0, 3)),
    )
    nodes = [
        node(
            name,
            draw(slots_),
            released=draw(st.integers(max(0, number - 1), number)),
            draining=draw(st.sampled_from([False, False, True])),
            life_number=draw(st.sampled_from([1, 1, 2])),
        )
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
    ]
    reports = [
        report(
            name,
            draw(st.integers(max(0, number - 1), number)),
            *draw(st.lists(exits_, max_size=2)),
            finished=draw(st.booleans()),
            steps=draw(st.integers(0, 2)),
        )
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
    ]
    budget = Budget(
        charges(*draw(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 1)), max_size=4))).charges,
        total=draw(st.integers(0, 9)),
        quarantines=tuple(
            Quarantine(
                name, draw(st.integers(0, 4)), draw(st.floats(NOW - 50, NOW + 50)), draw(st.integers(1, 2000))
            )
            for name in draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
        ),
    )
    return view(
        wanted,
        draw(st.sampled_from([now_round] * 9 + [None])),
        nodes,
        reports,
        budget,
        seen_at=draw(st.sampled_from([0.0, NOW])),
        absence_counts_from=draw(st.sampled_from([0.0, NOW + 5])),
    )


NEXT = {
    Phase.WAITING: {Phase.LIVE, Phase.ENDED},
    Phase.LIVE: {Phase.CLOSING, Phase.ENDED},
    Phase.CLOSING: {Phase.LIVE, Phase.WAITING, Phase.ENDED},
    Phase.ENDED: {Phase.WAITING},
}


@given(views())
def test_the_leader_keeps_its_invariants_under_any_facts(seen: View) -> None:
    plan = decide(seen, NOW)
    assert plan == decide(seen, NOW), "the same view gives the same plan"
    if not plan.writes:
        assert not plan.guards
        assert plan.wake_at is None or plan.wake_at > NOW, "it would spin"
        return
    before, after = seen.round, next_round(plan)
    assert Unchanged("round", seen.revisions["round"]) in plan.guards
    for key in ("budget", "spec"):
        if any(isinstance(w, Put) and w.key == key for w in plan.writes):
            assert Unchanged(key, seen.revisions[key]) in plan.guards
    assert after.phase in (NEXT[before.phase] if before else {Phase.WAITING})
    assert after.number == (before.number if before else 0) + (after.phase is Phase.LIVE)
    assert (after.outcome is not None) == (after.phase is Phase.ENDED)
    assert (after.closing is not None) or after.phase is not Phase.CLOSING
    assert seen.spec is not None and seen.nodes is not None
    if after.phase is Phase.LIVE:
        limits: Limits = seen.spec.limits
        assert limits.min <= after.world_size <= limits.max
        for m in after.members:
            there = seen.nodes[m.node].node
            assert there.incarnation == m.incarnation and not there.draining
            assert seating.available(there, before), "its workers of the last round may still run"
            assert Drained(m.node, m.incarnation) not in seen.spec.drain
        assert after.store == f"{after.members[0].node}.example:29500"
    budgets = [w.fact for w in plan.writes if isinstance(w, Put) and w.key == "budget"]
    for spent in budgets:
        assert isinstance(spent, Budget)
        if after.phase is Phase.LIVE:
            assert len(spent.charges) <= max(seen.spec.policy.restarts_max, len(seen.budget.charges))
