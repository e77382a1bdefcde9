"""What agents report of their workers' paces, and how each node learns the leader's verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticd.core import leader
from elasticd.core.agent import AgentState
from elasticd.core.facts import (
    Cause,
    Laggard,
    Member,
    Paces,
    Phase,
    Policy,
    Round,
    Stragglers,
)
from elasticd.core.gpu_health import STRAIN_S
from elasticd.core.measuring import FIRST_STEPS, SlotLag
from elasticd.core.page_layout import PageContents
from elasticd.core.ports import Changes, Entry, Put, Seen, StillThere
from elasticd.core.reasons import GpuRelieved, GpuStrained, Reason, SlotBad, WorkerStraggling
from elasticd.core.straggler import PERIODS
from elasticd.daemon.observer import Observer
from elasticd.telemetry.gpus import GpuReading
from tests.core.build import node, spec, view

PERIOD_S = 5.0
STEPS = 50  # the seconds of a period


class Store:
    """Passes on what one agent writes to all watches and to the leader. ``said``: the leader's verdicts."""

    def __init__(self, members: tuple[Member, ...]) -> None:
        self.watches: list[tuple[str, Callable[[Seen], None]]] = []
        self.put: list[Put] = []
        self.told: list[Paces] = []
        self.said: list[Reason] = []
        round = Round(3, Phase.LIVE, members, "s:1", Cause.START, 0.0)
        self.view = view(spec(1, 8), round, [node(m.node, m.slots, released=2) for m in members])

    def watch(self, key: str, seen: Callable[[Seen], None], prefix: bool = False) -> Callable[[], None]:
        self.watches.append((key, seen))
        return lambda: None

    def transact(self, guards: object, writes: tuple[Put, ...], answered: object) -> None:
        for put in writes:
            self.put.append(put)
            self.show(put)

    def show(self, put: Put) -> None:
        news = Changes((Entry(put.key, put.fact, len(self.put), 1),))
        for key, seen in self.watches:
            if put.key == key:
                seen(news)
        self.view = leader.see(self.view, news, put.key, 0.0)
        self._decide()

    def hear(self, paces: Paces) -> None:
        self.told.append(paces)
        self.view = leader.hear_paces(self.view, [paces])
        self._decide()

    def _decide(self) -> None:
        plan = leader.decide(self.view, 0.0)
        self.said += plan.reasons
        if plan.writes:
            self.transact((), cast(Any, plan.writes), None)

    def written(self, of: type) -> list[Any]:
        return [put.fact for put in self.put if isinstance(put.fact, of)]


class Agent:
    """The agent of one node. Its workers need so long for their own part of a step, and train in lock-step
    with others."""

    def __init__(self, name: str, store: Store, own_s: Mapping[int, float]) -> None:
        assert store.view.round is not None
        round, members = store.view.round, store.view.round.members
        self.member = next(m for m in members if m.node == name)
        self.own_s = dict(own_s)
        self.steps, self.waited_s = 0, dict.fromkeys(own_s, 0.0)
        self.delayed_s, self.throttled_s = dict.fromkeys(own_s, 0.0), 0.0
        self.state = SimpleNamespace(
            me=SimpleNamespace(node=name, incarnation=f"{name}#1", key=f"nodes/{name}"),
            crew=SimpleNamespace(
                round=round,
                member=self.member,
                alive=frozenset(self.member.slots),
                order=None,
                fenced=False,
            ),
            round=round,
            guard=StillThere(f"nodes/{name}", 4),
            policy=Policy(),
        )
        self.store = store
        self.said: list[Reason] = []
        self.of = Observer(self.page_contents, lambda: self.throttled_s)
        self.of.begin(cast(Any, store))

    def page_contents(self, round_number: int) -> Mapping[int, PageContents]:
        return {
            slot: PageContents(
                1,
                self.steps,
                stepped_at=self.at,
                measured=self.steps,
                measured_s=self.at,
                wait_s=waited_s,
                waits=self.steps,
                delay_s=self.delayed_s[slot],
            )
            for slot, waited_s in self.waited_s.items()
        }

    def look(self, now: float) -> None:
        """Read the workers' pages. Report to the leader."""
        paces = self.of.attend(cast(AgentState, self.state), now, self.said.append)
        if paces is not None:
            self.store.hear(paces)

    @property
    def lags(self) -> Mapping[int, SlotLag]:
        return self.of.lags(self.member.node)

    def live(self, step_s: float, at: float, steps: int) -> None:
        self.steps, self.at = self.steps + steps, at
        for slot in self.waited_s:
            self.waited_s[slot] += steps * (step_s - self.own_s[slot])


def members(*names: str) -> tuple[Member, ...]:
    return tuple(Member(n, f"{n}#1", (0, 1), 2 * i) for i, n in enumerate(names))


def live(agents: list[Agent], periods: int, *, since: int = 0) -> None:
    step_s = 0.1
    for period in range(since, since + periods):
        for agent in agents:
            agent.live(step_s, period * STEPS * step_s, FIRST_STEPS if period == 0 else STEPS)
        for agent in agents:
            agent.look(period * PERIOD_S)


def two_nodes() -> tuple[list[Agent], Store]:
    store = Store(members("a", "b"))
    own = {"a": {0: 0.05, 1: 0.05}, "b": {0: 0.05, 1: 0.065}}
    return [Agent(n, store, own[n]) for n in ("a", "b")], store


