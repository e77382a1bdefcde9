"""Jobs whose workers keep their process: which workers continue, when, and with which state."""

from __future__ import annotations

import pytest

from elasticd.core import handover, seating
from elasticd.core.facts import Limits, Outcome, Policy
from tests.sim.cluster import Setup
from tests.sim.procs import Job, SimWorker
from tests.sim.schedule import Fault, Run, draw, run
from tests.sim.test_schedules import directed

LATE_S = (0.02, 0.15, 0.25, 0.35)  # when a second change follows the first


def _job(**changes: object) -> Job:
    return Job(**{"total_steps": 200, "step_s": 0.1, "inplace": True, "save_every": 1000, **changes})  # type: ignore[arg-type]


def _sizes(result: Run) -> list[int]:
    return [round.world_size for round in result.invariants.live.values()]


def test_no_step_is_made_twice_though_nothing_was_ever_saved() -> None:
    faults = tuple(Fault(5.0 + i, "user_failure", f"n{i % 2}", much=0.3 * (i % 3)) for i in range(8))
    result = directed(*faults, setup=Setup((2, 2), Limits(1, 4), job=_job()))
    assert result.invariants.steps == 200


def test_forming_worlds_of_newcomers_first_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does the rule that no state is lost have an effect? Here a leader leaves survivors out, who hand
    nothing over."""
    form = seating.form

    def newcomers_first(nodes, last, limits, *others):  # type: ignore[no-untyped-def]
        new = [n for n in nodes if last is None or last.member(n.name, n.incarnation) is None]
        return form(new or nodes, None, limits, *others)

    monkeypatch.setattr(seating, "form", newcomers_first)
    monkeypatch.setattr(handover, "members", lambda *asked: ())
    for seed in range(200):
        result = run(seed, draw(seed, kinds=frozenset({"join", "crash"})))
        if "know more" in result.broken:
            return
    pytest.fail("200 schedules, and nobody noticed")


def test_survivors_that_hear_of_a_loss_late_keep_their_state_though_all_of_them_do() -> None:
    """All survivors are in the script's own code, for longer than one worker may keep waiting workers."""
    fault = Fault(10.0, "user_failure", "n0", much=0.0)
    job = _job(dwells=1.0, dwell_s=(8.0, 8.5))
    result = directed(fault, setup=Setup((2, 2), Limits(1, 4), job=job))
    assert result.invariants.steps == 200 and len(_sizes(result)) < 4


def test_a_worker_that_blocks_holders_of_the_state_for_long_is_killed_on_any_node() -> None:
    fault = Fault(10.0, "user_failure", "n0", much=0.0)
    for slots in ((2, 1), (3,)):
        result = directed(fault, setup=Setup(slots, Limits(1, 3), job=_job(dwells=0.5, dwell_s=(60.0, 60.0))))
        first, second, *_ = result.invariants.live.values()
        assert second.since - first.since < 30.0 and result.invariants.steps == 200


def test_growing_waits_for_a_step_however_long_it_takes() -> None:
    job = _job(total_steps=12, step_s=10.0)
    result = directed(Fault(15.0, "join", "n1", much=0.4), setup=Setup((2,), Limits(1, 4), job=job))
    assert _sizes(result) == [2, 4] and result.invariants.steps == 12


def test_a_worker_that_dies_while_etcd_is_away_for_long_costs_the_others_no_step() -> None:
    faults = (Fault(10.0, "etcd_kill", for_s=20.0), Fault(11.0, "user_failure", "n1", much=0.0))
    result = directed(*faults, setup=Setup((2, 2), Limits(1, 4), job=_job()))
    assert result.invariants.steps == 200 and result.invariants.ends[-1].restarts == 1


def test_a_failure_is_charged_though_its_process_takes_long_to_end() -> None:
    fault = Fault(10.0, "user_failure", "n1", much=0.0)
    job = _job(lingers=1.0, dwell_s=(40.0, 60.0))
    result = directed(fault, setup=Setup((2, 2), Limits(1, 4), job=job))
    assert result.invariants.charged == {1} and result.invariants.steps == 200
    first, second, *_ = result.invariants.live.values()
    assert second.since - first.since < 20.0, "the others did not wait for that"


