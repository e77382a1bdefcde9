"""A run of a cluster under a random schedule of faults, all drawn from one seed.

The schedule is data, so a failing schedule can be printed, and reduced to the faults that matter.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from elasticd.core.facts import Limits, Outcome, Phase, UnitWithin
from elasticd.core.round_parts import PartSizes
from tests.sim.clock import START
from tests.sim.cluster import POLICY, Broken, Cluster, Setup, SimAgent
from tests.sim.inspector import Illness
from tests.sim.invariants import Invariants
from tests.sim.procs import Job, OnSigterm

FAULTS_S = 60.0  # faults happen in the first minute; then everything is mended
STEP_BOUND_S = 90.0  # the longest time to the next step after that
HANG_BOUND_S = 240.0  # the same if a worker hangs: only the agents mend a hang
# the most times that a step of a slow worker may take, if it is very slow; other slow workers stay within 4
SLOWEST = 40.0
LEAVE_BOUND_S = 30.0  # from the end of the job until its last agent has left


@dataclass(frozen=True, slots=True)
class Fault:
    """``at_s``: seconds after the start. ``node``: a name, or "leader" for the node that leads then.
    ``for_s``: seconds until the fault is mended (0: never). ``much``: how bad the fault is, between 0 and 1.
    """

    at_s: float
    kind: str
    node: str = ""
    for_s: float = 0.0
    much: float = 0.0

    def __str__(self) -> str:
        return f"{self.at_s:6.2f} s  {self.kind} {self.node} for {self.for_s:.2f} s ({self.much:.2f})"


@dataclass(frozen=True, slots=True)
class Schedule:
    setup: Setup
    faults: tuple[Fault, ...]


# ---------------------------------------------------------------- what can happen


def _on_node(act: Callable[[Cluster, SimAgent, Fault], None]) -> Callable[[Cluster, Fault], None]:
    def inject(cluster: Cluster, fault: Fault) -> None:
        agent = cluster.leader() if fault.node == "leader" else cluster.agents.get(fault.node)
        if agent is not None and agent.running:
            act(cluster, agent, fault)

    return inject


def _restart_later(cluster: Cluster, agent: SimAgent, fault: Fault) -> None:
    if fault.for_s:
        cluster.clock.after(fault.for_s, lambda: cluster.restart(agent.name))


def _crash(cluster: Cluster, agent: SimAgent, fault: Fault) -> None:
    agent.crash()
    _restart_later(cluster, agent, fault)


def _cut(cluster: Cluster, agent: SimAgent, fault: Fault) -> None:
    agent.store.cut_off()
    cluster.clock.after(fault.for_s, agent.store.reconnect)


def _pause(cluster: Cluster, agent: SimAgent, fault: Fault) -> None:
    cluster.clock.note(agent.name, "is paused")
    agent.host.pause()

    def resume() -> None:
        cluster.clock.note(agent.name, "goes on")
        agent.host.resume()

    cluster.clock.after(fault.for_s, resume)


def _slow(cluster: Cluster, agent: SimAgent, fault: Fault) -> None:
    cluster.clock.note(agent.name, f"is slow: {fault.much * 0.2:.3f} s for everything")
    agent.host.slow_s = fault.much * 0.2
    cluster.clock.after(fault.for_s, lambda: setattr(agent.host, "slow_s", 0.0))


def _user_failure(cluster: Cluster, agent: SimAgent, fault: Fault) -> None:
    slots = sorted(agent.procs.workers)
    if slots:
        agent.procs.crash(slots[int(fault.much * len(slots))], code=1)


def _ill(illness: Illness) -> Callable[[Cluster, Fault], None]:
    def act(cluster: Cluster, agent: SimAgent, fault: Fault) -> None:
        agent.procs.make_ill(illness, fault.much, fault.for_s)

    return _on_node(act)


def _blind(cluster: Cluster, agent: SimAgent, fault: Fault) -> None:
    """Let looks at the node's workers take long, or never end."""
    cluster.clock.note(agent.name, f"is blind ({fault.much:.2f})")
    agent.inspector.blind = fault.much
    cluster.clock.after(fault.for_s, lambda: setattr(agent.inspector, "blind", 0.0))