def test_the_slow_worker_of_another_node_is_named_by_the_leader_and_known_on_its_own() -> None:
    (a, b), store = two_nodes()
    live([a, b], PERIODS + 3)
    assert store.said == [WorkerStraggling("b", 1, 3, 1.3)]
    assert b.lags[1].straggling and not b.lags[0].straggling
    assert (b.lags[1].ratio or 0) > 1.25
    assert not any(lag.straggling for lag in a.lags.values())
    found = store.written(Stragglers)[-1]
    assert found.round == 3 and [(x.node, x.slot, x.ratio) for x in found.slow] == [("b", 1, 1.3)]


@pytest.mark.parametrize(("throttled_s", "named"), [(0.0, []), (1.0, [("b", 0), ("b", 1)])])
def test_a_node_that_neighbours_starve_is_not_named_and_one_that_its_quota_holds_up_is(
    throttled_s: float, named: list[tuple[str, int]]
) -> None:
    store = Store(members("a", "b", "c"))
    agents = [Agent(n, store, {0: 0.05, 1: 0.05}) for n in ("a", "b", "c")]
    b = agents[1]
    b.own_s = {0: 0.065, 1: 0.065}  # with the time in which the worker has no processor
    for period in range(PERIODS + 3):
        b.throttled_s += throttled_s
        for slot in b.delayed_s:
            b.delayed_s[slot] += 0.015 * (FIRST_STEPS if period == 0 else STEPS)
        live(agents, 1, since=period)
    assert [(r.node, r.slot) for r in store.said if isinstance(r, WorkerStraggling)] == named


def test_a_verdict_that_stays_the_same_is_not_written_again() -> None:
    (a, b), store = two_nodes()
    live([a, b], 3 * PERIODS)
    assert len(store.written(Stragglers)) <= 3
    assert len(store.told) > 2 * PERIODS


def test_no_straggler_is_named_while_a_worker_makes_no_steps() -> None:
    (a, b), store = two_nodes()
    live([a, b], 3)
    for period in range(4, 3 * PERIODS):
        a.live(0.1, period * PERIOD_S, STEPS)
        for agent in (b, a):
            agent.look(period * PERIOD_S)
    assert store.said == [] and not store.written(Stragglers)[-1].slow


def test_a_gpu_with_an_error_of_its_own_is_told_once_and_one_of_the_programs_is_not() -> None:
    (a, b), store = two_nodes()
    b.of.look_at_gpu(0, GpuReading(xids=(31, 13), ecc={"corrected": 5}), 0.0)
    b.of.look_at_gpu(1, GpuReading(xids=(79,)), 0.0)
    b.of.look_at_gpu(1, GpuReading(), 0.0)
    live([a, b], 5)
    assert store.said == [SlotBad("b", 1, 3, "its driver reports XID 79")]
    assert b.of.gpus.bad == {1: "its driver reports XID 79"}
    assert store.written(Stragglers)[-1].slow[0].why


def test_memory_errors_of_a_gpu_count_from_when_the_job_came_to_it() -> None:
    (_, b), _ = two_nodes()
    for spoilt in (None, 7, 7):
        b.of.look_at_gpu(0, GpuReading(ecc={"uncorrected": spoilt} if spoilt is not None else {}), 0.0)
    assert b.of.gpus.bad == {}, "they are of another job, or of last year"
    b.of.look_at_gpu(0, GpuReading(ecc={"uncorrected": 9}), 0.0)
    assert b.of.gpus.bad == {0: "2 of its memory errors could not be corrected"}


HOT = "it is hot, which holds its clock down"


def test_a_gpu_that_is_strained_for_a_while_is_told_until_it_is_relieved() -> None:
    (a, b), store = two_nodes()
    for at, hot in ((0.0, True), (10.0, False), (20.0, True), (20.0 + STRAIN_S, True)):
        b.of.look_at_gpu(1, GpuReading(throttled={"thermal": hot, "power": True}), at)
        assert b.of.gpus.strained == ({1: HOT} if at == 20.0 + STRAIN_S else {})
    live([a, b], 5)
    assert store.said == [GpuStrained("b", 1, 3, HOT)] and b.of.gpus.bad == {}
    assert store.written(Stragglers)[-1].slow == (Laggard("b", 1, 3, 0.0, HOT, strained=True),)
    for at in (60.0, 60.0 + STRAIN_S):
        b.of.look_at_gpu(1, GpuReading(throttled={"thermal": False}), at)
    live([a, b], 5, since=5)
    assert store.said[1:] == [GpuRelieved("b", 1, 3)]
    assert store.written(Stragglers)[-1].slow == ()


def test_a_gpu_that_is_strained_by_something_else_is_not_said_to_be_relieved() -> None:
    (a, b), store = two_nodes()
    full = GpuReading(memory_used=99, memory_size=100)
    for at, reading in ((0.0, GpuReading(throttled={"thermal": True})), (60.0, full)):
        for since in (at, at + STRAIN_S):
            b.of.look_at_gpu(1, reading, since)
        live([a, b], 5, since=5 if at else 0)
    assert store.said == [GpuStrained("b", 1, 3, HOT), GpuStrained("b", 1, 3, "its memory is nearly full")]


@pytest.mark.parametrize(
    ("reading", "strain"),
    [
        (GpuReading(throttled={"hardware": True, "power": True}), "its hardware holds its clock down"),
        (GpuReading(memory_used=79, memory_size=80), "its memory is nearly full"),
        (GpuReading(throttled={"power": True}, memory_used=70, memory_size=80), ""),
        (GpuReading(), ""),
    ],
)
def test_a_gpu_at_its_power_limit_is_not_strained_and_one_without_memory_is(
    reading: GpuReading, strain: str
) -> None:
    (_, b), _ = two_nodes()
    for at in (0.0, STRAIN_S):
        b.of.look_at_gpu(0, reading, at)
    assert b.of.gpus.strained == ({0: strain} if strain else {})
