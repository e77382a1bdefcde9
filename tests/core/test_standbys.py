"""Workers that keep their process: which ones an agent keeps waiting, reports, and sends away."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGKILL

from elasticd.core import leader, seating
from elasticd.core.age import Age
from elasticd.core.agent.crew import RELEASE_S
from elasticd.core.agent.standbys import KEEP_S
from elasticd.core.agent_messages import (
    LeaveRound,
    StartStandbys,
    StartWorkers,
    StopWorkers,
    Tag,
    Transact,
)
from elasticd.core.facts import Cause, Leadership, Limits, Node, Outcome, Phase, RankRange, Report, Round
from elasticd.core.lifecycle import Life
from elasticd.core.ports import WorkerLingers, WorkerLinked, WorkerWaiting
from elasticd.core.reasons import StartHeldBack, WorkerEnded, WorkersLeaving
from tests.core.build import NOW, exit, life, members, next_round, node, report, round, spec, view, written
from tests.core.by_hand import NEXT_PORT, Agent, put

IN_PLACE = replace(spec(1, 4), inplace=True)
ROUND = round(1, {"a": 2, "b": 2})


def closing(round: Round, cause: Cause = Cause.WORKER_FAILED, *, planned: bool = False) -> Round:
    return replace(round, phase=Phase.CLOSING, closing=cause, planned=planned, since=NOW)


def working(**more: float) -> Agent:
    """Return two linked workers of node a in a world of four."""
    one = Agent.working(ROUND, IN_PLACE, **more)
    one.told(WorkerLinked(0))
    one.told(WorkerLinked(1))
    return one


def own_record(one: Agent) -> Node:
    record = put(one.wrote(Tag.NODE).writes[0])
    assert isinstance(record, Node)
    return record


def test_the_first_linked_worker_is_told_to_everybody_once() -> None:
    one = Agent.working(ROUND, spec(1, 4))
    one.told(WorkerLinked(0))
    (write,) = one.wrote(Tag.INPLACE).writes
    assert put(write) == IN_PLACE
    one.answered(Tag.INPLACE)
    assert not one.did


def test_workers_leave_a_closing_round_and_keep_their_process() -> None:
    one = working()
    one.sees("round", closing(ROUND, Cause.GREW, planned=True))
    assert one.one(LeaveRound).planned and not one.all_of(StopWorkers)
    one.sees("round", closing(ROUND, Cause.GREW))
    assert not one.one(LeaveRound).planned, "it turned out to be broken"


DIES = WorkerLingers(1, 77, failed=True)


def test_workers_leave_as_soon_as_another_begins_to_exit_and_say_why_once_that_is_known() -> None:
    one = working()
    one.told(DIES)
    assert not one.one(LeaveRound).planned and not one.said and not one.all_of(Transact)
    one.exits(1, exit(1, 1, code=-9))
    assert not one.all_of(LeaveRound)
    leaves = WorkersLeaving(1, Cause.WORKER_FAILED, planned=False)
    assert [*map(type, one.said)] == [WorkerEnded, WorkersLeaving, StartHeldBack] and leaves in one.said
    told = put(one.wrote(Tag.REPORT).writes[0])
    assert isinstance(told, Report) and [one.slot for one in told.exits] == [1]


def test_the_exit_of_a_worker_that_is_not_missed_makes_no_other_worker_leave() -> None:
    one = working()
    one.told(WorkerLingers(1, 77))
    assert not one.all_of(LeaveRound)
    one = working()
    one.sees("round", closing(ROUND, Cause.GREW, planned=True))
    one.told(DIES)
    assert not one.all_of(LeaveRound), "they leave already, at a commit"
    alone = Agent.working(round(1, {"a": 1, "b": 1}), IN_PLACE)
    alone.told(WorkerLinked(0))
    alone.told(WorkerLingers(0, 77, failed=True))
    assert not alone.all_of(LeaveRound)


def leading(of: Round) -> Agent:
    """Return two linked workers of node a, which leads the job, in this round."""
    one = Agent.working(of, IN_PLACE)
    one.sees("leader", Leadership("a", life("a")))
    one.told(WorkerLinked(0))
    one.told(WorkerLinked(1))
    return one


def test_a_leader_alone_in_its_round_reports_a_failure_with_the_release() -> None:
    one = leading(round(1, {"a": 2}))
    one.exits(1, exit(1, 1, code=-9, at=one.now))
    assert not one.all_of(Transact) and one.wake_at is not None and one.wake_at <= one.now + RELEASE_S
    one.told(WorkerWaiting(0, 1))
    record, told = (put(write) for write in one.wrote(Tag.NODE).writes)
    assert isinstance(record, Node) and record.released == 1
    assert isinstance(told, Report) and told.failure is not None


def test_a_leader_reports_a_failure_at_once_if_its_workers_stay_or_another_node_must_know() -> None:
    one = leading(round(1, {"a": 2}))
    one.exits(1, exit(1, 1, code=-9, at=one.now))
    one.at(one.now + RELEASE_S)
    assert one.wrote(Tag.REPORT), "the other worker does not leave"
    for several in (leading(ROUND), working()):
        several.exits(1, exit(1, 1, code=-9, at=several.now))
        assert several.wrote(Tag.REPORT)


def test_a_job_that_is_to_stop_at_once_gives_its_workers_no_time_to_save() -> None:
    one = working()
    one.sees("spec", replace(IN_PLACE, stop=True, kill=True))
    stop = one.one(StopWorkers)
    assert (stop.signal, stop.grace_s) == (SIGKILL, 0.0) and not one.all_of(LeaveRound)


def test_a_return_to_a_checkpoint_stops_the_workers_of_the_round_and_keeps_fresh_spares() -> None:
    one = working()
    one.state = replace(one.state, standbys={5: Life.WAITING})
    one.sees("round", replace(closing(ROUND), anew=True))
    assert one.one(StopWorkers).slots == (0, 1) and not one.all_of(LeaveRound)


def test_a_return_to_a_checkpoint_also_stops_workers_that_have_left_the_round() -> None:
    one = working()
    one.sees("round", closing(ROUND, Cause.GREW, planned=True))
    one.told(WorkerWaiting(0, 1, age=Age(1, 5)))
    one.sees("round", replace(closing(ROUND, Cause.GREW), anew=True))
    assert sorted(stop.slots or () for stop in one.all_of(StopWorkers)) == [(0,), (1,)]


def test_a_node_says_which_of_its_waiting_workers_hold_the_newest_state() -> None:
    one = working()
    one.sees("round", closing(ROUND))
    one.told(WorkerWaiting(0, 1, age=Age(1, 5)))
    one.told(WorkerWaiting(1, 1, age=Age(1, 6)))
    assert (own_record(one).age, own_record(one).holders) == (Age(1, 6), (1,))


def test_of_a_sharded_state_workers_hold_parts_that_did_not_agree_on_it_before_their_round_ended() -> None:
    """The round ended while its workers were given their parts. All have the parts of the round before."""
    one = working()
    one.sees("round", closing(ROUND))
    one.told(WorkerWaiting(0, 1, age=Age(1, 5), sharded=True))
    one.told(WorkerWaiting(1, 1, age=Age(0, 5), sharded=True))
    assert (own_record(one).age, own_record(one).holders) == (Age(1, 5), (0, 1))


def test_spares_wait_beside_a_full_world_and_no_more_than_were_asked_for() -> None:
    one = Agent(IN_PLACE, slots=4)
    one.state = replace(one.state, config=replace(one.state.config, spares=1))
    one.sees("spec", IN_PLACE)
    one.sees("round", ROUND)
    one.sees("leader", None)
    one.sees("nodes/a", None)
    one.holds_lease()
    one.answered(Tag.NODE)
    assert one.state.standbys == {2: Life.STARTING}
    one.told(WorkerWaiting(2, 0))
    one.state = replace(one.state, standbys={**one.state.standbys, 3: Life.STARTING})  # one worker too many
    one.told(WorkerWaiting(3, 0))
    assert one.one(StopWorkers).slots == (3,)


def test_workers_that_have_just_left_a_round_stay_though_the_limits_are_smaller_now() -> None:
    """The others leave the round as its closing says, and the agent does not know of the closing yet. The
    workers may have the only copy of their parts of the state."""
    one = working()
    one.sees("spec", replace(IN_PLACE, limits=Limits(1, 1)))
    one.told(WorkerWaiting(0, 1, age=Age(1, 5), sharded=True))
    one.told(WorkerWaiting(1, 1, age=Age(1, 5), sharded=True))
    assert not one.all_of(StopWorkers)
    one.sees("round", closing(ROUND, Cause.SCALED, planned=True))
    assert one.state.standbys == {0: Life.WAITING, 1: Life.WAITING} and not one.all_of(StopWorkers)
    one.sees("round", round(2, {"b": 1}))
    assert one.one(StopWorkers).slots == (0, 1), "the next world is full without them"


def test_a_worker_that_finished_is_not_missed() -> None:
    one = working()
    one.exits(1, exit(1, 1, code=0))
    assert not one.all_of(StartStandbys)


def test_a_round_formed_on_a_worker_that_is_being_sent_away_is_given_up() -> None:
    one = working()
    one.state = replace(one.state, standbys={3: Life.STOPPING})
    one.sees("round", closing(ROUND))
    one.told(WorkerWaiting(0, 1))
    one.told(WorkerWaiting(1, 1))
    one.answered(Tag.NODE)
    seat = replace(members({"a": 2})[0], slots=(0, 3))
    one.sees("round", replace(ROUND, number=2, members=(seat,), store=f"a.example:{NEXT_PORT}"))
    assert not one.all_of(StartWorkers) and one.state.released.round == 2


def holding_parts() -> Agent:
    """Return a node whose two workers have left a round after a failure, each with a part of the state."""
    one = working()
    one.sees("round", closing(ROUND))
    for slot in (0, 1):
        one.told(WorkerWaiting(slot, 1, age=Age(1, 5), sharded=True))
    one.answered(Tag.NODE)
    return one


def test_a_round_formed_on_a_worker_that_has_ended_with_its_part_is_given_up() -> None:
    """The leader has not heard of the worker's end. Another node may have a copy of the part."""
    one = holding_parts()
    one.exits(0, exit(1, 1, code=-9))
    one.sees("round", replace(ROUND, number=2, store=f"a.example:{NEXT_PORT}"))
    assert not one.all_of(StartWorkers) and one.state.released.round == 2


