"""Do the invariants notice faults? Each breakage below must break an invariant that holds without the
breakage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elasticd.core import agent, budget, seating, straggler
from elasticd.core.agent import hearing, leaving, stepping
from elasticd.core.agent_messages import LeaveJob
from elasticd.core.facts import Round
from elasticd.core.hang import judging, watching
from elasticd.core.leader import deciding, forming, supervising
from elasticd.core.leader.plan import Plan
from elasticd.core.leader.roll import NOBODY, Mark, Roll
from elasticd.core.ledger import Account, Kind
from elasticd.core.ports import Put, StillThere, Unchanged
from tests.sim import schedule as schedules
from tests.sim import test_schedules
from tests.sim.cluster import SimAgent
from tests.sim.procs import SimProcs, World
from tests.sim.schedule import draw, run
from tests.sim.store import SimEtcd

SEEDS = 400
Break = Callable[[pytest.MonkeyPatch], None]


def _no_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimProcs, "fence", lambda self, until: None)


def _release_unasked(patch: pytest.MonkeyPatch) -> None:
    marked = Roll.__getitem__

    def all_released(self: Roll, mark: Mark) -> Any:
        return NOBODY if mark is Mark.HOLDING else marked(self, mark)

    patch.setattr(Roll, "__getitem__", all_released)
    patch.setattr(seating, "available", lambda node, last: not node.draining)


def _no_guards(patch: pytest.MonkeyPatch) -> None:
    transact = SimEtcd.transact

    def reckless(self: SimEtcd, guards: Any, writes: Any, lease: int) -> Any:
        kept = tuple(g for g in guards if not isinstance(g, (Unchanged, StillThere)))
        return transact(self, kept, writes, lease)

    patch.setattr(SimEtcd, "transact", reckless)


def _charged_twice(patch: pytest.MonkeyPatch) -> None:
    charge = budget.charge
    patch.setattr(
        budget,
        "charge",
        lambda *asked: replace(charged := charge(*asked), total=charged.total + 1),
    )


def _loss_charged(patch: pytest.MonkeyPatch) -> None:
    """The leader charges failures that a lost node has caused to the user's code."""
    settle = deciding.settle

    def unfair(view: Any, spec: Any, round: Round, now: float) -> Any:
        plan = settle(view, spec, round, now)
        failure = view.roll.first.get(Mark.FAILED)
        if not plan.writes or failure is None:
            return plan
        put = plan.writes[0]
        assert isinstance(put, Put)
        assert isinstance(put.fact, Round)
        charged = replace(put.fact, restarts=round.restarts + 1)
        return replace(plan, writes=(replace(put, fact=charged), *plan.writes[1:]))

    patch.setattr(deciding, "settle", unfair)


def _never_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(budget, "why_exhausted", lambda budget, policy, commits: None)
    patch.setattr(budget, "failing_slot", lambda budget, policy: None)


def _one_too_many(patch: pytest.MonkeyPatch) -> None:
    form = seating.form

    def greedy(nodes: Any, last: Any, limits: Any, *others: Any) -> Any:
        return form(nodes, last, replace(limits, max=limits.max + limits.unit), *others)

    patch.setattr(seating, "form", greedy)


def _always_well(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leaving, "exit_of_the_job", lambda round: LeaveJob(5, round.why))


def _finished_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agent.Crew, "finished", property(lambda crew: not crew.alive))


def _orphans(patch: pytest.MonkeyPatch) -> None:
    vanish = SimAgent._vanish

    def careless(self: SimAgent) -> None:
        kill, self.procs.workers = dict(self.procs.workers), {}
        vanish(self)
        self.procs.workers = kill

    patch.setattr(SimAgent, "_vanish", careless)


def _never_back(patch: pytest.MonkeyPatch) -> None:
    register = stepping.register

    def once(do: Any) -> None:
        if do.state.registration.own is not None or do.state.round is None or do.state.round.number == 0:
            register(do)

    patch.setattr(stepping, "register", once)


def _numbers_go_back(patch: pytest.MonkeyPatch) -> None:
    write = forming.write

    def forgetful(view: Any, round: Any, *rest: Any) -> Any:
        return write(view, replace(round, number=min(round.number, 2)), *rest)

    patch.setattr(forming, "write", forgetful)


def _steps_alone(patch: pytest.MonkeyPatch) -> None:
    """Workers continue without their peers. A simulator that allows that would prove nothing."""
    patch.setattr(World, "leave", lambda self, worker: self.workers.pop(worker.rank, None))


