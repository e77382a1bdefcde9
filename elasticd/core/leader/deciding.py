"""The next step of the job, by the phase of its round."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from elasticd.core.facts import Budget, Cause, Phase, Resume, Round
from elasticd.core.leader.forming import form_or_wait
from elasticd.core.leader.hanging import name_the_hung
from elasticd.core.leader.lagging import name_stragglers
from elasticd.core.leader.plan import Plan, write
from elasticd.core.leader.settling import settle
from elasticd.core.leader.supervising import supervise
from elasticd.core.leader.view import View, see
from elasticd.core.ports import Changes, Delete, Put, entry_of
from elasticd.core.round_parts import FOLDER, has_parts

_OUTDATED: Final = (
    *(Delete(key) for key in ("summary", "forgotten", "room")),
    *(Delete(folder, prefix=True) for folder in ("reports/", FOLDER)),
)


def decide(view: View, now: float) -> Plan:
    """Return the next step of the job. Pure: the same view and time give the same plan.

    If the round needs no write, the plan may name hung workers or stragglers.
    """
    if not view.complete:
        return Plan()
    view = view.up_to_date()
    plan = _of_the_round(view, now)
    if plan.writes:
        return plan
    hung, slow = name_the_hung(view, now), name_stragglers(view)
    wakes = [at for at in (plan.wake_at, hung.wake_at) if at is not None]
    named = hung if hung.writes else slow
    if not named.writes:
        return replace(plan, wake_at=min(wakes, default=None), judged=hung.judged)
    return replace(named, wake_at=min(wakes, default=None), waiting=plan.reasons)


def decide_and_go_on(view: View, now: float) -> Plan:
    """Return the next step of the job. If the step closes a round that no member is in any more, return one
    transaction for this step and the next."""
    plan = decide(view, now)
    if not (_closes(plan) and plan.may_be_joined):
        return plan
    entries = (entry_of(write, view.revisions[write.key], 0) for write in plan.writes)
    following = decide(see(view, Changes(tuple(entries)), "", now), now)
    if not (following.writes and following.may_be_joined):
        return plan
    return replace(
        following,
        guards=tuple(dict.fromkeys((*plan.guards, *following.guards))),
        writes=tuple({write.key: write for write in (*plan.writes, *following.writes)}.values()),
        reasons=(*plan.reasons, *following.reasons),
    )


def _closes(plan: Plan) -> bool:
    """Whether the plan closes a round of which the record holds all that others must know. Agents that are
    not in the round must see that the job goes back to a checkpoint, and a round in parts has no members
    here."""
    written = (write.fact for write in plan.writes if isinstance(write, Put))
    rounds = [fact for fact in written if isinstance(fact, Round)]
    return any(one.phase is Phase.CLOSING and not one.anew and not has_parts(one) for one in rounds)


def _of_the_round(view: View, now: float) -> Plan:
    assert view.spec is not None
    round = view.round
    if round is None or round.phase is Phase.ENDED:
        return _open(view, now)
    match round.phase:
        case Phase.WAITING:
            return form_or_wait(view, view.spec, round, view.budget, (), now)
        case Phase.LIVE:
            return supervise(view, view.spec, round, now)
        case Phase.CLOSING:
            return settle(view, view.spec, round, now)


def _open(view: View, now: float) -> Plan:
    """Start a job that has never run here, or that runs again after its end."""
    number = 0 if view.round is None else view.round.number
    waiting = Round(number, Phase.WAITING, (), "", Cause.START, now)
    plan = write(view, waiting, Budget())
    assert view.spec is not None
    forgotten = (Delete("checkpoint"),) if view.spec.policy.resume is Resume.NEVER else ()
    return replace(
        plan,
        # A job ends by one transaction that also deletes its spec, but the two keys are watched separately.
        # Without this guard the old spec and the job's end would look like a new job.
        guards=(*plan.guards, view.unchanged("spec")),
        writes=(*plan.writes, *_OUTDATED, *forgotten),
    )
