"""A made-up job, for the tests of the views that show its status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elasticd.core.facts import Limits
from elasticd.telemetry.status import AgentStatus, JobStatus, NodeStatus, Note, SlotState, SlotStatus

AT = 1_767_225_600.0  # midnight


def running(slot: int, rank: int | None = None, **more: Any) -> SlotStatus:
    made = SlotStatus(slot, SlotState.RUNNING, slot if rank is None else rank, 4711 + slot, 1234, 9.5)
    return replace(made, **more)


def node(name: str = "a", *slots: SlotStatus, **more: Any) -> NodeStatus:
    return replace(NodeStatus(name, "member", f"10.0.0.{ord(name[-1])}", "host", slots), **more)


def agent(**more: Any) -> AgentStatus:
    return replace(AgentStatus("a", True, "", (Note(AT + 61, "round 7 formed"),)), **more)


def job(*nodes: NodeStatus, **more: Any) -> JobStatus:
    """Return the status of a job of two workers that trains on node a, as the agent of that node knows it."""
    made = JobStatus(
        job="train",
        at=AT + 100,
        phase="live",
        since=AT,
        round=7,
        cause="node_lost",
        world_size=2,
        limits=Limits(1, 8),
        asked=Limits(1, 8),
        script="job.py",
        step=1234,
        step_told=True,
        steps_per_s=9.5,
        restarts=2,
        budget_left=8,
        leader="a",
        stopping=False,
        waiting_for=None,
        waiting="",
        outcome=None,
        why=None,
        last_failure=None,
        checkpoint=None,
        stragglers=(),
        etcd_full=False,
        time={"productive": 900.0, "restarting": 100.0},
        goodput=0.9,
        nodes=nodes or (node("a", running(0), running(1)),),
        agent=agent(),
    )
    return replace(made, **more)