def _victims_condemned(patch: pytest.MonkeyPatch) -> None:
    """The workers that wait are condemned in place of the worker that hangs."""
    judged = judging.judge

    def blind(groups: Any, allowed: Any, *since: Any) -> Any:
        verdict = judged(groups, allowed, *since)
        looks = (look for group in groups for look in group.looks)
        waiting = tuple(look for look in looks if look.doing is judging.Doing.WAITING)
        return replace(verdict, guilty=waiting) if verdict is not None and waiting else verdict

    for module in (judging, watching):
        patch.setattr(module, "judge", blind)


def _never_grows(patch: pytest.MonkeyPatch) -> None:
    """A unit that is whole again is never taken into the world."""
    patch.setattr(supervising, "_grow_or_rest", lambda *asked: Plan())


def _hangs_forgiven(patch: pytest.MonkeyPatch) -> None:
    for module in (judging, watching):
        patch.setattr(module, "judge", lambda groups, allowed, *since: None)


def _nobody_is_slow(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(straggler.Watch, "_judge", lambda watch: frozenset())


def _crowds_are_slow(patch: pytest.MonkeyPatch) -> None:
    """The time in which a worker has no processor counts as the worker's own."""
    own_s = straggler.own_s
    patch.setattr(straggler, "own_s", lambda a, b, charged_s: own_s(a, b, b.delay_s - a.delay_s))


def _restarts_cost_nothing(patch: pytest.MonkeyPatch) -> None:
    tell = Account._tell

    def forgetful(self: Account, kind: Kind, until: float) -> Account:
        return replace(self, told_until=until) if kind is Kind.RESTARTING else tell(self, kind, until)

    patch.setattr(Account, "_tell", forgetful)


LIKELY: dict[Break, frozenset[str]] = {  # the faults under which a breakage soon shows
    _no_guards: frozenset({"pause"}),
    _loss_charged: frozenset({"crash"}),
    _release_unasked: frozenset({"drain", "scale"}),
    _never_enough: frozenset({"user_failure"}),
    _no_fence: frozenset({"pause"}),
    _finished_too_early: frozenset({"user_failure"}),
    _victims_condemned: frozenset({"asleep", "blind"}),
    _never_grows: frozenset({"crash"}),
    _hangs_forgiven: frozenset({"stopped"}),
    _nobody_is_slow: frozenset({"slow_slot"}),
    _crowds_are_slow: frozenset({"crowded"}),
}
# With seeds below these the breakage does not show. The second is one of the seeds that are cheap to
# simulate: a
# leader that does not wait for releases forms round after round, so some seconds of the job are enough.
FIRST: dict[Break, int] = {_no_fence: 26, _one_too_many: 13, _release_unasked: 40, _nobody_is_slow: 7}
HURRIED = {_release_unasked}


@pytest.mark.parametrize(
    ("break_it", "rule"),
    [
        (_no_fence, "makes a step, though round"),
        (_release_unasked, ""),
        (_no_guards, ""),
        (_charged_twice, "charges, but user code broke"),
        (_loss_charged, "is charged, but no user code failed in it"),
        (_never_enough, "charges, but"),
        (_one_too_many, "workers, not Limits"),
        (_always_well, "leaves with 5"),
        (_finished_too_early, "success after"),
        (_orphans, "outlives its agent"),
        (_never_back, "after everything was mended"),
        (_numbers_go_back, "lives again"),
        (_steps_alone, "workers make a step"),
        (_victims_condemned, "is condemned, but does not hang"),
        (_never_grows, "workers could train for"),
        (_hangs_forgiven, "hangs since"),
        (_nobody_is_slow, "is slow, but is not named"),
        (_restarts_cost_nothing, "accounts for"),
        (_crowds_are_slow, "is named, but is not slow"),
    ],
)
def test_a_breakage_turns_an_invariant_red(
    break_it: Break, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = LIKELY.get(break_it)
    if break_it in HURRIED:
        monkeypatch.setattr(schedules, "FAULTS_S", 10.0)
        monkeypatch.setattr(schedules, "STEP_BOUND_S", 20.0)
    first = FIRST.get(break_it, 0)
    for seed in range(first, first + SEEDS):
        schedule = draw(seed, kinds=kinds)
        with monkeypatch.context() as patch:
            break_it(patch)
            broken = run(seed, schedule).broken
        if broken and rule in broken and not run(seed, schedule).broken:
            return
    pytest.fail(f"{SEEDS} schedules, and nobody noticed")


def test_forgetting_that_etcd_was_away_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that takes every absence for a loss replaces nodes that could not renew their lease."""
    monkeypatch.setattr(hearing, "_distrust_absences", lambda do: None)
    with pytest.raises(AssertionError, match="nobody restarts"):
        _six_outages()


def _six_outages() -> None:
    for seed in range(6):
        test_schedules.test_etcd_away_for_a_minute_does_not_stop_training("hang", 0.0, seed)
