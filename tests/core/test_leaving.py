"""Workers that leave a round and keep their process: which workers the job waits for, and what the end of
others means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd.core.age import Age
from elasticd.core.agent.agent_state import SIGKILL, SIGTERM
from elasticd.core.agent_messages import (
    LeaveJob,
    LeaveRound,
    Signalled,
    StartWorkers,
    StopWorkers,
    Tag,
)
from elasticd.core.facts import (
    BrokenWorldCount,
    Budget,
    Cause,
    Failure,
    Node,
    Outcome,
    Phase,
    Policy,
    RankRange,
    Report,
)
from elasticd.core.leader import Plan, View, decide
from elasticd.core.leader.plan import REPORT_S
from elasticd.core.persistent_map import PersistentMap
from elasticd.core.ports import WorkerBroke, WorkerLinked, WorkerWaiting
from elasticd.core.reasons import AwaitingRelease, WorkerEnded
from tests.core.build import NOW, exit, life, next_round, node, report, round, spec, view, written
from tests.core.by_hand import Agent, put
from tests.core.test_standbys import IN_PLACE, ROUND, closing, own_record, working

LEAVE_S = IN_PLACE.policy.part_s


def limit_s(one: Agent) -> float | None:
    return one.one(LeaveRound).leave_s


# ---------------------------------------------------------------- which workers are hurried


@pytest.mark.parametrize("cause", [Cause.GREW, Cause.SCALED, Cause.NODE_DRAINED])
def test_workers_of_a_round_that_is_resized_are_waited_for_however_long_a_step_takes(cause: Cause) -> None:
    one = working()
    one.sees("round", closing(ROUND, cause, planned=True))
    assert limit_s(one) is None
    one.told(WorkerWaiting(0, 1, age=Age(1, 5)))
    assert not one.all_of(LeaveRound)


@pytest.mark.parametrize("age", [None, Age(0, 5)])
def test_a_worker_that_waits_without_the_agreed_state_does_not_hurry_the_others(age: Age | None) -> None:
    one = working()
    one.sees("round", closing(ROUND))
    one.told(WorkerWaiting(0, 1, age=age))
    assert not one.all_of(LeaveRound)


def test_survivors_are_hurried_when_the_leader_says_that_others_have_left_with_the_state() -> None:
    one = working()
    one.sees("round", closing(ROUND))
    one.sees("round", replace(closing(ROUND), outlived=True))
    assert limit_s(one) == LEAVE_S


def test_workers_of_a_leaving_node_have_the_short_limit_from_the_beginning() -> None:
    one = working()
    one.told(Signalled(SIGTERM))
    one.sees("round", closing(ROUND, Cause.NODE_DRAINED, planned=True))
    assert limit_s(one) == LEAVE_S


def test_the_leader_says_after_a_while_that_some_have_left_with_the_state() -> None:
    left, holding = node("a", released=5), node("b", released=4)
    ending = round(5, {"a": 2, "b": 2}, Phase.CLOSING, closing=Cause.WORKER_FAILED, since=NOW)

    def plan(at: float, left: Node = left, planned: bool = False) -> Plan:
        return decide(view(spec(), replace(ending, planned=planned), [left, holding]), at)

    holds = replace(left, age=Age(5, 70), holders=(0,))
    early = plan(NOW, holds)
    assert (early.wake_at, early.reasons) == (NOW + LEAVE_S, (AwaitingRelease(("b",)),))
    assert next_round(plan(NOW + LEAVE_S, holds)) == replace(ending, outlived=True)
    for one in (plan(NOW + LEAVE_S), plan(NOW + LEAVE_S, replace(left, age=Age(4, 70)))):
        assert not one.writes, "it has not what those of the round had agreed on"
    still_planned = next_round(plan(NOW + LEAVE_S, holds, planned=True))
    assert (still_planned.planned, still_planned.outlived) == (True, True), (
        "who sleeps may be told from who works"
    )


# ---------------------------------------------------------------- parts of a sharded model


def left(*, sharded: bool, out: tuple[RankRange, ...] = ()) -> Agent:
    """Return a node whose workers have left a round that is scaled down."""
    one = working()
    one.sees("round", replace(closing(ROUND, Cause.SCALED, planned=True), left_out=out))
    for slot in (0, 1):
        one.told(WorkerWaiting(slot, 1, age=Age(1, 5), sharded=sharded))
    return one


def test_a_node_that_is_to_leave_after_its_workers_have_waits_to_give_their_parts() -> None:
    one = left(sharded=True)
    one.told(Signalled(SIGTERM))
    assert one.state.exiting is None


@pytest.mark.parametrize(("sharded", "out"), [(False, ()), (True, (RankRange(0, 2),))])
def test_a_node_whose_workers_alone_have_nothing_leaves_at_once(
    sharded: bool, out: tuple[RankRange, ...]
) -> None:
    one = left(sharded=sharded, out=out)
    one.told(Signalled(SIGTERM))
    assert one.state.exiting is not None


def test_workers_wait_for_no_member_that_has_declined_the_round() -> None:
    """The member left the round with a state from before."""
    ending = round(5, {"a": 2, "b": 2}, Phase.CLOSING, closing=Cause.GREW, planned=True)
    declined = replace(node("a", released=5), age=Age(4, 9), holders=(0, 1))
    plan = decide(view(replace(spec(), inplace=True), ending, [declined, node("b", released=4)]), NOW)
    assert next_round(plan) == replace(ending, planned=False)


@pytest.mark.parametrize(
    ("declined", "fenced", "closes"), [(5, 0, True), (4, 0, False), (0, 5, True), (0, 4, False)]
)
def test_workers_that_pass_the_state_on_wait_for_no_member_that_has_declined_or_was_fenced(
    declined: int, fenced: int, closes: bool
) -> None:
    """A member that took part leaves as soon as all have what they need, so the others follow by
    themselves."""
    passing = replace(round(5, {"b": 2, "a": 2}), handover=True)
    first = replace(node("b", released=5), declined=declined, fenced=fenced)
    plan = decide(view(replace(spec(), inplace=True), passing, [first, node("a", released=4)]), NOW)
    if not closes:
        assert not plan.writes
        return
    closing = next_round(plan)
    assert (closing.phase, closing.closing, closing.planned) == (Phase.CLOSING, Cause.NODE_LOST, False)


def test_a_node_tells_that_it_has_declined_a_round() -> None:
    """Its store for the round has closed since the round was formed."""
    one = left(sharded=False)
    one.answered(Tag.NODE)
    one.sees("round", replace(round(2, {"a": 2, "b": 2}), handover=True))
    record = own_record(one)
    assert (record.released, record.declined) == (2, 2) and not one.all_of(StartWorkers)


def test_a_leaving_node_stays_until_etcd_has_the_report_that_its_workers_have_finished() -> None:
    """The report is written with the release. If the node left before the answer, and etcd took neither, the
    others would repeat the work."""
    ends = round(1, {"b": 2, "a": 2})  # so a serves no store, and releases at once
    one = Agent.working(ends, IN_PLACE)
    for slot in (0, 1):
        one.told(WorkerLinked(slot))
    one.told(Signalled(SIGTERM))
    one.answered(Tag.NODE)
    one.sees("round", closing(ends, Cause.NODE_DRAINED, planned=True))
    for slot in (0, 1):
        one.exits(1, exit(slot, 2 + slot, 0))
    _, told = one.wrote(Tag.NODE).writes
    report = put(told)
    assert isinstance(report, Report) and report.finished
    one.at(NOW + 1)
    assert not one.all_of(LeaveJob)
    one.answered(Tag.NODE)
    assert one.one(LeaveJob).code == 128 + SIGTERM


# ---------------------------------------------------------------- workers that have lost the others


@pytest.mark.parametrize("stray", [WorkerBroke(0, 2, fails=False), WorkerBroke(3, 1, fails=False)])
def test_a_loss_reported_for_no_round_or_another_is_ignored(stray: WorkerBroke) -> None:
    one = working()
    assert not one.told(stray)


def test_workers_that_leave_unbidden_have_not_finished() -> None:
    one = working()
    for slot in (0, 1):
        one.told(WorkerWaiting(slot, 1, age=Age(1, 5)))
    assert one.state.crew is not None and not one.state.crew.finished
    assert one.state.report == Report("a", life("a"), 1, broken=True)


def lost_each_other(*reports: Report, nodes: tuple[Node, ...] | None = None) -> View:
    """Return a round that is over because its workers lost each other. All nodes have released it."""
    ending = round(5, {"a": 2, "b": 2}, Phase.CLOSING, closing=Cause.WORLD_BROKEN)
    there = nodes or (node("a", released=5), node("b", released=5))
    return view(spec(), ending, there, reports, Budget())


def test_a_round_that_is_left_in_good_order_is_left_at_once_when_some_have_lost_the_others() -> None:
    ending = round(5, {"a": 2, "b": 2}, Phase.CLOSING, closing=Cause.SCALED, planned=True)
    there = (node("a", released=5), node("b"))
    whole = decide(view(spec(), ending, there, [report("a", 5)], Budget()), NOW)
    assert whole.reasons == (AwaitingRelease(("b",)),) and not whole.writes
    broken = decide(view(spec(), ending, there, [replace(report("a", 5), broken=True)], Budget()), NOW)
    assert (next_round(broken).phase, next_round(broken).planned) == (Phase.CLOSING, False)


def apart_again(times: int, since: float, step: int) -> Plan:
    """Return what happens to a job whose workers have lost each other once more, at that step."""
    nodes = tuple(replace(node(name, released=5), age=Age(5, step)) for name in "ab")
    budget = Budget(apart=BrokenWorldCount(10, times, since))
    return decide(replace(lost_each_other(nodes=nodes), budget=budget), NOW)


def test_workers_that_lose_each_other_at_the_same_step_again_and_again_end_their_job() -> None:
    plan = apart_again(3, NOW - Policy().join_timeout_s, 10)
    ended = next_round(plan)
    assert (ended.phase, ended.outcome) == (Phase.ENDED, Outcome.FAILED)
    assert ended.why.startswith(
        "4 times in a row within 600 s the workers lost each other, and never got beyond"
    )


@pytest.mark.parametrize(
    ("times", "since", "step", "then"),
    [
        pytest.param(
            3, NOW - 599, 10, BrokenWorldCount(10, 4, NOW - 599), id="a network may be away for a while"
        ),
        pytest.param(2, NOW - 900, 10, BrokenWorldCount(10, 3, NOW - 900), id="it may have been chance"),
        pytest.param(9, NOW - 900, 11, BrokenWorldCount(11, 1, NOW), id="they get on"),
    ],
)
def test_but_not_a_job_that_may_yet_get_on(
    times: int, since: float, step: int, then: BrokenWorldCount
) -> None:
    plan = apart_again(times, since, step)
    assert next_round(plan).phase is Phase.LIVE
    budget = next(write.fact for write in plan.writes if write.key == "budget")
    assert isinstance(budget, Budget) and (budget.apart, budget.charges) == (then, ())


def test_if_workers_lose_each_other_by_the_failure_of_one_this_failure_is_charged() -> None:
    failed = exit(1, 1)
    plan = decide(lost_each_other(report("a", 5, failed)), NOW)
    formed = next_round(plan)
    assert (formed.cause, formed.restarts, formed.failure) == (Cause.WORKER_FAILED, 1, Failure("a", failed))


# ---------------------------------------------------------------- workers that fail, and take long to end


def test_the_end_of_one_that_fails_is_a_failure_though_the_round_has_been_left_meanwhile() -> None:
    one = working()
    assert not one.told(WorkerBroke(0, 1, fails=True)), "its end may say more"
    one.sees("round", closing(ROUND, Cause.WORLD_BROKEN))
    one.told(WorkerWaiting(1, 1, age=Age(1, 5)))
    one.exits(1, exit(0, 0, -9))
    assert [type(reason) for reason in one.said][:1] == [WorkerEnded]
    release, told = map(put, one.wrote(Tag.NODE).writes)
    assert isinstance(release, Node) and (release.released, release.told) == (1, 1)
    assert isinstance(told, Report) and told.exits == (replace(exit(0, 0, -9), raised=True),)


def test_a_stopped_worker_that_ends_by_an_exception_has_not_failed() -> None:
    one = working()
    one.sees("round", replace(closing(ROUND, Cause.WORKER_FAILED), anew=True))
    one.told(WorkerBroke(0, 1, fails=True))
    one.exits(1, exit(0, 0, 1))
    assert not [reason for reason in one.said if isinstance(reason, WorkerEnded)]
    assert one.state.report is None


def test_what_a_node_tells_with_its_release_is_waited_for() -> None:
    nodes = (replace(node("a", released=5), told=1), node("b", released=5))
    broken = lost_each_other(replace(report("a", 5), broken=True), nodes=nodes)
    assert broken.nodes is not None
    news = {name: replace(n, news_at=NOW) for name, n in broken.nodes.items()}
    seen = replace(broken, nodes=PersistentMap(news))
    assert decide(seen, NOW) == Plan(wake_at=NOW + REPORT_S, reasons=(AwaitingRelease(("a",)),))
    told = replace(seen, reports=PersistentMap({"a": report("a", 5, exit(1, 1))}))
    assert isinstance(written(decide(told, NOW), "budget"), Budget)
    assert next_round(decide(seen, NOW + REPORT_S)).restarts == 0, "it was undone by an older one"


# ---------------------------------------------------------------- leaving becomes stopping


def test_workers_that_leave_their_round_are_stopped_when_the_job_ends() -> None:
    one = working()
    one.sees("round", closing(ROUND))
    one.one(LeaveRound)
    one.sees("round", replace(ROUND, phase=Phase.ENDED, outcome=Outcome.FAILED))
    assert one.one(StopWorkers).signal == SIGTERM


def test_workers_that_are_killed_on_their_way_out_of_a_round_have_not_failed() -> None:
    one = working()
    one.sees("round", closing(ROUND, Cause.GREW, planned=True))
    one.told(Signalled(SIGTERM))
    one.told(Signalled(SIGTERM))
    assert one.one(StopWorkers).signal == SIGKILL
    one.exits(1, exit(0, 0, -9))
    assert not [reason for reason in one.said if isinstance(reason, WorkerEnded)]
    assert one.state.report is None
