"""Decide which kind each second of this node's slots has, from the agent's state and the workers' steps.
``core.ledger`` adds the seconds up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elasticd.core.agent.agent_state import AgentState
from elasticd.core.facts import NodeLedger, Phase, SlotProgress
from elasticd.core.ledger import AtWork, Kind, Ledger, Seen, keep_every_s
from elasticd.core.lifecycle import Life


@dataclass(frozen=True, slots=True)
class HeldUp:
    """How long checkpoints have held up a process: ``until_round_s`` before it entered ``round``, and
    ``so_far_s`` in all."""

    pid: int
    round: int
    until_round_s: float
    so_far_s: float


@dataclass(frozen=True, slots=True)
class Timekeeping:
    """The ledger of this node, and the facts that are needed to continue it.

    ``began_at``: the agent's start. ``kept``: the record that an earlier agent of this node left; None until
    the leader has been asked (``listed``), or if there is none. ``resumed``: whether the ledger continues
    ``kept``. ``run``: see ``NodeLedger``. ``write_due``: when the leader is told the record again, if
    ``round`` does not change before. ``held``: the time lost to checkpoints, by slot.
    """

    began_at: float
    ledger: Ledger = field(default_factory=Ledger)
    kept: NodeLedger | None = None
    listed: bool = False
    resumed: bool = False
    run: int = 0
    write_due: float = 0.0
    round: tuple[int, Phase] = (0, Phase.WAITING)
    held: Mapping[int, HeldUp] = field(default_factory=dict)


def start(state: AgentState, began_at: float) -> Timekeeping:
    ledger = Ledger().see(dict.fromkeys(_slots(state, Ledger()), Kind.RENDEZVOUS), began_at)
    return Timekeeping(began_at, ledger, write_due=began_at)


def keep_time(
    known: Timekeeping,
    state: AgentState,
    beats: Sequence[SlotProgress],
    first_at: Mapping[int, float],
    hung: tuple[int, float],
    now: float,
) -> tuple[Timekeeping, NodeLedger | None]:
    """Return the timekeeping after the workers' steps were read, and the record if it is to be told.

    ``beats``: the heartbeats of the crew's workers. ``first_at``: when each worker made its first step of the
    round, if known (seconds since the epoch). ``hung``: the last round that was found to hang, and the time
    of the verdict. The round counts as hung until a worker makes a step.
    """
    number = state.crew.round.number if state.crew is not None else 0
    held = {beat.slot: _hold(known.held.get(beat.slot), beat, number) for beat in beats}
    if any(known.held.get(slot) is not one for slot, one in held.items()):
        known = replace(known, held={**known.held, **held})
    at_work = {b.slot: _at_work(known, number, b, first_at.get(b.slot, 0.0)) for b in beats}
    ledger = known.ledger.see(_last_steps(known.ledger, at_work), now)
    slots = _slots(state, ledger)
    alive = state.alive
    ledger = ledger.see({slot: _seen(state, slot, alive, at_work.get(slot), hung) for slot in slots}, now)
    run = state.seen["spec"].created if state.spec is not None else known.run
    known = replace(known, ledger=ledger, run=run)
    if (
        not known.resumed
        and known.listed
        and state.registration.joined
        and state.round is not None
        and not state.over
    ):
        known = _resume(known, state, now)
    round = (state.round.number, state.round.phase) if state.round is not None else known.round
    if now < known.write_due and round == known.round:
        return known, None
    known = replace(known, round=round, write_due=now + keep_every_s(now - known.began_at))
    return known, known.ledger.record(state.me.node, now, known.run) if known.resumed else None


def concerned(state: AgentState) -> tuple[object, ...]:
    """Return the part of the state that ``keep_time`` depends on. It changes seldom."""
    crew = state.crew
    its = (crew.round.number, crew.member, crew.workers, crew.order) if crew is not None else ()
    seen = state.seen
    idle = state.standbys, state.takedown.held_back
    return its, idle, state.registration.joined, seen.get("round"), seen.get("spec")


def find(known: Timekeeping, kept: NodeLedger | None) -> Timekeeping:
    """Return the timekeeping after the leader was asked for the node's record. A later answer is ignored,
    since the leader then has this agent's own record."""
    return known if known.resumed else replace(known, kept=kept, listed=True)