def _slow_slot(cluster: Cluster, agent: SimAgent, fault: Fault) -> None:
    """Slow one slot down: each worker in it computes for longer."""
    slots = cluster.slow_slots[agent.name]
    slot = int(fault.much * cluster.slots_of(agent.name))
    slots[slot] = SLOWEST if fault.for_s and fault.much < 0.3 else 1.5 + 2.5 * fault.much
    cluster.clock.note(agent.name, f"slot {slot} takes {slots[slot]:.1f} times as long")

    def mend() -> None:
        cluster.clock.note(agent.name, f"slot {slot} is as fast as others")
        slots.pop(slot, None)

    if fault.for_s:
        cluster.clock.after(fault.for_s, mend)


def _crowd(cluster: Cluster, agent: SimAgent, fault: Fault) -> None:
    """Let the node's workers share fewer processors than they need."""
    cluster.clock.note(agent.name, f"is crowded ({fault.much:.2f})")
    agent.host.crowded = fault.much
    cluster.clock.after(fault.for_s, lambda: setattr(agent.host, "crowded", 0.0))


def _reset(cluster: Cluster, agent: SimAgent, fault: Fault) -> None:
    """Reset the connection between two workers that both live."""
    for worker in list(agent.procs.workers.values()):
        if worker.world is not None and cluster.training.job.inplace:
            worker.world.break_up("connection reset by peer")


def _bad_slot(cluster: Cluster, agent: SimAgent, fault: Fault) -> None:
    slot = int(fault.much * cluster.slots_of(agent.name))
    cluster.clock.note(agent.name, f"slot {slot} is bad")
    agent.procs.bad_slots[slot] = cluster.clock.now() + fault.for_s


def _sigterm(cluster: Cluster, agent: SimAgent, fault: Fault) -> None:
    if agent.signalled:  # at the second signal the agent leaves at once, and its workers hand nothing over
        cluster.only_planned = False
    agent.signal(signal.SIGTERM)
    _restart_later(cluster, agent, fault)


def _drain(cluster: Cluster, agent: SimAgent, fault: Fault) -> None:
    cluster.drain(agent.name)
    _restart_later(cluster, agent, fault)


def _etcd_kill(cluster: Cluster, fault: Fault) -> None:
    cluster.etcd.kill()
    cluster.clock.after(fault.for_s, cluster.etcd.recover)


def _etcd_hang(cluster: Cluster, fault: Fault) -> None:
    cluster.etcd.hang()
    cluster.network.misjudged = max(0.0, fault.much - 0.5)

    def recover() -> None:
        cluster.network.misjudged = 0.0
        cluster.etcd.recover()

    cluster.clock.after(fault.for_s, recover)


def _bad_network(cluster: Cluster, fault: Fault) -> None:
    cluster.clock.note("network", f"is bad ({fault.much:.2f})")
    network = cluster.network
    network.slowest_s = 0.005 + 0.3 * fault.much
    network.lost = network.answer_lost = network.late = network.relist = 0.3 * fault.much
    network.watch_lag = fault.much
    cluster.clock.after(fault.for_s, cluster.mend_network)


def _all_crash(cluster: Cluster, fault: Fault) -> None:
    for agent in cluster.running():
        agent.crash()
        cluster.clock.after(
            fault.for_s * (0.5 + cluster.clock.random("restart").random()),
            partial(cluster.restart, agent.name),
        )


def _scale(cluster: Cluster, fault: Fault) -> None:
    limits = cluster.setup.limits
    size = _whole(1 + int(fault.much * cluster.capacity()), limits.unit)
    cluster.scale(replace(limits, min=min(limits.min, size), max=size))


def _whole(size: int, unit: int) -> int:
    """Return the number of workers in whole units, but at least one unit."""
    return max(unit, size - size % unit)


def _join(cluster: Cluster, fault: Fault) -> None:
    cluster.join(fault.node, 1 + int(fault.much * 3))


