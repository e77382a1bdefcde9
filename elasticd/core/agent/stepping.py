"""One step of the agent: take in the event, then decide everything that follows."""

from __future__ import annotations

from elasticd.core.agent.agent_state import AgentState, AgentStep, Decisions, Identity
from elasticd.core.agent.crew import follow_the_round, let_go_on, note_report, release, report
from elasticd.core.agent.hearing import absorb
from elasticd.core.agent.leaving import (
    depart,
    finish_leaving,
    hands_over,
    heed_the_end,
    heed_the_operator,
)
from elasticd.core.agent.membership import (
    campaign,
    join,
    move_the_fence,
    notice_a_false_start,
    outlast_the_store,
    register,
    tell_of_workers,
)
from elasticd.core.agent.standbys import keep_standbys
from elasticd.core.agent_messages import Event


def watched(me: Identity) -> tuple[str, ...]:
    """Return the keys that every agent watches. The leader watches more."""
    return ("spec", "round", "leader", me.key)


def step(state: AgentState, event: Event, now: float) -> AgentStep:
    """Process one event. Never blocks, and never fails on a possible event."""
    do = Decisions(state, now)
    if not state.gone:
        absorb(do, event)
        decide(do)
    return AgentStep(do.state, tuple(do.actions), tuple(do.reasons), min(do.wakes, default=None))


def decide(do: Decisions) -> None:
    move_the_fence(do)
    heed_the_operator(do)
    outlast_the_store(do)
    notice_a_false_start(do)
    if not do.state.registration.joined and do.state.exiting is None and do.state.departure is None:
        join(do)
    heed_the_end(do)
    tell_of_workers(do)
    follow_the_round(do)
    let_go_on(do)
    note_report(do)
    release(do)
    depart(do)
    keep_standbys(do, hands_over(do))
    if do.state.exiting is None:
        register(do)
        report(do)
        campaign(do)
    finish_leaving(do)
