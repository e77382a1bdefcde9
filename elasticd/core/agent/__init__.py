"""The agent of one node: it joins the job, runs its workers in each round, and leaves.

``step(state, event, now)`` takes one event. It returns the new state, the actions, the reasons, and the time
of the next wake-up. The agent is level-triggered: an event only changes the state, and all decisions follow
from the whole state. So answers that are lost, late or repeated do no harm.
"""

from elasticd.core.agent.agent_state import AgentConfig, AgentState, AgentStep, Crew, Identity
from elasticd.core.agent.crew import report_waits_until
from elasticd.core.agent.hearing import RETRY_S
from elasticd.core.agent.stepping import step, watched

__all__ = [
    "RETRY_S",
    "AgentConfig",
    "AgentState",
    "AgentStep",
    "Crew",
    "Identity",
    "report_waits_until",
    "step",
    "watched",
]