# how often the fault is drawn, and what injects it
KINDS: dict[str, tuple[float, Callable[[Cluster, Fault], None]]] = {
    "crash": (3.0, _on_node(_crash)),
    "cut": (3.0, _on_node(_cut)),
    "pause": (3.0, _on_node(_pause)),
    "slow": (1.0, _on_node(_slow)),
    "user_failure": (2.0, _on_node(_user_failure)),
    "reset": (0.7, _on_node(_reset)),
    "bad_slot": (0.7, _on_node(_bad_slot)),
    "sigterm": (1.0, _on_node(_sigterm)),
    "drain": (0.7, _on_node(_drain)),
    "join": (1.0, _join),
    "scale": (0.7, _scale),
    "etcd_kill": (0.8, _etcd_kill),
    "etcd_hang": (0.5, _etcd_hang),
    "revoke_all": (0.4, lambda cluster, fault: cluster.etcd.expire_all()),
    "network": (1.5, _bad_network),
    "all_crash": (0.2, _all_crash),
    "stop": (0.1, lambda cluster, fault: cluster.stop()),
}
HANGS: dict[str, tuple[float, Callable[[Cluster, Fault], None]]] = {  # drawn from random numbers of their own
    "stopped": (2.0, _ill(Illness.STOPPED)),
    "asleep": (2.0, _ill(Illness.ASLEEP)),
    "busy": (1.0, _ill(Illness.BUSY)),
    "apart": (1.0, _ill(Illness.APART)),
    "polling": (1.0, _ill(Illness.POLLING)),
    "blind": (1.5, _on_node(_blind)),
}
# drawn from random numbers of their own
SLOWNESS: dict[str, tuple[float, Callable[[Cluster, Fault], None]]] = {
    "slow_slot": (2.0, _on_node(_slow_slot)),
    "crowded": (1.0, _on_node(_crowd)),
}
ALL_KINDS = KINDS | HANGS | SLOWNESS
PLANNED = {"drain", "join", "scale", "sigterm"}
ETCD_FAULTS = {"etcd_kill", "etcd_hang"}


