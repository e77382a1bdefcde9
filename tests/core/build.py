"""Makes facts for the tests of the core, in one line each. A test names only the fields that matter to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from elasticd.core.agent.agent_state import Crew, Leaving, Stopping
from elasticd.core.facts import (
    Budget,
    Cause,
    Charge,
    Drained,
    Exit,
    Fact,
    Failure,
    Limits,
    Member,
    Members,
    Node,
    Outcome,
    Phase,
    Policy,
    Report,
    Round,
    Spec,
)
from elasticd.core.leader import Plan, Registered, View
from elasticd.core.lifecycle import Life
from elasticd.core.persistent_map import PersistentMap
from elasticd.core.ports import Put

NOW = 10_000.0
SPEC_REVISION, ROUND_REVISION, BUDGET_REVISION = 11, 22, 33
POLICY = Policy()


def spec(
    min: int = 2,
    max: int = 8,
    *,
    policy: Policy = POLICY,
    stop: bool = False,
    drain: Sequence[str] = (),
    script: str = "job.py",
    asked: Limits | None = None,
    version: str = "",
) -> Spec:
    return Spec(
        asked=asked or Limits(min, max),
        limits=Limits(min, max),
        script=script,
        fingerprint=f"fingerprint of {script}",
        policy=policy,
        stop=stop,
        drain=tuple(Drained(name, life(name)) for name in drain),
        version=version,
    )


def life(name: str, number: int = 1) -> str:
    """Return the incarnation of a node's agent: its first, its second, ..."""
    return f"{name}#{number}"


def node(
    name: str,
    slots: int | Sequence[int] = 2,
    *,
    released: int = 0,
    draining: bool = False,
    life_number: int = 1,
    port: int = 29500,
    fenced: int = 0,
    told: int = 0,
) -> Node:
    return Node(
        name=name,
        incarnation=life(name, life_number),
        address=f"{name}.example",
        slots=tuple(range(slots)) if isinstance(slots, int) else tuple(slots),
        released=released,
        store_port=port,
        pid=4711,
        host=f"machine of {name}",
        draining=draining,
        fenced=fenced,
        told=told,
    )


def members(sizes: Mapping[str, int]) -> Members:
    """``{"a": 2, "b": 1}``: a has ranks 0 and 1, b has rank 2."""
    made: list[Member] = []
    rank = 0
    for name, size in sizes.items():
        made.append(Member(name, life(name), tuple(range(size)), rank, len(made)))
        rank += size
    return Members(made)


def round(
    number: int,
    sizes: Mapping[str, int],
    phase: Phase = Phase.LIVE,
    *,
    since: float = NOW - 5,
    cause: Cause = Cause.START,
    closing: Cause | None = None,
    planned: bool = False,
    restarts: int = 0,
    lived_s: float = 0.0,
    outcome: Outcome | None = None,
    failure: Failure | None = None,
    port: int = 29500,
) -> Round:
    chosen = members(sizes)
    return Round(
        number=number,
        phase=phase,
        members=chosen,
        store=f"{chosen[0].node}.example:{port}" if chosen else "",
        cause=cause,
        since=since,
        closing=closing,
        planned=planned,
        restarts=restarts,
        lived_s=lived_s,
        outcome=outcome,
        failure=failure,
    )


def exit(slot: int = 0, rank: int = 0, code: int = 1, at: float = NOW - 1, *, fenced: bool = False) -> Exit:
    return Exit(slot, rank, code, at, message="boom" if code else "", fenced=fenced)


def crew(
    round: Round,
    member: Member | None = None,
    lives: Mapping[int, Life] | None = None,
    *exits: Exit,
    order: Leaving | Stopping | None = None,
    broken: bool = False,
) -> Crew:
    """Return the crew of a member, by default of the first one. Its workers train, except those in
    ``lives``."""
    member = member or round.members[0]
    workers = {**dict.fromkeys(member.slots, Life.TRAINING), **(lives or {})}
    told = Report(member.node, member.incarnation, round.number, exits, broken=broken)
    return Crew(round, member, workers, told, order)


def report(
    name: str,
    round: int,
    *exits: Exit,
    finished: bool = False,
    steps: int = 0,
    life_number: int = 1,
) -> Report:
    return Report(name, life(name, life_number), round, exits, finished, steps)


def charges(*places: tuple[str, int], at: float = NOW - 100, progressed: bool = False) -> Budget:
    made = tuple(Charge(at, name, slot, progressed) for name, slot in places)
    return Budget(made, total=len(made))


def view(
    spec: Spec,
    round: Round | None,
    nodes: Sequence[Node] = (),
    reports: Sequence[Report] = (),
    budget: Budget | None = None,
    *,
    seen_at: float = 0.0,
    absence_counts_from: float = 0.0,
) -> View:
    """Return what a leader sees. Nodes are registered in the given order."""
    return View(
        spec=spec,
        round=round,
        budget=budget or Budget(),
        nodes=PersistentMap({n.name: Registered(n, 100 + i, seen_at) for i, n in enumerate(nodes)}),
        reports=PersistentMap({r.node: r for r in reports}),
        absence_counts_from=absence_counts_from,
        revisions={
            "spec": SPEC_REVISION,
            "round": ROUND_REVISION if round else 0,
            "budget": BUDGET_REVISION if budget else 0,
            "hang": 0,
            "stragglers": 0,
        },
    )


def not_listed(view: View, key: str) -> View:
    """Return what a leader sees before the key was listed."""
    return replace(view, revisions={k: revision for k, revision in view.revisions.items() if k != key})


def written(plan: Plan, key: str) -> Fact:
    """Return the one fact that the plan writes to a key."""
    facts = [w.fact for w in plan.writes if isinstance(w, Put) and w.key == key]
    assert len(facts) == 1, f"{key} is written {len(facts)} times in {plan}"
    return facts[0]


def next_round(plan: Plan) -> Round:
    fact = written(plan, "round")
    assert isinstance(fact, Round)
    return fact
