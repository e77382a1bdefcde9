"""One step of the agent: take in the event, then decide everything that follows."""

from __future__ import annotations

from elasticd.core.agent.agent_state import AgentState, AgentStep, Decisions, Identity
from elasticd.core.agent.crew import continue_after_checkpoint, follow_the_round, note_report, release, report
from elasticd.core.agent.hearing import absorb
from elasticd.core.agent.leaving import (
    begin_requested_drain,
    depart,
    end_with_the_job,
    finish_leaving,
    hands_over,
)
from elasticd.core.agent.lingering import tell_of_the_held_back, watch_the_lingering
from elasticd.core.agent.membership import (
    campaign,
    join,
    leave_a_replaced_job,
    leave_an_unreachable_leader,
    move_the_fence,
    outlast_the_store,
    register,
    rejoin_if_spec_was_deleted,
    write_worker_features,
)
from elasticd.core.agent.standbys import keep_standbys
from elasticd.core.agent_messages import Event


def watched(me: Identity) -> tuple[str, ...]:
    """Return the keys that an agent watches: three of the job, and its own. The leader watches more."""
    return ("spec", "round", "leader", me.key, me.report_key)


def step(state: AgentState, event: Event, now: float) -> AgentStep:
    """Process one event. Never blocks, and never fails on a possible event."""
    do = Decisions(state, now)
    if not state.gone:
        absorb(do, event)
        decide(do)
    return AgentStep(do.state, tuple(do.actions), tuple(do.reasons), min(do.wakes, default=None))


def decide(do: Decisions) -> None:
    held_back = do.state.takedown.held_back
    watch_the_lingering(do)
    move_the_fence(do)
    begin_requested_drain(do)
    outlast_the_store(do)
    rejoin_if_spec_was_deleted(do)
    if do.state.exiting is None and do.state.departure is None:
        leave_a_replaced_job(do)
        leave_an_unreachable_leader(do)
    if not do.state.registration.joined and do.state.exiting is None and do.state.departure is None:
        join(do)
    end_with_the_job(do)
    write_worker_features(do)
    follow_the_round(do)
    continue_after_checkpoint(do)
    note_report(do)
    release(do)
    depart(do)
    keep_standbys(do, hands_over(do))
    tell_of_the_held_back(do, held_back)
    if do.state.exiting is None:
        register(do)
        report(do)
        campaign(do)
    finish_leaving(do)
