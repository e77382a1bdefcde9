"""What an agent does about workers that stand still: when it looks, which worker it condemns, and when it
changes its verdict."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from elasticd.core import agent
from elasticd.core.agent.agent_state import Leaving, Stopping
from elasticd.core.facts import Cause, Hang, Limits, Member, Phase, Report, Round, Spec, Stall
from elasticd.core.hang.hang_messages import (
    Condemn,
    Event,
    EvidenceKept,
    HangChanged,
    KeepEvidence,
    LookAt,
    Looked,
    ReadSteps,
    ReportStall,
    Sample,
    StallWithdrawn,
    StepsRead,
    VitalsSampled,
    WithdrawStall,
    Woke,
)
from elasticd.core.hang.judging import Doing, Look, Patience, ProcessState, Verdict, Why, in_groups, judge
from elasticd.core.hang.standstill import Beat, Inspected, Vitals
from elasticd.core.hang.watching import ANSWERS_S, LOOK_PATIENCE_S, WRITE_PATIENCE_S, leaving_s, start, step
from elasticd.core.lifecycle import Life
from elasticd.core.ports import Entry
from elasticd.core.reasons import VerdictDropped, WorkersHung
from elasticd.core.thread_activity import ActivityKind, ThreadActivity
from tests.core.build import crew

STEP_S = 0.1
LIMITS = Limits(1, 9)
LEAVING = Leaving(planned=True, hurried=False, grace_s=2.0, since=0.0)
BROKEN = Report("a", "i", 1, broken=True)


@dataclass
class Worker:
    """A worker, asleep outside of Python unless the test says otherwise."""

    slot: int
    times: list[float] = field(default_factory=list)
    steps_before: int = 0
    state: ProcessState = ProcessState.SLEEPING
    where: ThreadActivity | None = None

    @property
    def vitals(self) -> Vitals:
        return Vitals(self.state, 0.0)

    def beat(self, known: int) -> Beat:
        times = tuple(self.times[known:][-250:])
        return Beat(self.slot, self.slot, 100 + self.slot, self.steps_before, len(self.times), times)


class Node:
    """One agent with two workers. ``others``: nodes of one worker each. ``looks``, ``keeps``: whether looks
    and the writing of evidence come to an end. ``writes``: whether the store lets the agent withdraw its
    report."""

    def __init__(self, patience: Patience | None = None, others: int = 0) -> None:
        self.now = 100.0
        self.workers = [Worker(0), Worker(1)]
        self.looks = self.keeps = self.writes = True
        self.said: list[Any] = []
        self.condemned: list[tuple[int, float]] = []
        self.told: list[tuple[Stall, float]] = []
        self.untold: list[float] = []
        self.looked: list[float] = []
        self.kept: list[KeepEvidence] = []
        me = agent.Identity("a", "i", "h", (0, 1), "h", 1)
        member = Member("a", "i", (0, 1), 0)
        more = tuple(Member(f"other-{n}", "i", (0,), 2 + n) for n in range(others))
        live = Round(1, Phase.LIVE, (member, *more), "s:1", Cause.START, 0.0)
        self.state = replace(
            agent.AgentState(me, Spec(LIMITS, LIMITS, "job.py", "f"), agent.AgentConfig(60.0), 1),
            crew=crew(live),
            seen={"round": Entry("round", live, 1, 1)},
        )
        self.watching = start(patience or Patience(), self.now)
        self.due: float = self.now

    def crew(self, **how: Any) -> None:
        assert self.state.crew is not None
        self.state = replace(self.state, crew=replace(self.state.crew, **how))

    def handle(self, event: Event) -> None:
        todo = [event]
        while todo:
            result = step(self.watching, todo.pop(), self.state, self.now)
            assert (result.wake_at is None) == any(isinstance(a, ReadSteps | Sample) for a in result.actions)
            self.watching, self.due = result.watching, result.wake_at or self.due
            self.said += result.reasons
            for action in result.actions:
                match action:
                    case ReadSteps(known):
                        todo.append(StepsRead(tuple(w.beat(known.get(100 + w.slot, w.steps_before))
                                                    for w in self.workers)))  # fmt: skip
                    case Sample(pids):
                        todo.append(VitalsSampled({slot: self.workers[slot].vitals for slot in pids}))
                    case LookAt(number, slots):
                        self.looked.append(self.now)
                        sights = (
                            Inspected(s, s, self.workers[s].vitals, self.workers[s].where) for s in slots
                        )
                        todo += [Looked(number, tuple(sights))] if self.looks else []
                    case KeepEvidence(number):
                        self.kept.append(action)
                        todo += [EvidenceKept(number, "/evidence")] if self.keeps else []
                    case Condemn(slot):
                        self.condemned.append((slot, self.now))
                    case ReportStall(stall):
                        self.told.append((stall, self.now))
                    case WithdrawStall(number):
                        assert self.told
                        self.untold.append(self.now)
                        todo += [StallWithdrawn(number)] if self.writes else []

    def train(self, seconds: float, step_s: float = STEP_S) -> None:
        until = self.now + seconds
        while self.now < until:
            for worker in self.workers:
                worker.times.append(self.now)
            if self.now >= self.due:
                self.handle(Woke())
            self.now += step_s

    def stand_still(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until and not self.condemned:
            self.handle(Woke())
            assert self.due > self.now
            self.now = min(self.due, until)

    def next_round(self) -> None:
        """Let the same processes enter another world."""
        assert self.state.crew is not None
        self.crew(round=replace(self.state.crew.round, number=self.state.crew.round.number + 1))
        for worker in self.workers:
            worker.steps_before = len(worker.times)
        self.handle(Woke())

    def stop(self) -> None:
        self.workers[1].state = ProcessState.STOPPED


def test_a_stopped_worker_is_condemned_after_ten_steps_and_the_evidence_is_there_before() -> None:
    node = Node()
    node.train(10.0)
    node.stop()
    last = node.now - STEP_S
    node.stand_still(30.0)
    ((slot, at),) = node.condemned
    assert slot == 1 and 0.99 < at - last < 1.5
    (said,) = node.said
    assert said.verdict.why is Why.STOPPED and said.evidence == "/evidence"
    assert node.kept[0].look == 1, "what was found goes into the evidence"


@pytest.mark.parametrize(("looks", "keeps"), [(True, False), (False, True), (False, False)])
def test_a_look_or_a_disk_that_hangs_delays_the_verdict_no_longer_than_its_patience(
    looks: bool, keeps: bool
) -> None:
    node = Node()
    node.train(10.0)
    node.stop()
    node.looks, node.keeps = looks, keeps
    last = node.now - STEP_S
    if not looks:
        node.stand_still(10.0)
        assert not node.condemned and len(node.looked) == 1
        node.looks = True
    node.stand_still(60.0)
    ((slot, at),) = node.condemned
    patience_s = (LOOK_PATIENCE_S if not looks else 0) + (WRITE_PATIENCE_S if not keeps else 0)
    assert slot == 1 and at - last < 10.0 + patience_s
    assert node.said[0].evidence == ("/evidence" if keeps else "")


def test_while_looks_never_return_only_stopped_workers_are_reported() -> None:
    """The leader would take a node that reports no worker for a node without workers."""
    node = Node(Patience(floor_s=0.1), others=1)
    node.train(10.0)
    node.looks = False
    node.stand_still(100.0)
    assert len(node.looked) > 1 and not node.told
    node.stop()
    node.stand_still(60.0)
    (stall, _), *_ = node.told
    assert [(look.slot, look.doing) for look in stall.looks] == [(1, Doing.STOPPED)]
    assert [slot for slot, _ in node.condemned] == [1]


def test_an_answer_that_comes_after_its_time_is_not_heard() -> None:
    node = Node()
    node.train(10.0)
    node.looks = False
    node.stop()
    node.stand_still(3.0)
    stopped = Inspected(1, 1, Vitals(ProcessState.STOPPED, 0.0), None)
    node.workers[1].state = ProcessState.SLEEPING
    node.train(5.0)
    before = node.watching
    node.handle(Looked(1, (stopped,)))
    node.handle(EvidenceKept(1, "/elsewhere"))
    assert node.watching == before and not node.kept


def test_before_the_first_step_only_stopped_workers_are_judged() -> None:
    node = Node()
    node.stand_still(1000.0)
    assert not node.condemned
    stopped = node.now
    node.stop()
    node.stand_still(30.0)
    ((slot, at),) = node.condemned
    assert slot == 1 and 9.0 < at - stopped < 13.0, "not for how long it has taken to begin"


def test_a_worker_stopped_during_a_standstill_is_condemned_by_the_time_since_it_stopped() -> None:
    node = Node()
    node.train(10.0)
    node.stand_still(20.0)  # in an evaluation, for example
    stopped = node.now
    node.stop()
    node.stand_still(30.0)
    ((slot, at),) = node.condemned
    assert slot == 1 and 0.49 < at - stopped < 3.0


def test_one_stopped_before_its_first_step_is_judged_by_the_steps_of_earlier_rounds() -> None:
    node = Node()
    node.train(10.0)
    node.next_round()
    node.stop()
    began = node.now
    node.stand_still(30.0)
    ((slot, at),) = node.condemned
    assert slot == 1 and 0.99 < at - began < 3.0


def test_a_worker_that_is_slow_to_its_first_step_is_not_judged() -> None:
    node = Node()
    node.train(10.0)
    node.next_round()
    node.stand_still(1000.0)
    assert not node.condemned


def test_each_of_several_nodes_reports_workers_that_are_slow_to_the_first_step() -> None:
    node = Node(others=1)
    node.train(10.0)
    node.next_round()
    began = node.now
    node.stand_still(299.0)
    assert not node.told
    node.stand_still(10.0)
    (stall, at), *_ = node.told
    assert at - began < 301.0 and [(k.step, k.new) for k in stall.looks] == [(0, False), (0, False)]
    node.handle(HangChanged(Hang(2, Verdict(Why.ASLEEP, (stall.looks[1],)))))
    node.stand_still(10.0)
    ((slot, _),) = node.condemned
    assert slot == 1


def test_a_worker_stopped_while_it_is_to_leave_the_round_is_condemned() -> None:
    node = Node()
    node.train(10.0)
    node.crew(order=replace(LEAVING, planned=False))
    node.stand_still(30.0)
    assert not node.condemned, "it may be in a long step"
    node.stop()
    node.stand_still(30.0)
    assert [slot for slot, _ in node.condemned] == [1]


@pytest.mark.parametrize(
    ("how", "is_judged"),
    [
        ({}, True),
        ({"order": LEAVING}, True),
        ({"order": replace(LEAVING, planned=False)}, True),
        ({"order": LEAVING, "report": BROKEN}, True),
        ({"report": BROKEN}, False),  # the worker waits to be told to leave
        ({"order": Stopping(2.0)}, False),
        ({"workers": {0: Life.FENCED, 1: Life.TRAINING}}, False),
        ({"workers": {0: Life.WAITING, 1: Life.FAILED}}, False),
    ],
)
def test_workers_are_judged_in_their_round_and_on_their_way_out_of_it_if_they_keep_their_process(
    how: dict[str, Any], is_judged: bool
) -> None:
    node = Node()
    node.train(10.0)
    node.crew(**how)
    node.stop()
    node.stand_still(30.0)
    assert [slot for slot, _ in node.condemned] == ([1] if is_judged else [])


def test_how_long_leaving_may_take_is_learned_from_the_steps() -> None:
    node = Node()
    assert leaving_s(node.watching) < 60.0
    for at in range(0, 700, 100):
        node.now = 1000.0 + at
        for worker in node.workers:
            worker.times.append(node.now)
        node.handle(Woke())
    assert leaving_s(node.watching) >= 200.0


def test_what_happened_while_the_agent_itself_was_stopped_counts_for_nothing() -> None:
    node = Node()
    node.train(10.0)
    node.stop()
    node.now += 500.0
    woken = node.now
    node.handle(Woke())
    assert not node.looked
    node.stand_still(30.0)
    assert [at >= woken + 0.99 for _, at in node.condemned] == [True]


def test_a_worker_that_goes_on_while_the_evidence_is_written_is_spared() -> None:
    node = Node()
    node.train(10.0)
    node.stop()
    node.keeps = False
    node.stand_still(2.0)
    assert node.kept and not node.condemned
    node.workers[1].state = ProcessState.SLEEPING
    node.train(5.0)
    assert not node.condemned and not node.said


def test_a_worker_that_leaves_the_round_while_the_evidence_is_written_is_spared() -> None:
    node = Node()
    node.train(10.0)
    node.stop()
    node.keeps = False
    node.stand_still(2.0)
    assert node.kept
    node.next_round()
    node.stand_still(WRITE_PATIENCE_S)
    assert len(node.said) == 1 and not node.condemned, "the same process is in another round"


def test_sleeping_workers_that_show_no_stacks_are_never_condemned() -> None:
    """They are no Python processes, so they show no stacks."""
    node = Node(Patience(floor_s=0.1, ceiling_s=60.0))
    node.train(10.0)
    node.stand_still(1000.0)
    assert not node.condemned, "who does not say where it is, is not judged without one who waits for it"
    assert len(node.looked) < 30, "they are looked at less and less often"


def test_a_place_where_a_worker_was_killed_has_twice_the_limit_next_time() -> None:
    node = Node(others=1)
    node.train(10.0)
    last = node.workers[1].times[-1]
    look = Look("a", 1, 1, len(node.workers[1].times), 60.0, Doing.ASLEEP, "job.py:7")
    asleep, stopped = Verdict(Why.ASLEEP, (look,)), Verdict(Why.STOPPED, (look,))
    elsewhere = Verdict(Why.ASLEEP, (replace(look, place="job.py:8"),))
    before = {(Why.ASLEEP, "job.py:7"): 60.0}

    def is_condemned(verdict: Verdict, still_s: float, killed: Any) -> bool:
        one = Node(others=1)
        one.state, one.workers, one.keeps = node.state, node.workers, False
        one.watching = replace(node.watching, killed=killed, due=last + still_s)
        one.now = last + still_s
        one.handle(HangChanged(Hang(1, verdict)))
        return bool(one.kept)

    assert is_condemned(asleep, 60, {})
    assert not is_condemned(asleep, 119, before)
    assert is_condemned(asleep, 121, before)
    assert is_condemned(stopped, 10, before)
    assert is_condemned(elsewhere, 60, before)


def test_of_several_nodes_the_others_are_told_and_waited_for_but_not_for_long() -> None:
    node = Node(others=1)
    node.train(10.0)
    node.stop()
    last = node.now - STEP_S
    node.stand_still(30.0)
    ((slot, at),) = node.condemned
    ((stall, told_at), *_) = node.told
    assert [(look.slot, look.doing) for look in stall.looks][1] == (1, Doing.STOPPED)
    assert 0.99 < told_at - last < 1.5 and ANSWERS_S <= at - told_at < ANSWERS_S + 0.5
    assert slot == 1


def test_once_all_have_told_the_stopped_one_is_condemned_with_what_the_others_do() -> None:
    node = Node(others=1)
    node.train(10.0)
    node.stop()
    while not node.told:
        node.stand_still(0.1)
    ((stall, told_at),) = node.told
    guilty = stall.looks[1]
    node.handle(HangChanged(Hang(1, Verdict(Why.STOPPED, (guilty,)), asks=True)))
    node.stand_still(0.5)
    assert not node.condemned, "a question is no verdict"
    node.handle(HangChanged(Hang(1, Verdict(Why.STOPPED, (guilty,), 2, "all_reduce", "job.py:7"))))
    node.stand_still(30.0)
    ((slot, at),) = node.condemned
    assert slot == 1 and at - told_at < 1.0
    assert node.said[0].verdict.others_what == "all_reduce"


def test_an_agent_that_is_asked_looks_and_reports_though_its_workers_do_not_hang() -> None:
    node = Node(others=1)
    node.train(10.0)
    node.stand_still(2.0)
    assert not node.told, "they are asleep for less long than a sleeping one may be"
    there = Look("other-0", 0, 2, 100, 2.0, Doing.STOPPED, "job.py:7")
    node.handle(HangChanged(Hang(1, Verdict(Why.STOPPED, (there,)), asks=True)))
    node.stand_still(1.0)
    ((stall, _),) = node.told
    assert [look.rank for look in stall.looks] == [0, 1]
    node.handle(HangChanged(Hang(1, Verdict(Why.STOPPED, (there,), 2))))
    node.stand_still(1.0)
    assert not node.said, "the agent of that worker may still find that it goes on"
    node.next_round()
    (said,) = node.said
    assert (said.round, said.verdict.guilty) == (1, (there,)) and not node.condemned
    assert node.kept[0].look == 1


def test_a_verdict_that_the_agent_of_the_worker_voids_is_not_logged() -> None:
    node = Node(others=1)
    node.train(10.0)
    node.stand_still(60.0)
    there = Look("other-0", 0, 2, 100, 60.0, Doing.ASLEEP, "job.py:7")
    node.handle(HangChanged(Hang(1, Verdict(Why.ASLEEP, (there,), 2))))
    node.stand_still(10.0)
    node.train(10.0)
    node.next_round()
    node.stand_still(10.0)
    assert not node.said and not node.kept


def test_an_agent_too_late_for_a_verdict_logs_it_and_judges_again() -> None:
    node = Node()
    node.train(10.0)
    node.stop()
    node.keeps = False
    node.stand_still(2.0)
    assert node.kept and not node.said
    node.now += 60.0
    woken, node.keeps = node.now, True
    node.handle(Woke())
    (dropped,) = node.said
    assert isinstance(dropped, VerdictDropped) and 50.0 < dropped.late_s < 60.0
    assert dropped.verdict.guilty[0].rank == 1 and not node.condemned
    node.stand_still(30.0)
    ((slot, at),) = node.condemned
    assert slot == 1 and 0.99 <= at - woken < 3.0
    assert isinstance(node.said[1], WorkersHung)


def test_what_the_leader_was_told_is_taken_back_until_that_is_done() -> None:
    """The leader would use the report as long as the round lives, however old the report is."""
    node = Node(others=1)
    node.train(10.0)
    node.stand_still(100.0)
    assert node.told
    node.writes = False
    node.train(10.0)
    assert len(node.untold) > 5
    node.writes = True
    node.train(2.0)
    node.untold.clear()
    node.train(10.0)
    assert not node.untold


def test_a_newcomer_that_waits_with_the_survivors_is_not_in_another_place_than_they() -> None:
    """The newcomer's process has made fewer steps, but as many in this round."""
    node = Node()
    node.train(10.0)
    node.next_round()
    node.workers.append(Worker(2))
    node.crew(workers=dict.fromkeys(range(3), Life.TRAINING))
    node.train(10.0)
    all_reduce = ThreadActivity(ActivityKind.COLLECTIVE, "job.py:7", "all_reduce")
    for worker in node.workers:
        worker.where = all_reduce
    node.stand_still(1000.0)
    assert node.said[0].verdict.why is Why.DEADLOCK


