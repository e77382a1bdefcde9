from __future__ import annotations

import pytest

from elasticd.core.facts import NodeLedger, SlotTime
from elasticd.telemetry.goodput import goodput, totals


def test_goodput_is_the_productive_share_of_the_time_that_was_wanted() -> None:
    record = NodeLedger(
        "a", 1_000.0, (SlotTime(0, {"productive": 60.0, "idle": 500.0}), SlotTime(1, {"hung": 40.0}))
    )
    assert goodput(totals([record])) == pytest.approx(0.6)
    assert goodput(totals([])) is None
    assert goodput({"idle": 7.0}) is None
    assert goodput({"restarting": 7.0, "rendezvous": 1.0}) is None, "no step was seen"
    assert goodput({"replayed": 7.0, "rendezvous": 1.0}) == 0.0


def test_a_kind_of_a_newer_version_is_passed_over() -> None:
    assert (
        sum(totals([NodeLedger("a", 1_000.0, (SlotTime(0, {"astral": 3.0, "idle": 1.0}),))]).values()) == 1.0
    )