def test_parts_are_kept_for_a_while_beside_a_full_world_that_follows_a_failure() -> None:
    """That world may fail before it has formed, and the next may need the parts."""
    one = holding_parts()
    one.sees("spec", replace(IN_PLACE, limits=Limits(1, 1)))
    one.sees("round", replace(round(2, {"b": 1}), cause=Cause.WORKER_FAILED, since=NOW))
    assert not one.all_of(StopWorkers)
    one.at(NOW + KEEP_S)
    assert one.one(StopWorkers).slots == (0, 1)


def test_a_worker_that_ends_just_before_its_round_begins_fails_in_this_round() -> None:
    """The news of its end comes after the round: the agent was paused, and the fence killed its workers."""
    one = working()
    one.sees("round", closing(ROUND))
    one.told(WorkerWaiting(0, 1))
    one.told(WorkerWaiting(1, 1))
    one.answered(Tag.NODE)
    one.sees("round", replace(ROUND, number=2, store=f"a.example:{NEXT_PORT}"))
    assert one.one(StartWorkers).waiting == (0, 1)
    one.exits(1, replace(exit(1, 1, code=-9), fenced=True))
    crew = one.state.crew
    assert crew is not None and crew.round.number == 2
    assert crew.workers == {0: Life.TRAINING, 1: Life.FENCED}


