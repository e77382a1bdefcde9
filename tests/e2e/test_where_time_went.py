"""The ledger of a real run, compared with what the workers themselves report of their steps."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time

import pytest

from elasticd.core.ledger import Kind
from elasticd.telemetry import events, runs
from tests.e2e.harness import Agent, Cluster, World
from tests.e2e.test_scrape import fetch, scrape, url_of


def trained_s(cluster: Cluster, node: str) -> float:
    """Return the time from the first to the last step of each worker of the node, by the workers' own
    reports."""
    return sum(p.last_at - p.first_at for p in cluster.stage.players if p.node == node and p.step)


def began_at(cluster: Cluster, node: str) -> float:
    """Return when the first of the node's agents began, in seconds since the epoch."""
    state = cluster.folder / "state" / "elasticd"
    parts = [r.folder for r in runs.of_job(state, cluster.job) if r.node == node]
    return float(events.read(parts)[0]["at"])


def kill_rank_1(cluster: Cluster, world: World) -> World:
    cluster.goes_on(world, steps=60)
    os.kill(world.players[1].pid, signal.SIGKILL)
    return cluster.world(2, after=world)


def test_the_ledger_agrees_with_the_workers_own_account_of_their_steps(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    a, b = cluster.start("a", "b")
    world = cluster.world(2)
    for _ in range(3):
        world = kill_rank_1(cluster, world)
    cluster.goes_on(world, steps=50)
    seen = cluster.command("status", cluster.job)
    assert "goodput   " in seen.out and "productive of" in seen.out
    cluster.finishes(a, b)
    for node in ("a", "b"):
        kept = cluster.ledger(node)
        assert kept is not None and len(kept.slots) == 1
        spent = kept.slots[0].spent
        assert spent["productive"] == pytest.approx(trained_s(cluster, node), rel=0.02, abs=0.5), (
            "but for how long its last worker took to end"
        )
        assert spent["restarting"] > 0
    for agent in (a, b):
        assert re.search(r"Time: \d+\.\d % productive of \d+ s of worker time", agent.screen)


@pytest.fixture
def seed() -> int:
    """A new seed each time. LEDGER_SEED sets the seed, to replay a test."""
    drawn = int(os.environ.get("LEDGER_SEED", random.randrange(1 << 32)))
    print(f"LEDGER_SEED={drawn}")
    return drawn


def newest(cluster: Cluster) -> dict[str, Agent]:
    """Return the last agent of each node."""
    return {agent.name: agent for agent in cluster.agents}


def hurt(
    cluster: Cluster, world: World, fault: str, dice: random.Random, unsure_s: dict[str, float]
) -> World:
    """Disturb the job. Return the next world. ``unsure_s``: by node, the worker time whose kind no one can
    know."""
    victim = dice.choice(world.players)
    match fault:
        case "kill" | "crash" | "stop":
            numbers = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "stop": signal.SIGSTOP}
            os.kill(victim.pid, numbers[fault])
        case "raise":
            victim.tell("raise", text="by chance")
        case "drain":
            leaves = newest(cluster)[victim.node]
            leaves.signal(signal.SIGTERM)
            assert leaves.end() == 128 + signal.SIGTERM
            cluster.start(victim.node, slots=2, options=OFTEN)
        case "lose":
            newest(cluster)[victim.node].kill()
            kept = cluster.ledger(victim.node)
            assert kept is not None
            unsure_s[victim.node] += 2 * (time.time() - kept.at)
            cluster.start(victim.node, slots=2, options=OFTEN)
    return cluster.world(4, after=world)


OFTEN = ("--max-restarts=100",)
FAILURES = ("kill", "crash", "raise")


