"""A large job through everything that happens to a job. Also: the checks of each step find as much as a look
at all workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.sim import test_oracle
from tests.sim.cluster import SimAgent
from tests.sim.invariants import Invariants
from tests.sim.large import play
from tests.sim.procs import World
from tests.sim.schedule import draw, run

SEEDS = 5


def test_a_job_of_a_hundred_nodes_goes_through_all_that_happens_to_a_large_one() -> None:
    chapters = list(play(100))
    assert [chapter.world for chapter in chapters] == [800, 760, 800, 720, 800, 792, 800, 800]
    assert max(chapter.lasted_s for chapter in chapters) < 30.0


def test_four_times_the_nodes_take_four_times_the_events() -> None:
    few, many = (sum(chapter.events for chapter in play(nodes, 1)) for nodes in (20, 80))
    assert many < 1.25 * 4 * few


def test_a_seed_replays_a_large_play() -> None:
    first, second = ([(c.what, c.events, c.lasted_s) for c in play(20, 2, "again")] for _ in range(2))
    assert first == second


# ---- a look at what has changed finds all that a look at all workers finds


@pytest.fixture
def looks_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Invariants._stepped

    def both(self: Invariants, world: World) -> None:
        stepped(self, world)
        self.look_at_all(world)

    monkeypatch.setattr(Invariants, "_stepped", both)


@pytest.mark.usefixtures("looks_at_all")
def test_a_look_at_what_changed_finds_what_a_look_at_all_finds() -> None:
    for seed in range(SEEDS):
        assert not run(seed, draw(seed)).broken, f"seed {seed}"
    for seed in range(2):
        assert not run(seed, draw(seed, kinds=frozenset({"slow_slot", "crash"}))).broken, f"seed {seed}"


def _death_unnoticed(patch: pytest.MonkeyPatch) -> None:
    """Workers outlive their agent, and nobody is told that the agent is dead."""
    test_oracle._orphans(patch)
    vanish = SimAgent._vanish

    def unseen(self: SimAgent) -> None:
        vanish(self)
        self.cluster.dying.remove(self)

    patch.setattr(SimAgent, "_vanish", unseen)


def _slowness_unnoticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Invariants, "slow", lambda self, world: set())


def _step_noted_twice(patch: pytest.MonkeyPatch) -> None:
    measure = World._measure

    def twice(self: World) -> None:
        measure(self)
        self.times.append(self.training.clock.now())

    patch.setattr(World, "_measure", twice)


def _seat_taken(patch: pytest.MonkeyPatch) -> None:
    """Once all workers are there, one of a node's two workers answers for the other's slot."""
    stepped = Invariants._stepped

    def swapped(self: Invariants, world: World) -> None:
        for worker in list(world.workers.values())[:1]:
            worker.slot += 1
        stepped(self, world)

    patch.setattr(Invariants, "_stepped", swapped)


def _workers_forgotten(patch: pytest.MonkeyPatch) -> None:
    """An agent forgets that workers of its node train."""
    stepped = Invariants._stepped

    def forgetful(self: Invariants, world: World) -> None:
        driver = self.cluster.agents[world.workers[0].procs.host.name].driver
        driver.state = replace(driver.state, crew=None)
        stepped(self, world)

    patch.setattr(Invariants, "_stepped", forgetful)


@pytest.mark.usefixtures("looks_at_all")
@pytest.mark.parametrize(
    ("break_it", "kinds", "rule"),
    [
        (_death_unnoticed, {"crash"}, "workers outlive their agents, not 0"),
        (_slowness_unnoticed, {"slow_slot"}, "the slow workers are"),
        (_step_noted_twice, {"crash"}, "the workers have made"),
        (_seat_taken, {"crash"}, "steps with other workers"),
        (_workers_forgotten, {"crash"}, "does not know of its workers"),
    ],
)
def test_what_escapes_a_look_at_what_changed_turns_a_look_at_all_red(
    break_it: Callable[[pytest.MonkeyPatch], None],
    kinds: set[str],
    rule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(4 * SEEDS):
        schedule = draw(seed, kinds=frozenset(kinds))
        with monkeypatch.context() as patch:
            break_it(patch)
            broken = run(seed, schedule).broken
        if rule in broken:
            return
    pytest.fail(f"{4 * SEEDS} schedules, and nobody noticed")