def test_survivors_are_seated_before_newcomers_and_spares_only_in_their_place() -> None:
    a, b = node("a", 4), node("b", 2)
    last = replace(round(1, {"a": 2, "b": 2}), phase=Phase.CLOSING)
    free = [replace(n, released=1) for n in (a, b)]
    formed = seating.form(free, last, Limits(1, 4), (), NOW)
    assert [m.slots for m in formed] == [(0, 1), (0, 1)]
    with_spare = [replace(free[0], slots=(0, 2, 3), most=2), free[1]]
    assert [m.slots for m in seating.form(with_spare, last, Limits(1, 8), (), NOW)] == [(0, 2), (0, 1)]


def test_a_worker_that_dies_while_all_leave_in_good_order_has_them_leave_at_once() -> None:
    one = working()
    one.sees("round", closing(ROUND, Cause.GREW, planned=True))
    one.exits(1, exit(1, 1, code=-9))
    assert not one.one(LeaveRound).planned
    told = put(one.wrote(Tag.REPORT).writes[0])
    assert isinstance(told, Report) and told.exits[0].code == -9


def test_the_leader_makes_the_end_unplanned_for_all_nodes_if_a_worker_dies_meanwhile() -> None:
    closes = replace(closing(ROUND, Cause.GREW, planned=True), since=NOW)
    nodes = [node("a", 2), node("b", 2)]
    there = view(IN_PLACE, closes, nodes, [report("b", 1, exit(0, 2, code=-9))])
    assert written(leader.decide(there, NOW), "round") == replace(closes, planned=False)


def test_a_worker_left_out_gives_its_part_after_another_died_while_all_left() -> None:
    """All have left before the leader could say that the end is not as planned: no worker has passed on its
    part at the last commit."""
    closes = replace(closing(ROUND, Cause.SCALED, planned=True), left_out=(RankRange(2, 4),))
    holding = {"released": 1, "age": Age(1, 5), "sharded": True}
    nodes = [
        replace(node("a", 2), ready=(0, 1), holders=(0, 1), **holding),
        replace(node("b", 2), ready=(0,), holders=(0,), **holding),
    ]
    smaller = replace(IN_PLACE, limits=Limits(1, 2))
    calm = leader.decide(view(smaller, closes, nodes), NOW)
    assert not next_round(calm).handover
    disturbed = next_round(leader.decide(view(smaller, closes, nodes, [report("b", 1, exit(1, 3))]), NOW))
    assert disturbed.handover and [(m.node, m.slots) for m in disturbed.members] == [
        ("a", (0, 1)),
        ("b", (0,)),
    ]


def test_a_job_whose_workers_had_all_finished_when_its_round_was_closed_is_over() -> None:
    one = working()
    one.sees("round", closing(ROUND, Cause.GREW, planned=True))
    one.exits(1, exit(0, 0, code=0))
    one.exits(1, exit(1, 1, code=0))
    told = one.state.report
    assert told is not None and told.finished
    closed = closing(ROUND, Cause.GREW, planned=True)
    nodes = [replace(node(name, 2), released=1) for name in "ab"]
    there = view(IN_PLACE, closed, nodes, [report("a", 1, finished=True), report("b", 1, finished=True)])
    ended = written(leader.decide(there, NOW), "round")
    assert isinstance(ended, Round) and ended.outcome is Outcome.SUCCEEDED