def close(known: Timekeeping, state: AgentState, now: float) -> tuple[Timekeeping, NodeLedger]:
    """Return the timekeeping with all time up to ``now``, and the last record before the agent exits."""
    known = replace(known, ledger=known.ledger.close(now))
    return known, known.ledger.record(state.me.node, now, known.run)


def not_at_work(state: AgentState, slot: int, alive: frozenset[int]) -> Kind | None:
    """Return the kind of the slot's time while no worker is at work in the slot; None if a worker is at work.
    ``alive``: the slots of the crew with a live worker."""
    crew, round = state.crew, state.round
    if round is not None and round.phase is Phase.ENDED and state.registration.joined:
        return Kind.RESTARTING if slot in alive else Kind.IDLE
    if crew is not None and slot in crew.workers:
        if slot in alive and crew.order is None:
            return None
        if slot in state.standbys:
            return Kind.RENDEZVOUS  # the worker has left the round, and keeps its process for the next
        done = crew.workers[slot] is Life.FINISHED and crew.order is None
        return Kind.IDLE if done else Kind.RESTARTING
    if round is None or not state.registration.joined:
        return Kind.RENDEZVOUS
    if state.standbys.get(slot) is Life.STARTING or slot in state.takedown.held_back:
        return Kind.RESTARTING  # the process is starting, or starts soon, and waits for no other worker yet
    if round.phase is Phase.WAITING:
        return Kind.WAITING
    member = round.member(state.me.node, state.me.incarnation)
    if member is not None and slot in member.slots:
        return Kind.RENDEZVOUS
    return Kind.IDLE


def _slots(state: AgentState, ledger: Ledger) -> list[int]:
    """Return the slots to account for: this node's first ``limits.max`` slots, and every other slot that has
    had a worker."""
    most = state.limits.max
    used = {*ledger.slots, *(state.crew.member.slots if state.crew is not None else ())}
    return [slot for n, slot in enumerate(state.me.slots) if n < most or slot in used]


def _resume(known: Timekeeping, state: AgentState, now: float) -> Timekeeping:
    kept, ledger = known.kept, known.ledger
    if kept is not None and kept.run == known.run:
        back = {time.slot for time in kept.slots}.intersection(state.me.slots)
        ledger = ledger.see(dict.fromkeys(back - {*ledger.slots}, Kind.IDLE), now)
        ledger = ledger.resume(kept)
    return replace(known, ledger=ledger, resumed=True)


def _hold(before: HeldUp | None, beat: SlotProgress, round: int) -> HeldUp:
    same = before is not None and before.pid == beat.pid
    if before is not None and same and before.round == round:
        return before if before.so_far_s == beat.held_s else replace(before, so_far_s=beat.held_s)
    return HeldUp(beat.pid, round, before.so_far_s if before is not None and same else 0.0, beat.held_s)


def _at_work(known: Timekeeping, round: int, beat: SlotProgress, first_at: float) -> AtWork:
    account = known.ledger.slots.get(beat.slot)
    before = account.seen if account is not None else None
    if isinstance(before, AtWork) and before.round == round and before.first_at:
        first_at = before.first_at
    held_up_s = max(0.0, beat.held_s - known.held[beat.slot].until_round_s)
    return AtWork(round, beat.step, beat.at, first_at, beat.base, held_up_s)


def _last_steps(ledger: Ledger, at_work: Mapping[int, AtWork]) -> dict[int, Seen]:
    """Return the last steps of all workers that were at work, including workers that have ended since."""
    return {
        slot: at_work[slot]
        for slot, account in ledger.slots.items()
        if isinstance(account.seen, AtWork) and slot in at_work and at_work[slot].round == account.seen.round
    }


def _seen(
    state: AgentState, slot: int, alive: frozenset[int], at_work: AtWork | None, hung: tuple[int, float]
) -> Seen:
    kind = not_at_work(state, slot, alive)
    if kind is not None:
        return kind
    assert state.crew is not None
    round, since = hung
    if round == state.crew.round.number and (at_work is None or at_work.at <= since):
        return Kind.HUNG
    return at_work or AtWork(state.crew.round.number)
