"""The real agent under random schedules of faults: the invariants hold, and a seed replays a failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest

from elasticd.core.facts import Limits, Outcome, Summary
from elasticd.core.hang.judging import Allowance, Group, Verdict
from elasticd.core.leader import hanging
from elasticd.core.round_parts import PartSizes
from tests.sim.__main__ import replay_command
from tests.sim.clock import START, Clock
from tests.sim.cluster import POLICY, Cluster, Setup
from tests.sim.host import SimHost
from tests.sim.invariants import Invariants
from tests.sim.procs import Job
from tests.sim.schedule import Fault, Run, Schedule, draw, run
from tests.sim.store import _Watch

BATCH = 10  # schedules in a test, so that a test ends in time on a busy machine
OFTEN = (1, 2, 3)  # the batches that always run; the others run with -m slow


def _hold(result: Run, replay: str) -> None:
    if result.broken:
        last = result.cluster.clock.told().splitlines()[-40:]
        pytest.fail("\n".join([*last, "", result.broken, f"replay: {replay}"]), pytrace=False)


@pytest.mark.parametrize(
    "batch", [pytest.param(n, marks=[] if n in OFTEN else pytest.mark.slow) for n in range(40)]
)
def test_the_invariants_hold_under_any_schedule_of_faults(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        _hold(run(seed, draw(seed)), replay_command(seed))


def test_a_seed_replays_event_by_event() -> None:
    first, second = (run(4, draw(4)) for _ in range(2))
    assert first.cluster.clock.told() == second.cluster.clock.told()
    assert first.cluster.clock.events > 100


def directed(*faults: Fault, setup: Setup, seed: str = "directed") -> Run:
    result = run(seed, Schedule(setup, faults))
    _hold(result, "this test")
    return result


# After a hang, leases may run out at the moment when etcd continues, or not.
HANGS = [("hang", misjudged, seed) for misjudged in (0.0, 0.4) for seed in range(6)]


@pytest.mark.parametrize(("fault", "misjudged", "seed"), [("kill", 0.0, 0), *HANGS])
def test_etcd_away_for_a_minute_does_not_stop_training(fault: str, misjudged: float, seed: int) -> None:
    cluster = Cluster(seed, Setup((1, 1, 1), Limits(1, 3), job=Job(total_steps=100_000)))
    invariants = Invariants(cluster)
    cluster.start_all(within_s=1.0)
    cluster.clock.run(until=START + 20.0)
    assert len(invariants.live) == 1
    getattr(cluster.etcd, fault)()
    cluster.network.misjudged = misjudged
    steps = invariants.steps
    cluster.clock.run(until=START + 80.0)
    assert invariants.steps > steps + 500
    cluster.etcd.recover()
    cluster.clock.run(until=START + 120.0)
    assert len(invariants.live) == 1, "nobody restarts when etcd is back"


def test_an_agent_stopped_while_etcd_is_away_does_not_train_beside_the_new_world() -> None:
    faults = (Fault(20.0, "etcd_kill", for_s=3.0), Fault(22.5, "pause", "leader", 25.0))
    job = Job(total_steps=400, step_s=0.25)
    result = directed(*faults, setup=Setup((1, 1), Limits(1, 1), job=job))
    assert len(result.invariants.live) == 2


@pytest.mark.parametrize(("alone", "worlds"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("inplace", [False, True])
def test_an_agent_that_is_stopped_loses_its_workers_only_where_others_could_replace_them(
    alone: bool, worlds: int, inplace: bool
) -> None:
    fault = Fault(20.0, "pause", "leader", 25.0)
    job = Job(total_steps=400, step_s=0.25, inplace=inplace)
    result = directed(fault, setup=Setup((2,), Limits(2, 2), alone=alone, job=job))
    assert len(result.invariants.live) == worlds and result.invariants.ends[-1].restarts == 0


def test_a_new_leader_that_saw_no_outage_does_not_replace_late_nodes() -> None:
    kinds = frozenset({"pause", "slow", "etcd_hang", "cut"})
    _hold(run(1625, draw(1625, 3, kinds)), replay_command(1625, 3, ",".join(sorted(kinds))))


# By chance two looks often see a polling worker at the same line. With these seeds they do not.
UNSETTLED = [("polling", "poll18"), ("polling", "poll31")]
HUNG = [*((kind, "directed") for kind in ("stopped", "asleep", "apart", "polling")), *UNSETTLED]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("kind", "seed"), HUNG)
def test_a_hung_worker_is_replaced_and_charged_once(kind: str, seed: str, inplace: bool) -> None:
    job = Job(total_steps=200, step_s=0.25, inplace=inplace)
    result = directed(Fault(20.0, kind, "n1"), setup=Setup((1, 1, 1), Limits(3, 3), job=job), seed=seed)
    ((worker, _),) = result.invariants.condemned
    assert worker.procs.host.name == "n1" and worker.ill is not None
    assert [end.restarts for end in result.invariants.ends] == [1]
    assert result.invariants.ends[-1].outcome is Outcome.SUCCEEDED


def test_a_worker_that_polls_while_its_world_breaks_leaves_afterwards_and_is_not_condemned() -> None:
    grows, breaks = Fault(20.0, "scale", "n0", much=0.74), Fault(23.0, "reset", "n0")
    job = Job(total_steps=200, step_s=0.25, inplace=True)
    setup = Setup((1, 1), Limits(1, 1), job=job)
    result = directed(grows, Fault(20.1, "polling", "n0", 6.0), breaks, setup=setup)
    assert not result.invariants.condemned and result.invariants.ends[-1].outcome is Outcome.SUCCEEDED


def test_an_agent_that_is_slow_and_then_paused_hears_all_in_order() -> None:
    clock = Clock(0)
    host, heard = SimHost(clock, "n0"), list[int]()
    host.slow_s = 1.0
    host.call(partial(heard.append, 1))
    host.pause()
    host.call(partial(heard.append, 2))
    clock.run(until=START + 5.0)
    host.slow_s = 0.0
    host.resume()
    host.call(partial(heard.append, 3))
    clock.run()
    assert heard == [1, 2, 3]


@pytest.mark.parametrize("seed", [2, 9])  # with these, the leader is no member of the small round
def test_a_leader_whose_agent_hears_late_of_a_round_does_not_go_back_to_it(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The leader reads the rounds of a large job by a watch of its own. Here a round between two large ones
    is small, and every agent reads it whole."""
    send = _Watch._later

    def later(watch: _Watch) -> None:
        store = watch.store
        own = next((w for w in store._watches if w.topic.key == "round"), None)
        leader = store.etcd.keys.get("leader")
        if watch is own and leader is not None and leader.fact.node == store.host.name:
            store._clock.after(0.5, watch._send)
        else:
            send(watch)

    monkeypatch.setattr(_Watch, "_later", later)
    loss, smaller = Fault(10.0, "crash", "leader", 4.0), Fault(20.0, "scale", "n0", much=0.0)
    larger = Fault(24.0, "scale", "n0", much=0.99)
    setup = Setup((1, 1, 1, 1), Limits(1, 4), job=Job(total_steps=300, step_s=0.25, inplace=True))
    setup = replace(setup, part_sizes=PartSizes(members=2, at_once=8))
    result = run(seed, Schedule(setup, (loss, smaller, larger)))
    _hold(result, "this test")
    assert {1, 4} <= {live.world_size for live in result.invariants.live.values()}


