"""The agent of one node: joins the job, runs its workers in each round, and leaves.

``step(state, event, now)`` takes in one event and returns the new state, what to do, why, and when
to be woken if nothing happens. Level-triggered: an event changes what is known, and all that
follows is decided from the whole of it, so that lost, late and repeated answers do no harm.
"""

from elasticd.core.agent.hearing import RETRY_S
from elasticd.core.agent.leaving import DRAIN_PATIENCE_S
from elasticd.core.agent.membership import CONNECT_PATIENCE_S
from elasticd.core.agent.state import Crew, Departure, Identity, State, Step
from elasticd.core.agent.stepping import start, step, watched

__all__ = [
    "CONNECT_PATIENCE_S",
    "DRAIN_PATIENCE_S",
    "RETRY_S",
    "Crew",
    "Departure",
    "Identity",
    "State",
    "Step",
    "start",
    "step",
    "watched",
]