def test_all_that_wait_are_let_live_if_the_last_of_them_came_a_moment_ago() -> None:
    node = Node()
    node.train(10.0)
    node.workers[0].where = ThreadActivity(ActivityKind.COLLECTIVE, "job.py:7", "all_reduce")
    node.workers[1].where = ThreadActivity(ActivityKind.PROGRAM, "job.py:8")
    node.stand_still(1000.0)
    assert not node.condemned
    node.workers[1].where = node.workers[0].where
    looks = len(node.looked)
    while len(node.looked) == looks:
        node.stand_still(1.0)
    node.stand_still(0.5)
    assert not node.condemned
    node.train(1.0)
    assert not node.kept
    node.stand_still(10_000.0)
    assert node.condemned and node.said[0].verdict.why is Why.DEADLOCK
    assert node.looked[-1] - node.looked[-2] < 2.5, "the second look that it takes comes soon"


def test_a_verdict_on_an_old_look_spares_a_worker_that_is_elsewhere_by_now() -> None:
    node = Node(others=1)
    node.train(10.0)
    asleep, awake = (
        ThreadActivity(ActivityKind.OWN, "job.py:7"),
        ThreadActivity(ActivityKind.COLLECTIVE, "job.py:9", "all_reduce"),
    )
    node.workers[0].where = awake
    node.workers[1].where = asleep
    node.stand_still(70.0)
    (stall, _) = node.told[-1]
    verdict = Verdict(Why.ASLEEP, (stall.looks[1],), 2)
    node.workers[1].where = awake
    node.handle(HangChanged(Hang(1, verdict)))
    node.stand_still(5.0)
    assert not node.kept and not node.condemned
    assert node.told[-1][0].looks[1].place == "job.py:9", "the leader hears of it"
    node.workers[1].where = asleep
    node.stand_still(20.0)
    assert not node.condemned, "the verdict is void"
    node.handle(HangChanged(Hang(1, verdict)))
    node.stand_still(5.0)
    assert [slot for slot, _ in node.condemned] == [1]


