"""What an agent does about a script that reports checkpoints of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd.core.agent.hearing import HELD_S
from elasticd.core.agent_messages import ContinueWorkers, LeaseChanged, Tag
from elasticd.core.ports import StoreSilent, WorkerCheckpointed
from tests.core.build import NOW, report, round
from tests.core.by_hand import Agent, put

ROUND = round(1, {"a": 2, "b": 2})
TOLD = WorkerCheckpointed(0, 1, "/shared/x.pt")


def held() -> Agent:
    """Return a worker that waits at its checkpoint, in a round that is to be resized."""
    one = Agent.working(ROUND)
    one.sees("round", replace(ROUND, resizes_by=NOW + 100))
    assert one.told(TOLD) != ()
    return one


@pytest.mark.parametrize("why", ["called off", "etcd away", "no answer"])
def test_a_held_worker_goes_on_where_the_resize_does_not_come(why: str) -> None:
    one = held()
    one.answered(Tag.REPORT)
    match why:
        case "called off":
            one.sees("round", ROUND)
        case "etcd away":
            one.told(LeaseChanged(StoreSilent(NOW, cut_off=False)))
        case "no answer":
            assert one.wake_at is not None and one.wake_at <= NOW + HELD_S
            one.at(NOW + HELD_S)
    assert one.one(ContinueWorkers).slots == (0,)
    if why != "etcd away":
        assert put(one.wrote(Tag.REPORT).writes[0]) == report("a", 1), "it is no longer at its checkpoint"


@pytest.mark.parametrize("stray", [WorkerCheckpointed(0, 0, ""), WorkerCheckpointed(5, 1, "")])
def test_a_worker_that_checkpoints_in_no_round_is_never_held(stray: WorkerCheckpointed) -> None:
    one = Agent.working(ROUND)
    one.sees("round", replace(ROUND, resizes_by=NOW + 100))
    one.told(stray)
    assert one.one(ContinueWorkers).slots == (stray.slot,)
