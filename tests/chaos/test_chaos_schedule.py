"""Plans of chaos: the same seed gives the same plan, and all plans together have every fault."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from tests.chaos.schedule import BESIDE_A_STOPPED_WARDEN, SORTS, Fault, Kind, charges, draw

SEEDS = range(400)


def test_a_seed_draws_the_same_plan_again() -> None:
    assert [draw(seed) for seed in SEEDS] == [draw(seed) for seed in SEEDS]
    assert len({draw(seed) for seed in SEEDS}) == len(SEEDS)


def test_all_kinds_of_jobs_and_of_faults_come() -> None:
    plans = [draw(seed) for seed in SEEDS]
    assert {plan.kind for plan in plans} == set(Kind)
    assert {f.kind for plan in plans for e in plan.episodes for f in e.faults} == SORTS.keys()
    many = Counter(len(e.faults) for plan in plans for e in plan.episodes)
    assert many[1] and sum(times for size, times in many.items() if size > 1)


def test_each_fault_is_one_that_its_job_can_have_and_ends() -> None:
    for plan in map(draw, SEEDS):
        assert plan.least <= plan.size - (plan.slots - plan.spares), "a node may be missing"
        for episode in plan.episodes:
            kinds = [fault.kind for fault in episode.faults]
            assert episode.faults and len(set(kinds)) == len(kinds)
            assert all(a.at_s <= b.at_s for a, b in pairwise(episode.faults))
            for fault in episode.faults:
                sort = SORTS[fault.kind]
                assert 0 <= fault.node < plan.nodes and 0 <= fault.slot < plan.slots
                assert sort.lasts[0] <= fault.for_s <= sort.lasts[1]
                assert not (sort.state and plan.kind is Kind.SCRIPT)
                assert not (sort.alone and len(kinds) > 1)


def test_beside_a_stopped_warden_nothing_costs_its_node_the_lease() -> None:
    for plan in map(draw, SEEDS):
        for episode in plan.episodes:
            families = {fault.kind.partition(".")[0] for fault in episode.faults}
            if any(fault.kind == "warden.stop" for fault in episode.faults):
                assert families - {"warden"} <= BESIDE_A_STOPPED_WARDEN


def test_only_the_faults_that_are_asked_for_are_drawn_and_as_many_episodes() -> None:
    for seed in SEEDS:
        plan = draw(seed, 3, {"worker.kill", "link.down"})
        assert len(plan.episodes) == 3
        assert {f.kind for e in plan.episodes for f in e.faults} <= {"worker.kill", "link.down"}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["worker.kill"], (1, 1)),
        (["worker.raise"], (1, 1)),
        (["worker.stop"], (1, 1)),
        (["worker.pause"], (0, 1)),  # a stopped process may continue before it is noticed
        (["node.crash"], (0, 0)),
        (["link.oneway", "etcd.stop", "drain"], (0, 0)),
        (["worker.kill", "node.crash"], (0, 1)),  # a budget is charged for the fault that is noticed first
        (["worker.kill", "worker.raise"], (0, 2)),  # together or one after the other
    ],
)
def test_what_an_episode_may_cost_of_the_budget(kinds: list[str], expected: tuple[int, int]) -> None:
    assert charges([Fault(kind) for kind in kinds]) == expected