def test_a_look_without_an_answer_confirms_no_verdict() -> None:
    node = Node(others=1)
    node.train(10.0)
    node.stand_still(70.0)
    (stall, _) = node.told[-1]
    node.looks = False
    node.handle(HangChanged(Hang(1, Verdict(Why.ASLEEP, (replace(stall.looks[1], doing=Doing.ASLEEP),), 2))))
    node.stand_still(2 * LOOK_PATIENCE_S + 1.0)
    assert not node.condemned
    node.looks = True
    node.stand_still(LOOK_PATIENCE_S + 1.0)
    assert [slot for slot, _ in node.condemned] == [1]


def test_a_verdict_on_another_nodes_worker_is_told_once_its_round_ends_and_is_of_one_stall_only() -> None:
    node = Node(others=1)
    there = Look("other-0", 0, 2, 100, 60.0, Doing.ASLEEP, "job.py:7")
    node.train(10.0)
    node.stand_still(60.0)
    node.handle(HangChanged(Hang(1, Verdict(Why.ASLEEP, (there,), 2))))
    node.next_round()
    assert [said.round for said in node.said] == [1]
    node.train(10.0)
    node.stand_still(60.0)
    node.handle(HangChanged(Hang(2, Verdict(Why.ASLEEP, (there,), 2))))
    node.stand_still(20.0)
    node.train(10.0)
    node.told.clear()
    node.stand_still(450.0)
    assert [said.round for said in node.said] == [1], "it has gone on since"
    assert node.told, "and is asked about anew"
    node.handle(HangChanged(Hang(2, Verdict(Why.ASLEEP, (there,), 2))))
    node.next_round()
    assert [said.round for said in node.said] == [1, 2]


