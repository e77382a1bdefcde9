"""A view of a job from outside, made from the facts in etcd. Pure.

``as_json`` returns the stable form that ``elasticd status --json`` prints; elasticd/cli/STATUS.md describes
its fields. While ``schema`` stays the same, fields may be added, and never renamed or removed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from elasticd.core import budget as budgets
from elasticd.core import ledger, world
from elasticd.core.facts import (
    Budget,
    Checkpoint,
    Fact,
    Laggard,
    Leadership,
    Limits,
    Node,
    NodeLedger,
    Phase,
    Progress,
    Round,
    SlotProgress,
    Spec,
    Stragglers,
)
from elasticd.telemetry import describe
from elasticd.telemetry.snapshot import SlotState

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class SlotReport:
    """One slot of a node. ``state``: in the terms of the live view. ``rank``: None if the slot is not in this
    round."""

    slot: int
    state: SlotState
    rank: int | None = None
    pid: int | None = None
    step: int | None = None
    steps_per_s: float | None = None
    quarantined_until: float | None = None


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node of the job. ``state``: "member" of the round, "waiting" for the next, "draining", or "lost" (a
    member whose lease has expired). ``own_bytes``, ``replica_bytes``: see ``Progress``."""

    node: str
    state: str
    address: str | None
    host: str | None
    slots: tuple[SlotReport, ...]
    own_bytes: int = 0
    replica_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """The number of workers, if it is below the job's minimum."""

    have: int
    need: int


@dataclass(frozen=True, slots=True)
class FailureReport:
    """The last failure of a worker. ``traceback`` and the other optional fields are known only for the
    failure that broke the last round."""

    node: str
    slot: int
    at: float
    rank: int | None = None
    code: int | None = None
    message: str | None = None
    traceback: str | None = None
    log: str | None = None
    hung: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """The newest committed checkpoint. ``at``: the time of the commit; ``age_s``: its age; ``size``:
    bytes."""

    name: str
    step: int
    at: float
    age_s: float
    size: int

    def in_words(self, now: float) -> str:
        return f"step {self.step} is the newest checkpoint, {describe.span(now - self.at)} old"


@dataclass(frozen=True, slots=True)
class JobReport:
    """The state of a job. ``phase``: "starting" (no round yet), "waiting", "live", "closing" or "ended",
    since ``since``. Times are seconds since the epoch. ``cause``: why the round began; of a closing round,
    why it closes. ``steps_per_s``: the pace of the slowest worker, since all wait for it. ``time``: seconds
    of all slots by kind, up to half a minute old; ``goodput``: the productive share. ``stragglers``: workers
    that are slow in this round, or whose GPU is faulty, as the leader judges. ``step_told``: whether the
    script reports the job's ``step``; otherwise ``step`` counts from the start of this round. ``etcd_full``:
    etcd has no space, so the job cannot change."""

    job: str
    phase: str
    round: int
    cause: str | None
    since: float | None
    world_size: int
    limits: Limits | None
    asked: Limits | None
    script: str | None
    step: int | None
    steps_per_s: float | None
    restarts: int
    budget_left: int | None
    leader: str | None
    stopping: bool
    waiting_for: Need | None
    outcome: str | None
    why: str | None
    last_failure: FailureReport | None
    nodes: tuple[NodeReport, ...]
    time: Mapping[str, float] | None = None
    goodput: float | None = None
    checkpoint: CheckpointReport | None = None
    stragglers: tuple[Laggard, ...] = ()
    etcd_full: bool = False
    step_told: bool = True
    schema: int = SCHEMA

    @property
    def ended(self) -> bool:
        return self.phase == Phase.ENDED

    def as_json(self) -> dict[str, Any]:
        """Return a dict for ``json.dumps``."""
        return asdict(self)


@dataclass(slots=True)
class StepRate:
    """Steps per second of each slot, between its last two heartbeats. Before there are two, the average since
    the round formed."""

    _last: dict[tuple[str, int], SlotProgress] = field(default_factory=dict)
    _rates: dict[tuple[str, int], float] = field(default_factory=dict)

    def of(self, node: str, now: SlotProgress, formed_at: float) -> float | None:
        if now.at == 0:
            return None  # no step yet
        key = (node, now.slot)
        before = self._last.get(key)
        fresh = before is None or before.pid != now.pid or now.step < before.step
        if fresh:
            self._rates.pop(key, None)
            self._last[key] = now
        elif before is not None and now.at > before.at and now.step > before.step:
            self._rates[key] = (now.step - before.step) / (now.at - before.at)
            self._last[key] = now
        if key in self._rates:
            return self._rates[key]
        lived_s = now.at - formed_at
        return now.step / lived_s if now.step > 0 and lived_s > 0 else None