def _handed_over(result: Run) -> list[bool]:
    return [round.handover for round in result.invariants.live.values()]


@pytest.mark.parametrize("kind", ["scale", "drain", "sigterm"])
@pytest.mark.parametrize("late_s", LATE_S)
def test_two_planned_changes_in_quick_succession_need_no_copies_of_parts(kind: str, late_s: float) -> None:
    """The job shrinks from four workers to two. Before the two train, one of them is told to leave, too."""
    job = _job(sharded=True, step_s=0.2)
    faults = Fault(10.0, "scale", "n0", much=0.3), Fault(10.0 + late_s, kind, "n1", much=0.0)
    result = directed(*faults, setup=Setup((1, 1, 1, 1), Limits(1, 4), job=job))
    assert result.invariants.steps == 200
    assert _sizes(result)[-1] == (1 if kind == "scale" else 2)


@pytest.mark.parametrize("late_s", LATE_S)
@pytest.mark.parametrize("first", [0.5, 0.7])
def test_workers_that_leave_in_two_groups_each_give_their_parts_once(late_s: float, first: float) -> None:
    job = _job(sharded=True, step_s=0.2)
    faults = Fault(10.0, "scale", "n0", much=first), Fault(10.0 + late_s, "scale", "n1", much=0.0)
    result = directed(*faults, setup=Setup((1,) * 6, Limits(1, 6), job=job))
    assert result.invariants.steps == 200
    assert sum(_handed_over(result)) <= 1 and _sizes(result)[-1] == 1


def test_a_leaving_worker_hands_over_to_a_worker_that_waits_for_a_whole_unit() -> None:
    job = _job(sharded=True, unit=2)
    setup = Setup((1, 1), Limits(2, 2, unit=2), job=job)
    result = directed(Fault(10.0, "sigterm", "n1", 5.0), setup=setup)
    assert result.invariants.steps == 200 and _sizes(result) == [2, 2]


def _scale_twice() -> None:
    for late_s in LATE_S:
        test_two_planned_changes_in_quick_succession_need_no_copies_of_parts("scale", late_s)


def test_a_part_that_is_left_behind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_parts_left_out", lambda *asked: {})
    with pytest.raises(pytest.fail.Exception, match="a planned change needs copies"):
        _scale_twice()


def test_a_world_with_parts_of_two_steps_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker continues with the parts that it has, although other workers continue from another step."""
    enter = SimWorker.has_entered

    def stubborn(self: SimWorker) -> None:
        before = dict(self.held)
        enter(self)
        self.held = before or self.held

    monkeypatch.setattr(SimWorker, "has_entered", stubborn)
    setup = Setup((1, 1), Limits(1, 4), job=_job(sharded=True, redundancy=1))
    with pytest.raises(pytest.fail.Exception, match="do not make up step"):
        directed(Fault(10.0, "join", "n2", much=0.0), setup=setup)


def test_a_script_that_has_left_its_run_function_ends_though_nodes_join_or_leave() -> None:
    """The script's last evaluation takes longer than the time that workers get to leave a round."""
    job = _job(total_steps=50, end_s=(10.0, 12.0))
    faults = (Fault(8.0, "join", "n2"), Fault(9.0, "scale", "n0"), Fault(10.0, "sigterm", "n1"))
    policy = Policy(part_s=3.0, shutdown_s=30.0)
    result = directed(*faults, setup=Setup((2, 2), Limits(1, 8), policy, job=job))
    assert _sizes(result) == [4] and result.invariants.steps == 50
    assert result.invariants.ends[-1].outcome is Outcome.SUCCEEDED


def test_a_node_whose_heirs_do_not_get_ready_leaves_in_time_all_the_same() -> None:
    faults = (Fault(3.0, "join", "n1", much=0.1), Fault(10.0, "sigterm", "n0"))
    result = directed(
        *faults, setup=Setup((1,), Limits(1, 1), job=_job(total_steps=300, start_s=(25.0, 25.0)))
    )
    assert _handed_over(result) == [False, False], "it left before"