@pytest.mark.parametrize(
    ("faults", "times", "ends_s"),
    [
        (FAILURES, 5, 0.5),  # the end of the last workers takes a large share of so short a run
        pytest.param((*FAILURES, "stop", "drain", "lose"), 20, 0.0, marks=pytest.mark.slow),
    ],
    ids=["briefly", "for long"],
)
def test_under_random_faults_every_second_is_told_once_and_as_the_workers_tell_it(
    cluster: Cluster, seed: int, faults: tuple[str, ...], times: int, ends_s: float
) -> None:
    dice = random.Random(seed)
    cluster.limits = (4, 4)
    cluster.start("a", "b", slots=2, options=OFTEN)
    world = cluster.world(4)
    unsure_s = dict.fromkeys(("a", "b"), 0.0)
    for _ in range(times):
        cluster.goes_on(world, steps=dice.randrange(40, 120))
        world = hurt(cluster, world, dice.choice(faults), dice, unsure_s)
    cluster.goes_on(world, steps=100)
    cluster.finishes(*newest(cluster).values())
    for node in unsure_s:
        kept = cluster.ledger(node)
        assert kept is not None and len(kept.slots) == 2
        wall_s = kept.at - began_at(cluster, node)
        for slot in kept.slots:
            assert sum(slot.spent.values()) == pytest.approx(wall_s, rel=0.01)
        productive_s = sum(slot.spent["productive"] for slot in kept.slots)
        by_workers_s = trained_s(cluster, node)
        off_s = max(0.02 * by_workers_s, ends_s)
        assert -off_s - unsure_s[node] <= productive_s - by_workers_s <= off_s
        print(f"{node}: {productive_s:.2f} s of {by_workers_s:.2f} s, {unsure_s[node]:.2f} s not known")


def test_an_agent_that_is_killed_goes_on_with_the_ledger_it_left(cluster: Cluster) -> None:
    cluster.limits = (1, 1)
    (a,) = cluster.start("a")
    world = cluster.world(1)
    cluster.goes_on(world, steps=150)
    cluster.until(lambda: cluster.ledger("a"), "there is a ledger")
    a.kill()
    killed_at = time.time()
    kept = cluster.ledger("a")
    (again,) = cluster.start("a")
    world = cluster.world(1, after=world)
    cluster.goes_on(world, steps=150)
    seen, shown = scrape(again), json.loads(fetch(f"{url_of(again)}status"))
    counted_s = sum(s for (name, _), s in seen.samples.items() if name == "elasticd_time_seconds_total")
    assert 0 < counted_s <= time.time() - killed_at, "a counter begins with its process"
    (own,) = shown["nodes"]
    assert kept is not None
    assert sum(own["time"].values()) > counted_s + kept.slots[0].spent.get("productive", 0.0) - 0.1
    cluster.finishes(again)
    after = cluster.ledger("a")
    assert after is not None
    spent, wall_s = after.slots[0].spent, after.at - began_at(cluster, "a")
    assert sum(spent.values()) == pytest.approx(wall_s, rel=0.01), "the time between too"
    productive_s, by_workers_s = spent[Kind.PRODUCTIVE], trained_s(cluster, "a")
    off_s = max(0.02 * by_workers_s, 0.5)  # the end of the last worker takes a while
    assert by_workers_s - (killed_at - kept.at) - off_s <= productive_s <= by_workers_s + off_s
    print(
        f"{productive_s:.2f} s of {by_workers_s:.2f} s, killed {killed_at - kept.at:.2f} s after it was kept"
    )


@pytest.mark.slow
def test_another_run_of_the_same_name_begins_a_new_ledger(cluster: Cluster) -> None:
    cluster.limits = (1, 1)
    (a,) = cluster.start("a")
    world = cluster.world(1)
    cluster.goes_on(world, steps=100)
    assert cluster.command("stop", cluster.job).code == 0
    a.end()
    first = cluster.ledger("a")
    (again,) = cluster.start("a")
    cluster.world(1, after=world)
    cluster.finishes(again)
    second = cluster.ledger("a")
    assert first is not None and second is not None and second.at > first.at
    assert sum(second.slots[0].spent.values()) < second.at - first.at
