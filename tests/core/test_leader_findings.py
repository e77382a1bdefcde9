"""When the leader names workers that hang, and stragglers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from elasticd.core.facts import BadSlot, Cause, Hang, Laggard, Paces, Phase, SlotPace, Stall, Stragglers
from elasticd.core.hang.judging import REPEAT_S, Doing, Look, Patience, Why, allowance
from elasticd.core.leader import Plan, View, decide, hear_paces, see
from elasticd.core.leader.lagging import name_stragglers
from elasticd.core.persistent_map import PersistentMap
from elasticd.core.ports import Changes, Entry, Fact, Listing
from elasticd.core.reasons import SlotBad, WorkerKeepsUp, WorkerStraggling
from elasticd.core.straggler import PERIODS
from tests.core.build import NOW, life, node, not_listed, report, round, spec, view, written

ALLOWED = allowance([0.1] * 10, 10, Patience())
assert ALLOWED is not None


def seen(view: View, key: str, fact: Fact | None, revision: int = 50, at: float = NOW) -> View:
    return see(view, Changes((Entry(key, fact, revision, revision),)), key, at)


# ---------------------------------------------------------------- who hangs


def of_two_nodes(phase: Phase = Phase.LIVE, *, released: int = 4) -> View:
    """Return the reports of two nodes with one worker each, in round 5. ``released``: by node a."""
    nodes = [node("a", 1, released=released), node("b", 1, released=4)]
    return view(spec(), round(5, {"a": 1, "b": 1}, phase, closing=Cause.GREW, planned=True), nodes)


def stall(name: str, doing: Doing, still_s: float, number: int = 5) -> Stall:
    assert ALLOWED is not None
    look = Look(name, 0, 0 if name == "a" else 1, 70, still_s, doing, "job.py:7")
    return Stall(name, life(name), number, (look,), ALLOWED)


def told(view: View, *stalls: Stall, at: float = NOW) -> View:
    for one in stalls:
        view = seen(view, f"stalls/{one.node}", one, at=at)
    return view


def verdict(plan: Plan) -> Hang:
    fact = written(plan, "hang")
    assert isinstance(fact, Hang)
    return fact


@pytest.mark.parametrize("phase", [Phase.LIVE, Phase.CLOSING])
def test_a_worker_that_does_not_leave_is_judged_together_with_the_others_that_have_not_left(
    phase: Phase,
) -> None:
    asleep = told(of_two_nodes(released=5), stall("b", Doing.ASLEEP, 3599.0))
    if phase is Phase.LIVE:
        asleep = replace(asleep, round=round(5, {"a": 1, "b": 1}))
        asleep = told(replace(asleep, reports=PersistentMap({"a": report("a", 5, finished=True)})))
    else:
        asleep = replace(asleep, round=of_two_nodes(phase).round)
    plan = decide(asleep, NOW)
    assert not plan.writes and plan.wake_at == NOW + 1.0
    found = verdict(decide(asleep, NOW + 1.0))
    assert (found.verdict.why, found.asks) == (Why.ASLEEP, False)


def test_while_a_node_has_not_told_the_leader_only_asks_and_only_where_one_is_stopped() -> None:
    assert not decide(told(of_two_nodes(), stall("b", Doing.ASLEEP, 3601.0)), NOW).writes
    found = verdict(decide(told(of_two_nodes(), stall("b", Doing.STOPPED, 10.0)), NOW))
    assert found.asks and found.verdict.guilty[0].node == "b"


@pytest.mark.parametrize(("others", "new", "guilty"), [
    (Doing.WAITING, False, ["b"]),
    (Doing.ASLEEP, False, ["a", "b"]),
    (Doing.BUSY, False, []),  # the worker that sleeps may wait for it
    (Doing.WAITING, True, []),  # the worker may still import modules, from far away
])  # fmt: skip
def test_a_survivor_asleep_before_the_first_step_is_blamed_once_all_nodes_have_reported(
    others: Doing, new: bool, guilty: list[str]
) -> None:
    """The same holds in a world of one node."""

    def before(name: str, doing: Doing, still_s: float) -> Stall:
        made = stall(name, doing, still_s)
        return replace(made, looks=tuple(replace(k, step=0, new=new) for k in made.looks))

    assert ALLOWED is not None
    one = told(of_two_nodes(), before("b", Doing.ASLEEP, ALLOWED.first_s))
    assert not decide(one, NOW).writes
    both = told(one, before("a", others, ALLOWED.first_s))
    plan = decide(both, NOW)
    assert [k.node for k in verdict(plan).verdict.guilty] == guilty if guilty else not plan.writes


def test_the_leader_does_not_wait_for_the_report_of_a_lost_node() -> None:
    """The round of a lost node stays closing for as long as a worker sleeps in it."""
    asleep = told(of_two_nodes(Phase.CLOSING), stall("a", Doing.ASLEEP, 3601.0))
    assert asleep.nodes is not None and asleep.round is not None
    broken = replace(asleep.round, closing=Cause.NODE_LOST, planned=False)
    lost = replace(
        asleep, round=broken, nodes=asleep.nodes.updated({"b": None}), absence_counts_from=NOW + 1.0
    )
    plan = decide(lost, NOW)
    assert plan.wake_at == NOW + 1.0 and not plan.writes
    assert verdict(decide(lost, NOW + 1.0)).verdict.why is Why.ASLEEP


def test_what_was_told_grows_older_until_its_limit() -> None:
    waiting = told(of_two_nodes(), stall("a", Doing.WAITING, 10.0), stall("b", Doing.ASLEEP, 10.0))
    assert ALLOWED is not None
    plan = decide(waiting, NOW)
    assert not plan.writes
    at, looked = NOW, 0
    while not plan.writes:
        assert plan.wake_at is not None and plan.wake_at > at
        at, looked = plan.wake_at, looked + 1
        plan = decide(waiting, at)
    assert at == pytest.approx(NOW + ALLOWED.asleep_s - 10.0, abs=0.02) and looked < 10
    assert verdict(plan).verdict.guilty[0].node == "b", "the other one waits for it"


def test_the_same_stall_listed_again_is_as_old_as_before() -> None:
    b = stall("b", Doing.ASLEEP, 10.0)
    heard = told(of_two_nodes(), b)
    again = see(heard, Listing((Entry("stalls/b", b, 50, 50),), 90), "stalls/", NOW + 100)
    assert again.stalls == heard.stalls
    assert not see(heard, Listing((), 90), "stalls/", NOW + 100).stalls


def test_a_verdict_is_not_repeated_for_a_while_and_a_new_leader_keeps_to_that() -> None:
    waiting = told(of_two_nodes(), stall("a", Doing.WAITING, 10.0), stall("b", Doing.STOPPED, 10.0))
    found = verdict(decide(waiting, NOW))
    assert not found.asks
    named = seen(waiting, "hang", found, 60)
    plan = decide(named, NOW + 1)
    assert not plan.writes and plan.wake_at == NOW + REPEAT_S
    assert decide(named, NOW + REPEAT_S).writes
    assert decide(replace(named, hang=replace(found, round=4)), NOW + 1).writes, "that was another round"
    assert not decide(not_listed(waiting, "hang"), NOW).writes, "what is written was not listed yet"


def test_agents_are_not_asked_twice_in_a_row_and_are_judged_once_all_have_reported() -> None:
    one = told(of_two_nodes(), stall("b", Doing.STOPPED, 10.0))
    asked = seen(one, "hang", verdict(decide(one, NOW)), 60)
    plan = decide(asked, NOW + 1)
    assert not plan.writes and plan.wake_at == NOW + REPEAT_S
    found = verdict(decide(told(asked, stall("a", Doing.WAITING, 1.0)), NOW + 1))
    assert not found.asks and found.verdict.others == 1


def test_an_older_verdict_that_is_seen_late_changes_nothing() -> None:
    newer = seen(of_two_nodes(), "hang", Hang(5, None), 60)  # type: ignore[arg-type]
    assert seen(newer, "hang", Hang(5, None, asks=True), 59) == newer  # type: ignore[arg-type]
    assert seen(newer, "hang", None, 61).hang is None


def test_the_round_goes_first() -> None:
    told_so = told(of_two_nodes(), stall("a", Doing.WAITING, 10.0), stall("b", Doing.STOPPED, 10.0))
    stopping = replace(told_so, spec=spec(stop=True), round=round(5, {"a": 1, "b": 1}))
    assert [write.key for write in decide(stopping, NOW).writes] == ["round"]


# ---------------------------------------------------------------- who lags behind

FAST, SLOW = {"a": 0.05, "b": 0.05}, {"a": 0.05, "b": 0.065}


def paces(name: str, number: int, own_s: float, *, of_round: int = 5, bad: str = "") -> Paces:
    rank = 0 if name == "a" else 1
    gpu = (BadSlot(0, rank, bad),) if bad else ()
    return Paces(name, life(name), of_round, number, (SlotPace(0, rank, own_s),), gpu)


def lived(view: View, own_s: Mapping[str, float], periods: int, since: int = 0) -> View:
    for number in range(since + 1, since + periods + 1):
        for name, s in own_s.items():
            view = hear_paces(view, [paces(name, number, s)])
    return view


def live_view() -> View:
    return view(spec(), round(5, {"a": 1, "b": 1}), [node("a", 1, released=4), node("b", 1, released=4)])


def stragglers(plan: Plan) -> Stragglers:
    fact = written(plan, "stragglers")
    assert isinstance(fact, Stragglers)
    return fact


def test_a_slow_worker_is_named_once_and_said_to_keep_up_again() -> None:
    assert not decide(live_view(), NOW).writes
    plan = decide(lived(live_view(), SLOW, PERIODS - 1), NOW)
    assert stragglers(plan).slow == () and plan.reasons == ()
    slow = lived(live_view(), SLOW, PERIODS)
    plan = decide(slow, NOW)
    assert plan.reasons == (WorkerStraggling("b", 0, 1, 1.3),)
    assert stragglers(plan).slow == (Laggard("b", 0, 1, 1.3),)
    named = seen(slow, "stragglers", stragglers(plan), 60)
    assert not decide(named, NOW).writes
    plan = decide(lived(named, FAST, PERIODS, PERIODS), NOW)
    assert plan.reasons == (WorkerKeepsUp("b", 0, 1),) and stragglers(plan).slow == ()


def test_a_period_is_complete_once_each_node_has_reported_and_counts_each_node_once() -> None:
    seen_a = lived(live_view(), {"a": 0.05}, 3)
    assert seen_a.comparison.found is None
    once = hear_paces(seen_a, [paces("b", 1, 0.05)])
    assert len(once.comparison.watch.periods) == 1
    again = hear_paces(once, [paces("b", 1, 0.05), paces("a", 4, 0.05)])
    assert len(again.comparison.watch.periods) == 1


def test_the_paces_of_a_lost_node_are_forgotten() -> None:
    heard = lived(live_view(), FAST, 1)
    lost = seen(heard, "nodes/b", None)
    assert set(heard.comparison.paces) == {"a", "b"} and set(lost.comparison.paces) == {"a"}


def test_paces_that_come_before_the_round_they_are_of_count_once_it_is_seen() -> None:
    early = lived(replace(live_view(), round=round(4, {"a": 1})), FAST, 1)
    assert early.comparison.found is None
    late = seen(early, "round", round(5, {"a": 1, "b": 1}))
    assert len(late.comparison.watch.periods) == 1 and late.comparison.round == 5
    other = seen(late, "round", round(6, {"a": 1, "b": 1}))
    assert other.comparison.watch.periods == () and other.comparison.found is None
    assert not name_stragglers(other).writes, "of the new round nothing is known"


def test_a_bad_gpu_is_named_at_once() -> None:
    bad = hear_paces(live_view(), [replace(paces("b", 1, 0.05, bad="XID 79"), slots=())])
    plan = decide(bad, NOW)
    assert plan.reasons == (SlotBad("b", 0, 1, "XID 79"),)
    assert not decide(seen(bad, "stragglers", stragglers(plan), 60), NOW).writes


def test_stragglers_of_an_earlier_leader_stay_named_until_this_leader_has_seen_a_window() -> None:
    before = Stragglers(5, 0.05, (Laggard("b", 0, 1, 1.3),))
    known = seen(live_view(), "stragglers", before, 60)
    assert not decide(lived(known, FAST, PERIODS - 1), NOW).writes
    assert decide(lived(known, FAST, PERIODS), NOW).reasons == (WorkerKeepsUp("b", 0, 1),)
    assert not decide(lived(not_listed(known, "stragglers"), FAST, 1), NOW).writes
