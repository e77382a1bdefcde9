"""``python -m tests.sim.large --nodes 10000``: one large job through all that happens to one, with the
invariants: start, nodes lost at once, their return, scaling, the loss of the leader, an outage of etcd."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from elasticd.core.facts import Limits, Phase
from tests.sim.cluster import Broken, Cluster, Setup
from tests.sim.invariants import Invariants
from tests.sim.procs import Job

WORKERS = 8  # of a node
LOST = 0.05  # of the nodes
SMALLER = 0.9  # of the workers
OUTAGE_S = 10.0
BOUND_S = 180.0  # from an event to the next step of the world that it leads to


@dataclass(frozen=True, slots=True)
class Chapter:
    """``took_s``: seconds of the machine; ``lasted_s``: of the job."""

    what: str
    took_s: float
    lasted_s: float
    events: int
    world: int

    def __str__(self) -> str:
        job = f"{self.lasted_s:6.1f} s of the job"
        return (
            f"{self.what:<28}{self.took_s:7.1f} s{job:>22}{self.events:>12,} events{self.world:>8,} workers"
        )


def play(nodes: int, workers: int = WORKERS) -> Iterator[Chapter]:
    """Yield what each chapter took. Raise Broken if an invariant is broken, or if no world trains in time."""
    most = nodes * workers
    setup = Setup((workers,) * nodes, Limits(workers, most), job=Job(total_steps=10**6, step_s=1.0))
    cluster = Cluster("large", setup)
    invariants, clock = Invariants(cluster), cluster.clock
    lost = [f"n{n}" for n in range(1, nodes, round(1 / LOST))]

    def chapter(what: str, begin: Callable[[], None], size: int) -> Chapter:
        """Let it begin, and wait for a step of a world of this size."""
        began_at, now, events = time.monotonic(), clock.now(), clock.events
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
        lasted_s, took_s = clock.now() - now, time.monotonic() - began_at
        return Chapter(what, took_s, lasted_s, clock.events - events, size)

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
        cluster.etcd.kill()
        clock.after(OUTAGE_S, cluster.etcd.recover)
        clock.run(until=clock.now() + OUTAGE_S + 5.0)

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
    asked = parser.parse_args()
    began_at = time.monotonic()
    for chapter in play(asked.nodes, asked.workers):
        print(chapter, flush=True)
    print(f"{time.monotonic() - began_at:.0f} s in all; no invariant is broken")


if __name__ == "__main__":
    main()