def test_a_look_in_between_does_not_put_off_the_second_look_at_workers_that_wait_for_each_other() -> None:
    """The step takes so long that ordinary looks come more often than the second look is due."""
    node = Node(Patience(fixed_s=60.0))
    node.train(200.0, step_s=8.0)
    for worker in node.workers:
        worker.where = ThreadActivity(ActivityKind.COLLECTIVE, "job.py:1", "all_reduce")
    began = node.now
    node.stand_still(300.0)
    ((_, at),) = node.condemned[:1]
    assert node.said[0].verdict.why is Why.DEADLOCK
    assert at - began < 60.0 + 1.0


@pytest.mark.parametrize("patience", [Patience(fixed_s=60.0), Patience(ceiling_s=60.0)])
@pytest.mark.parametrize("step_s", [0.1, 2.0, 8.0])
@pytest.mark.parametrize("others", [0, 1])
def test_workers_that_all_wait_are_found_at_their_limit(
    patience: Patience, step_s: float, others: int
) -> None:
    node = Node(patience, others)
    node.train(30 * step_s, step_s)
    for worker in node.workers:
        worker.where = ThreadActivity(ActivityKind.COLLECTIVE, "job.py:1", "all_reduce")
    last, began = node.workers[0].times[-1], node.now  # the node of a test does not wake up within a step
    node.stand_still(61.0)
    if others:
        stall, _ = node.told[-1]
        verdict = judge(in_groups(stall.looks), stall.allowed)
        assert verdict is not None and verdict.why is Why.DEADLOCK, "the leader finds the same"
    else:
        ((_, at),) = node.condemned[:1]
        assert node.said[0].verdict.why is Why.DEADLOCK
        assert at >= last + 60.0 and at <= began + 60.5


