"""What a slot without a worker at work is said to do, from a state made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd.core import agent
from elasticd.core.facts import Limits, Phase, Spec
from elasticd.core.ledger import Kind
from elasticd.core.ports import Entry
from elasticd.daemon.timekeeper import not_at_work
from tests.core.build import life, round

ME = agent.Identity("a", life("a"), "127.0.0.1", (0, 1), "host", 1)
NEW = agent.start(ME, Spec(Limits(2, 2), Limits(2, 2), "job.py", "f"), 0, 600.0, "etcd")


def state(phase: Phase, nodes: dict[str, int], **more: object) -> agent.State:
    seen = {"round": Entry("round", round(3, nodes, phase), 1, 2)}
    return replace(NEW, joined=True, seen=seen, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("phase", "nodes", "more", "kind"),
    [
        (Phase.WAITING, {}, {}, Kind.WAITING),
        (Phase.WAITING, {}, {"waiting": frozenset({0})}, Kind.WAITING),
        # Nobody waits for others who is not there yet.
        (Phase.WAITING, {}, {"starting": frozenset({0})}, Kind.RESTARTING),
        (Phase.LIVE, {"b": 2}, {"starting": frozenset({0})}, Kind.RESTARTING),
        (Phase.LIVE, {"b": 2}, {"starting": frozenset({1})}, Kind.IDLE),
        (Phase.LIVE, {"a": 1, "b": 1}, {}, Kind.RENDEZVOUS),
        (Phase.ENDED, {}, {"starting": frozenset({0})}, Kind.IDLE),
    ],
)
def test_a_slot_without_a_worker_at_work_does_one_thing(
    phase: Phase, nodes: dict[str, int], more: dict[str, object], kind: Kind
) -> None:
    assert not_at_work(state(phase, nodes, **more), 0) is kind


def test_who_has_not_joined_yet_is_on_its_way() -> None:
    assert not_at_work(NEW, 0) is Kind.RENDEZVOUS