def draw(seed: int | str, nodes: int | None = None, kinds: frozenset[str] | None = None) -> Schedule:
    """Return the schedule of a seed. ``kinds``: draw only these faults."""
    random = Random(f"{seed}/schedule")
    count = nodes or random.choice((2, 3, 3, 4, 5, random.randint(6, 12)))
    slots = tuple(random.choice((1, 1, 2, 4)) for _ in range(count))
    most = random.randint(max(1, sum(slots) // 2), sum(slots) + 2)
    least = random.randint(1, max(1, min(most, sum(slots)) * 2 // 3))
    job = Job(
        total_steps=random.randint(20, 400),
        step_s=random.choice((0.25, 0.5)),
        save_every=random.choice((1, 5, 10)),
        on_sigterm=random.choice(list(OnSigterm)),
        fails_at_end=random.choice((0, 0, 1, 2)),
    )
    in_place = Random(f"{seed}/inplace")
    if in_place.random() < 0.5:
        job = replace(
            job,
            inplace=True,
            spares=in_place.choice((0, 0, 1, 2)),
            stuck=in_place.choice((0.0, 0.0, 0.05)),
            tears=in_place.choice((0.0, 0.0, 0.2)),
            end_s=in_place.choice(((0.005, 0.1), (0.005, 0.1), (1.0, 8.0))),
            dwells=in_place.choice((0.0, 0.0, 0.3)),
            lingers=in_place.choice((0.0, 0.5)),
        )
    elif Random(f"{seed}/tells").random() < 0.5:
        job = replace(job, tells=True)
    kernel = Random(f"{seed}/kernel")
    if kernel.random() < 0.3:
        job = replace(job, taken_down_s=kernel.choice(((0.01, 0.3), (0.1, 3.0), (5.0, 20.0))))
    limits = _draw_units(seed, slots, Limits(least, most))
    if job.inplace and (shards := Random(f"{seed}/shards")).random() < 0.4:
        job = replace(job, sharded=True, redundancy=shards.choice((0, 0, 1, 2)), unit=limits.unit, tears=0.0)
    setup = Setup(slots, limits, skew_max_s=random.choice((0.0, 0.05, 0.5)), job=job)
    parts = Random(f"{seed}/parts")
    if parts.random() < 0.5:
        setup.part_sizes = PartSizes(members=parts.choice((1, 1, 2)), at_once=parts.choice((1, 2, 8)))
    allowed = {k: w for k, (w, _) in KINDS.items() if kinds is None or k in kinds}
    favourites = random.sample(sorted(allowed), k=min(len(allowed), random.randint(1, 6)))
    faults: list[Fault] = []
    etcd_free_at = 0.0
    first_s = random.uniform(0.0, FAULTS_S)
    window_s = (first_s, min(first_s + 15.0, FAULTS_S)) if random.random() < 0.5 else (0.0, FAULTS_S)
    for _ in range(random.randint(0, random.choice((14, 14, 14, 40))) if allowed else 0):
        kind = random.choices(favourites, [allowed[k] for k in favourites])[0]
        at_s = round(random.uniform(*window_s), 2)
        for_s = round(random.choice((random.uniform(0.2, 4.0), random.uniform(2.0, 25.0))), 2)
        node = random.choice([f"n{i}" for i in range(count)] + ["leader"] * 2)
        if kind == "join":
            node = f"n{count + random.randint(0, 2)}"
        if kind in ("crash", "sigterm", "drain") and random.random() < 0.3:
            for_s = 0.0
        faults.append(Fault(at_s, kind, node, for_s, int(random.random() * 100) / 100))
    if job.sharded:
        _draw_memory(seed, setup)
    faults += _draw_hangs(seed, count, kinds)
    slowness = _draw_slowness(seed, count, kinds)
    if slowness:
        faults += slowness
        drains = Random(f"{seed}/drains").random() < 0.3
        setup.policy = replace(POLICY, straggler_window_s=12.0, straggler_drain=drains)
    faults.sort(key=lambda f: f.at_s)
    kept = []
    for fault in faults:  # at most one outage of etcd at a time
        if fault.kind in ETCD_FAULTS:
            if fault.at_s < etcd_free_at:
                continue
            etcd_free_at = fault.at_s + fault.for_s + 0.1
        kept.append(fault)
    return Schedule(setup, tuple(kept))


def _draw_units(seed: int | str, slots: tuple[int, ...], limits: Limits) -> Limits:
    """In some schedules, let worlds consist of whole units."""
    random = Random(f"{seed}/units")
    if random.random() < 0.7:
        return limits
    unit, within = random.choice((2, 2, 3, 4)), random.choice(list(UnitWithin))
    places = _places(slots, Limits(unit, unit, unit, within))
    if places < unit:
        return limits
    least = _whole(min(limits.min, places * 2 // 3), unit)
    return Limits(least, max(least, _whole(limits.max, unit)), unit, within)


def _places(slots: tuple[int, ...], limits: Limits) -> int:
    """Return how many workers can be in whole units on these nodes."""
    unit = limits.unit
    return sum(n - n % unit for n in slots) if limits.within is UnitWithin.NODE else sum(slots)


def _draw_memory(seed: int | str, setup: Setup) -> None:
    """Draw a state for which a world above ``min`` may be too small, but never a world of two thirds of all
    workers."""
    random = Random(f"{seed}/memory")
    if random.random() < 0.5:
        unit = setup.limits.unit
        workers = max(setup.limits.min, _whole(_places(setup.slots, setup.limits) * 2 // 3, unit))
        workers = min(setup.limits.max, workers)
        setup.memory = 1000
        replicas = workers // unit if unit > 1 else 1
        copies = max(0, min(setup.job.redundancy + 1, workers) - replicas)
        of_own = replicas + copies / 2
        setup.job.state = int(workers * setup.memory / of_own * random.uniform(0.5, 1.0))


def _draw_hangs(seed: int | str, count: int, kinds: frozenset[str] | None) -> list[Fault]:
    """In some schedules, let workers hang. Random numbers of its own leave the other faults of old seeds as
    they were."""
    random = Random(f"{seed}/hangs")
    allowed = {k: w for k, (w, _) in HANGS.items() if kinds is None or k in kinds}
    if not allowed or (kinds is None and random.random() < 0.5):
        return []
    faults = []
    for _ in range(random.randint(1, 5)):
        kind = random.choices(list(allowed), list(allowed.values()))[0]
        at_s = round(random.uniform(5.0, FAULTS_S), 2)
        passes = kind in ("busy", "blind") or random.random() < 0.3
        for_s = round(random.uniform(0.5, 25.0), 2) if passes else 0.0
        node = random.choice([f"n{i}" for i in range(count)] + ["leader"])
        faults.append(Fault(at_s, kind, node, for_s, int(random.random() * 100) / 100))
    return faults


def _draw_slowness(seed: int | str, count: int, kinds: frozenset[str] | None) -> list[Fault]:
    """In some schedules, let workers be slower than their peers."""
    random = Random(f"{seed}/slowness")
    allowed = {k: w for k, (w, _) in SLOWNESS.items() if kinds is None or k in kinds}
    if not allowed or (kinds is None and random.random() < 0.7):
        return []
    faults = []
    for _ in range(random.randint(1, 3)):
        kind = random.choices(list(allowed), list(allowed.values()))[0]
        at_s = round(random.uniform(1.0, FAULTS_S), 2)
        for_s = 0.0 if kind == "slow_slot" and random.random() < 0.5 else round(random.uniform(1.0, 60.0), 2)
        node = random.choice([f"n{i}" for i in range(count)] + ["leader"])
        faults.append(Fault(at_s, kind, node, for_s, int(random.random() * 100) / 100))
    return faults


# ---------------------------------------------------------------- a run


@dataclass(slots=True)
class Run:
    """The result of a schedule. ``broken``: the rule that was broken, in a sentence."""

    cluster: Cluster
    invariants: Invariants
    broken: str = ""


def run(seed: int | str, schedule: Schedule) -> Run:
    """Run the schedule, and then the job until it is over."""
    cluster = Cluster(seed, schedule.setup)
    result = Run(cluster, Invariants(cluster))
    try:
        _play(cluster, result.invariants, schedule)
    except Exception as e:  # an agent that raises an exception is a finding, too
        result.broken = str(e) if isinstance(e, Broken) else repr(e)
    return result


def _play(cluster: Cluster, invariants: Invariants, schedule: Schedule) -> None:
    clock = cluster.clock
    cluster.start_all(within_s=2.0)
    planned = all(fault.kind in PLANNED for fault in schedule.faults)
    # A worker that is late to leave, because it hangs or is in the script's own code, is killed in the end.
    late = schedule.setup.job.stuck or schedule.setup.job.dwells
    cluster.only_planned = planned and not late
    cluster.troubled = any(fault.kind not in SLOWNESS for fault in schedule.faults)
    for fault in schedule.faults:
        clock.after(fault.at_s, partial(ALL_KINDS[fault.kind][1], cluster, fault))
    quiet = START + FAULTS_S if schedule.faults else START
    if not clock.run(until=quiet, done=lambda: bool(invariants.ends)):
        cluster.mend()
        if schedule.setup.memory:  # the job may have been scaled below the memory that its state needs
            cluster.scale(schedule.setup.limits)
        mended = clock.now()
        hangs = any(fault.kind in HANGS for fault in schedule.faults)
        step_s = HANG_BOUND_S if hangs else STEP_BOUND_S
        if not clock.run(
            until=mended + step_s,
            done=lambda: bool(invariants.ends) or invariants.last_step_at > mended,
        ):
            raise Broken(f"no step within {step_s} s after everything was mended")
        job = cluster.training.job
        slowest = max((s for slots in cluster.slow_slots.values() for s in slots.values()), default=1.0)
        bound_s = step_s + 3 * job.total_steps * job.step_s * slowest
        if not clock.run(until=mended + bound_s, done=lambda: bool(invariants.ends)):
            raise Broken(f"the job is not over {bound_s:.0f} s after everything was mended")
    _check_the_end(cluster, invariants, schedule)


def _check_the_end(cluster: Cluster, invariants: Invariants, schedule: Schedule) -> None:
    clock = cluster.clock
    outcome = invariants.ends[-1].outcome
    asked_to_stop = any(f.kind == "stop" for f in schedule.faults)
    clock.note("job", f"is over: {outcome}")
    if outcome is Outcome.SHORT or (outcome is Outcome.STOPPED and not asked_to_stop):
        raise Broken(f"the job ends {outcome}: {invariants.ends[-1].why}")
    cluster.mend(restart=False)
    there = [a for a in cluster.running() if a.driver.state.registration.joined]
    if not clock.run(until=clock.now() + LEAVE_BOUND_S, done=lambda: not any(a.running for a in there)):
        late = [a.name for a in there if a.running]
        if invariants.newest is not None and invariants.newest.phase is not Phase.ENDED:
            return  # an agent that came after the end runs the job again, with those that missed the end
        raise Broken(f"{late} are still there {LEAVE_BOUND_S} s after the end of the job")
    for agent in cluster.all:
        if agent.left is not None:
            invariants.check_left(agent)


def shrink(seed: int | str, schedule: Schedule) -> Schedule:
    """Return the schedule with fewer faults that breaks the same rule (the same first words, at least)."""

    def rule(broken: str) -> str:
        return " ".join(word for word in broken.split() if word.isalpha())[:40]

    wanted = rule(run(seed, schedule).broken)
    smaller = True
    while smaller:
        smaller = False
        for i in reversed(range(len(schedule.faults))):
            less = replace(schedule, faults=schedule.faults[:i] + schedule.faults[i + 1 :])
            if less.faults and rule(run(seed, less).broken) == wanted:
                schedule, smaller = less, True
    return schedule