@pytest.mark.parametrize(
    ("patience", "limit_s"), [(Patience(fixed_s=20.0), 20.0), (Patience(ceiling_s=300.0), 300.0)]
)
def test_workers_that_wait_at_changing_places_are_found_at_the_limit_of_a_busy_one(
    patience: Patience, limit_s: float
) -> None:
    node = Node(patience)
    node.train(10.0)
    began = node.workers[0].times[-1]
    while not node.condemned and node.now - began < 2 * limit_s:
        for worker in node.workers:
            line = len(node.looked) % 2
            worker.where = ThreadActivity(ActivityKind.COLLECTIVE, f"job.py:{line}", "barrier")
        node.stand_still(0.25)
    assert [slot for slot, _ in node.condemned] == [0, 1]
    assert limit_s <= node.condemned[0][1] - began < limit_s + 0.5
    assert node.said[0].verdict.why is Why.DEADLOCK


def test_a_worker_that_polls_from_another_place_is_still_in_the_state_that_was_judged() -> None:
    node = Node(Patience(ceiling_s=300.0), others=1)
    node.train(10.0)
    there = ThreadActivity(ActivityKind.COLLECTIVE, "job.py:8", "barrier")
    for kind, now, still_s, is_condemned in (
        (Doing.ASLEEP, ThreadActivity(ActivityKind.OWN, "job.py:9"), 60.0, True),
        (Doing.ASLEEP, there, 60.0, False),
        (Doing.WAITING, there, 120.0, False),
        (Doing.WAITING, there, 300.0, True),
        (Doing.WAITING, ThreadActivity(ActivityKind.OWN, "job.py:9"), 300.0, False),
    ):
        one = Node(others=1)
        one.state, one.workers, one.watching = node.state, node.workers, node.watching
        last = node.workers[1].times[-1]
        one.now = last + still_s
        one.watching = replace(node.watching, due=one.now)
        node.workers[1].where = now
        look = Look("a", 1, 1, len(node.workers[1].times), still_s, kind, "job.py:7")
        one.handle(HangChanged(Hang(1, Verdict(Why.ASLEEP, (look,), 2))))
        one.stand_still(2.0)
        assert bool(one.condemned) == is_condemned, (kind, now)