def report(job: str, facts: Mapping[str, Fact], now: float, pace: StepRate | None = None) -> JobReport:
    """Return the report of a job from its keys (below ``/elasticd/<job>/``). ``now``: seconds since the
    epoch."""
    spec, round_, budget, leader = (facts.get(k) for k in ("spec", "round", "budget", "leader"))
    assert spec is None or isinstance(spec, Spec)
    assert round_ is None or isinstance(round_, Round)
    budget = budget if isinstance(budget, Budget) else Budget()
    nodes = {f.name: f for key, f in sorted(facts.items()) if isinstance(f, Node)}
    progress = {f.node: f for f in facts.values() if isinstance(f, Progress)}
    pace = pace or StepRate()
    if round_ is not None and round_.phase is Phase.CLOSING and not nodes:
        round_ = replace(round_, phase=Phase.WAITING)  # no node is left to end the phase
    live = round_ if round_ is not None and round_.phase is Phase.LIVE else None
    members = (
        {m.node: m for m in round_.members} if round_ is not None and round_.phase is not Phase.ENDED else {}
    )

    reports: list[NodeReport] = []
    for name in sorted(
        {*nodes, *members},
        key=lambda n: (members[n].base_rank if n in members else math.inf, n),
    ):
        node, member = nodes.get(name), members.get(name)
        if node is not None and member is not None and node.incarnation != member.incarnation:
            member = None  # the node was restarted, and is not a member
        beats = {}
        if round_ is not None and name in progress and progress[name].round == round_.number:
            beats = {s.slot: s for s in progress[name].slots}
        kept_out = {q.slot: q.until for q in budget.quarantines if q.node == name and q.until > now}
        slots: list[SlotReport] = []
        for slot in sorted({*(node.slots if node else ()), *(member.slots if member else ())}):
            if round_ is not None and member is not None and slot in member.slots:
                beat = beats.get(slot)
                slots.append(
                    SlotReport(
                        slot,
                        _of_worker(round_.phase, beat),
                        member.rank_of(slot),
                        beat.pid if beat else None,
                        beat.of_job if beat else None,
                        pace.of(name, beat, live.since) if beat and live else None,
                    )
                )
            elif slot in kept_out:
                slots.append(SlotReport(slot, SlotState.QUARANTINED, quarantined_until=kept_out[slot]))
            elif node is not None and slot in node.ready:
                slots.append(SlotReport(slot, SlotState.READY))
            else:
                slots.append(SlotReport(slot, SlotState.IDLE))
        if node is None:
            state = "lost"
        elif node.draining:
            state = "draining"
        else:
            state = "member" if member is not None else "waiting"
        reports.append(
            NodeReport(
                name,
                state,
                node.address if node else None,
                node.host if node else None,
                tuple(slots),
                progress[name].own_bytes if name in progress else 0,
                progress[name].replica_bytes if name in progress else 0,
            )
        )

    told = all(b.tells for p in progress.values() if round_ and p.round == round_.number for b in p.slots)
    working = [s for n in reports for s in n.slots if s.rank is not None]
    rates = [s.steps_per_s for s in working if s.steps_per_s is not None]
    need = _need(spec, round_, nodes, budget, now)
    lag = facts.get("stragglers")
    kept = [f for f in facts.values() if isinstance(f, NodeLedger)]
    spent = ledger.totals(kept) if kept else None
    return JobReport(
        job=job,
        phase=str(round_.phase) if round_ else "starting",
        round=round_.number if round_ else 0,
        cause=str(round_.closing or round_.cause) if round_ else None,
        since=round_.since if round_ else None,
        world_size=live.world_size if live else 0,
        limits=spec.limits if spec else None,
        asked=spec.asked if spec else None,
        script=spec.script if spec else None,
        step=max((s.step for s in working if s.step is not None), default=None),
        steps_per_s=min(rates, default=None),
        restarts=budget.total,
        budget_left=budgets.left(budget, spec.policy, now) if spec else None,
        leader=leader.node if isinstance(leader, Leadership) else None,
        stopping=spec.stop if spec else False,
        waiting_for=need,
        outcome=str(round_.outcome) if round_ and round_.outcome else None,
        why=round_.why or None if round_ else None,
        last_failure=_last_failure(round_, budget),
        nodes=tuple(reports),
        time=spent,
        goodput=ledger.goodput(spent) if spent else None,
        checkpoint=_newest(facts.get("checkpoint"), now),
        stragglers=lag.slow if isinstance(lag, Stragglers) and live and lag.round == live.number else (),
        step_told=told,
    )


def _newest(checkpoints: Fact | None, now: float) -> CheckpointReport | None:
    saved = checkpoints.newest if isinstance(checkpoints, Checkpoint) else None
    if saved is None:
        return None
    return CheckpointReport(saved.name, saved.step, saved.at, max(0.0, now - saved.at), saved.size)