def test_the_reports_of_many_nodes_are_judged_together(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, judged = hanging.judge_round, 0

    def count(groups: Sequence[Group], allowed: Allowance, *since: Mapping[str, float]) -> Verdict | None:
        nonlocal judged
        judged += 1
        return judge(groups, allowed, *since)

    monkeypatch.setattr(hanging, "judge_round", count)
    setup = Setup((1,) * 20, Limits(20, 20), job=Job(total_steps=60, step_s=0.25))
    result = directed(Fault(10.0, "asleep", "n1"), setup=setup)
    assert len(result.invariants.condemned) == 1
    assert 0 < judged < 20


def test_a_worker_that_is_busy_for_a_while_is_spared_though_looks_come_late() -> None:
    faults = (Fault(10.0, "blind", "n0", 50.0, 0.9), Fault(20.0, "busy", "n0", 25.0))
    job = Job(total_steps=200, step_s=0.25)
    result = directed(*faults, setup=Setup((2, 1), Limits(3, 3), job=job))
    assert not result.invariants.condemned and result.invariants.ends[-1].restarts == 0


def test_all_are_let_live_where_one_was_busy_for_long_and_a_look_falls_into_the_moment_after() -> None:
    kinds = frozenset({"busy", "blind"})
    _hold(run(36, draw(36, 2, kinds)), replay_command(36, 2, ",".join(sorted(kinds))))


def test_a_slow_worker_is_named_and_not_taken_for_one_that_hangs() -> None:
    job = Job(total_steps=400, step_s=0.25)
    watched = replace(POLICY, straggler_window_s=12.0)
    faults = (Fault(10.0, "slow_slot", "n1", much=0.6), Fault(15.0, "crowded", "n2", 60.0, 1.0))
    result = directed(*faults, setup=Setup((1, 2, 1), Limits(4, 4), watched, job=job))
    assert result.invariants.named == {("n1", 1)} and not result.invariants.condemned
    assert result.invariants.ends[-1].restarts == 0


def test_the_paces_of_a_job_of_one_node_do_not_pass_through_etcd() -> None:
    job, watched = Job(total_steps=1000, step_s=0.25), replace(POLICY, straggler_window_s=12.0)
    cluster = Cluster("one node", Setup((3,), Limits(3, 3), watched, job=job))
    invariants, written = Invariants(cluster), set()
    cluster.etcd.written.append(lambda entry: written.add(entry.key.partition("/")[0]))
    cluster.start_all(within_s=1.0)
    cluster.slow_slots["n0"] = {1: 3.0}
    cluster.clock.run(until=START + 60.0)
    assert invariants.named == {("n0", 1)} and "stragglers" in written


def test_telemetry_does_not_pass_through_etcd_and_failover_loses_no_time_of_any_node() -> None:
    job, slots = Job(total_steps=100_000, step_s=0.25), (1, 2, 1)
    cluster = Cluster("failover", Setup(slots, Limits(2, 4), job=job))
    invariants, written = Invariants(cluster), Counter[str]()
    cluster.etcd.written.append(lambda entry: written.update([entry.key.partition("/")[0]]))
    cluster.start_all(within_s=1.0)
    cluster.clock.run(until=START + 60.0)
    first = cluster.leader()
    assert first is not None
    first.crash()
    cluster.clock.run(until=START + 120.0)
    second = cluster.leader()
    assert second is not None and second is not first
    summary = cluster.etcd.fact("summary")
    assert isinstance(summary, Summary)
    lost = sum(len(member.slots) for member in invariants.live[1].members if member.node == first.name)
    lived_s = sum(slots) * 120.0 - lost * 60.0
    assert 0.95 * lived_s < sum(summary.spent.values()) <= lived_s
    assert not written.keys() & {"progress", "paces", "ledger"}
    assert written["summary"] <= 120


@pytest.mark.slow
def test_a_thousand_nodes_form_a_world_and_lose_some_of_them() -> None:
    cluster = Cluster("thousand", Setup((1,) * 1000, Limits(500, 1000), job=Job(total_steps=40, step_s=1.0)))
    invariants = Invariants(cluster)
    cluster.start_all(within_s=0.5)
    clock = cluster.clock
    assert clock.run(until=START + 30.0, done=lambda: invariants.worlds == 1)
    assert invariants.live[1].world_size == 1000
    for i in range(0, 1000, 50):  # the leader may be one of these nodes
        cluster.agents[f"n{i}"].crash()
    lost_at = clock.now()
    assert clock.run(until=lost_at + 60.0, done=lambda: invariants.worlds == 2)
    assert max(invariants.live.values(), key=lambda r: r.number).world_size == 980
    assert clock.now() - lost_at < POLICY.node_ttl_s + 5.0, "nothing was waited for but the leases"
    assert clock.run(until=clock.now() + 120.0, done=lambda: bool(invariants.ends))
    assert invariants.ends[0].outcome is Outcome.SUCCEEDED
    clock.run(until=clock.now() + 30.0)
    assert not cluster.running()
