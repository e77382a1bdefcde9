"""``python -m tests.sim.large --nodes 10000``: one large job through all that happens to one, with the
invariants: start, nodes lost at once, their return, scaling, the loss of the leader, an outage of etcd.

Each node runs the real agent, with its own driver, leases, watches, requests and answers, and the leader is
one of them. What is simplified, so that 80,000 workers fit into minutes of one processor:

* All workers compute for the same time in each step, and nobody is slow, crowded or ill. So a step is one
  event, and what a worker has done follows from what its world has done (``Job.steady``).
* An agent looks at its workers every 10 s and at what happens to them, where an agent in earnest also looks
  every 0.5 to 1 s (``Setup.look_s``).
* A lease is renewed after two thirds of its time, not after a third. While etcd is away, an agent asks every
  2 s, not every 0.2 s (``Renewal``).
* The invariants look at what has changed since the last step, and at all workers at the end of each chapter
  (``Invariants.look_at_all``).
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from elasticd.core.facts import Limits, Phase
from tests.sim.cluster import Broken, Cluster, Setup
from tests.sim.invariants import Invariants
from tests.sim.procs import Job, World
from tests.sim.store import Renewal

WORKERS = 8  # workers of a node
LOST = 0.05  # the share of the nodes that is lost
SMALLER = 0.9  # the share of the workers that remains
OUTAGE_S = 10.0
LOOK_S = 10.0
SELDOM = Renewal(share=2 / 3, retry_s=2.0)
BOUND_S = 180.0  # the longest time from an event to the next step of the new world


@dataclass(frozen=True, slots=True)
class Chapter:
    """A part of the story. ``took_s``: seconds on this machine. ``cpu_s``: CPU seconds of this machine.
    ``lasted_s``: seconds of the simulated job."""

    what: str
    took_s: float
    cpu_s: float
    lasted_s: float
    events: int
    world: int

    def __str__(self) -> str:
        job = f"{self.lasted_s:6.1f} s of the job"
        took = f"{self.took_s:7.1f} s, {self.cpu_s:6.1f} s of CPU"
        return f"{self.what:<24}{took}{job:>22}{self.events:>12,} events{self.world:>8,} workers"


def play(nodes: int, workers: int = WORKERS, seed: str = "large") -> Iterator[Chapter]:
    """Yield the figures of each chapter. Raise Broken if an invariant is broken, or if no world trains in
    time."""
    most = nodes * workers
    setup = Setup(
        (workers,) * nodes,
        Limits(workers, most),
        job=Job(total_steps=10**6, step_s=1.0, steady=True),
        look_s=LOOK_S,
        renewal=SELDOM,
    )
    cluster = Cluster(seed, setup)
    invariants, clock = Invariants(cluster), cluster.clock
    worlds: list[World] = []
    cluster.training.formed.append(worlds.append)
    lost = [f"n{n}" for n in range(1, nodes, round(1 / LOST))]

    def chapter(what: str, begin: Callable[[], None], size: int) -> Chapter:
        """Begin the chapter, and wait for a step of a world of this size."""
        began_at, used_s, now, events = time.monotonic(), time.process_time(), clock.now(), clock.events
        steps: list[int] = []

        def trains() -> bool:
            newest = invariants.newest
            if newest is None or newest.phase is not Phase.LIVE or newest.world_size != size:
                steps.clear()
            elif not steps:
                steps.append(invariants.steps)
            return bool(steps) and invariants.steps > steps[0]

        begin()
        if not clock.run(until=now + BOUND_S, done=trains):
            raise Broken(
                f"{what}: no world of {size} workers trains after {BOUND_S:g} s: {invariants.newest}"[:500]
            )
        invariants.look_at_all(worlds[-1])
        del worlds[:-1]
        lasted_s, took_s = clock.now() - now, time.monotonic() - began_at
        cpu_s = time.process_time() - used_s
        return Chapter(what, took_s, cpu_s, lasted_s, clock.events - events, size)

    def crash(names: list[str]) -> None:
        for name in names:
            cluster.agents[name].crash()

    def restart(names: list[str]) -> None:
        for name in names:
            cluster.restart(name)

    def lose_the_leader() -> None:
        leader = cluster.leader()
        assert leader is not None
        gone.append(leader.name)
        leader.crash()

    def lose_etcd() -> None:
        rounds = len(invariants.live)
        cluster.etcd.kill()
        clock.after(OUTAGE_S, cluster.etcd.recover)
        clock.run(until=clock.now() + OUTAGE_S + 5.0)
        if len(invariants.live) != rounds:
            raise Broken("a world was formed anew because etcd was away")

    gone: list[str] = []
    smaller = int(most * SMALLER) // workers * workers
    yield chapter("start", lambda: cluster.start_all(within_s=5.0), most)
    yield chapter(f"{len(lost):,} nodes are lost", lambda: crash(lost), most - len(lost) * workers)
    yield chapter("they come back", lambda: restart(lost), most)
    yield chapter("fewer workers", lambda: cluster.scale(Limits(workers, smaller)), smaller)
    yield chapter("more workers", lambda: cluster.scale(Limits(workers, most)), most)
    yield chapter("the leader is lost", lose_the_leader, most - workers)
    yield chapter("it comes back", lambda: restart(gone), most)
    yield chapter("etcd is away", lose_etcd, most)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.large", description=__doc__)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=WORKERS, help="of a node")
    parser.add_argument("--seed", default="large")
    asked = parser.parse_args()
    gc.disable()  # millions of objects stay alive, and almost none is part of a cycle
    began_at = time.monotonic()
    for chapter in play(asked.nodes, asked.workers, asked.seed):
        print(chapter, flush=True)
    took_s, most_gb = time.monotonic() - began_at, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{took_s:.0f} s in all, {most_gb:.1f} GB of memory; no invariant is broken")


if __name__ == "__main__":
    main()