def _of_worker(phase: Phase, beat: SlotProgress | None) -> SlotState:
    if phase is Phase.WAITING:
        return SlotState.IDLE  # the record still has the last round's members; their workers are gone
    if phase is Phase.CLOSING:
        return SlotState.STOPPING
    return SlotState.RUNNING if beat is not None and beat.step else SlotState.STARTING


def _need(
    spec: Spec | None,
    round_: Round | None,
    nodes: Mapping[str, Node],
    budget: Budget,
    now: float,
) -> Need | None:
    """Return how many workers are missing, if a job without a live round waits for workers."""
    if spec is None or (round_ is not None and round_.phase in (Phase.LIVE, Phase.ENDED)):
        return None
    staying = [n for n in nodes.values() if not n.draining]
    have = sum(len(world.usable_slots(n, budget.quarantines, now)) for n in staying)
    return Need(have, spec.limits.min) if have < spec.limits.min else None


def _last_failure(round_: Round | None, budget: Budget) -> FailureReport | None:
    if round_ is not None and round_.failure is not None:
        node, exit = round_.failure.node, round_.failure.exit
        return FailureReport(
            node,
            exit.slot,
            exit.at,
            exit.rank,
            exit.code,
            exit.message,
            exit.traceback or None,
            exit.log or None,
            exit.hung,
        )
    if budget.charges:
        last = budget.charges[-1]
        return FailureReport(last.node, last.slot, last.at)
    return None


# ---------------------------------------------------------------- in words


def as_text(r: JobReport, now: float) -> list[str]:
    """Return the report for people: a headline, the reason to wait, the last failure, and a line for each
    slot."""
    limits = f" ({r.limits.min}..{r.limits.max})" if r.limits else ""
    head = f"{r.job}: round {r.round} {r.phase}"
    if r.since is not None and not r.ended:
        head += f" for {describe.span(now - r.since)}"
    head += f", world {r.world_size}{limits}"
    if r.step is not None:
        head += f", {describe.step(r.step, r.step_told)}"
    if r.steps_per_s is not None:
        head += f", {r.steps_per_s:.2f} steps/s"
    lines = [head]
    if r.etcd_full:
        lines.append("  etcd      is full: nothing is replaced or resized until there is room (see the log)")
    if r.script:
        lines.append(f"  script    {r.script}")
    if r.budget_left is not None:
        lines.append(f"  restarts  {r.restarts}, {r.budget_left} left")
    if r.time and (told := describe.spent(r.time)):
        lines.append(f"  goodput   {told}")
    if r.checkpoint:
        lines.append(f"  saved     {r.checkpoint.in_words(now)}")
    lines += [f"  lags      {describe.laggard(one)}" for one in r.stragglers]
    if r.leader:
        lines.append(f"  leader    {r.leader}")
    if r.waiting_for:
        n = r.waiting_for
        lines.append(
            f"  waiting   for {describe.count(n.need - n.have, 'more worker')}: {n.have} of at least {n.need}"
        )
    if r.outcome:
        lines.append(f"  outcome   {r.outcome}" + (f": {r.why}" if r.why else ""))
    elif r.stopping:
        lines.append("  stopping  somebody asked for it with `elasticd stop`")
    if f := r.last_failure:
        how = (
            f"rank {f.rank}, {describe.ending(f.code, hung=f.hung)}" if f.code is not None else "see its log"
        )
        said = f": {describe.first_line(f.message)}" if f.message and f.message.strip() else ""
        lines.append(f"  failed    slot {f.slot} on {f.node} {describe.span(now - f.at)} ago ({how}){said}")
        if f.log:
            lines.append(f"  its log   {f.log} (on {f.node})")
    for node in r.nodes:
        where = f" at {node.address}" if node.address else ""
        lines.append(f"  {node.node}{where}: {node.state}, {describe.count(len(node.slots), 'slot')}")
        if node.own_bytes or node.replica_bytes:
            lines.append(
                f"    memory  {node.own_bytes / 1e6:.1f} MB of its checkpoints, "
                f"{node.replica_bytes / 1e6:.1f} MB of other nodes'"
            )
        lines += [f"    {_slot(s, now)}" for s in node.slots]
    if not r.nodes and not r.ended:
        lines.append("  no node is here")
    return lines


def _slot(s: SlotReport, now: float) -> str:
    text = f"slot {s.slot}  "
    if s.rank is not None:
        text += f"rank {s.rank}  "
    text += s.state
    if s.quarantined_until is not None:
        text += f" for another {describe.span(s.quarantined_until - now)}"
    if s.step is not None:
        text += f"  step {s.step}"
    if s.steps_per_s is not None:
        text += f"  {s.steps_per_s:.2f}/s"
    if s.pid and s.state in (SlotState.STARTING, SlotState.RUNNING, SlotState.STOPPING):
        text += f"  pid {s.pid}"
    return text
