"""The benchmark of forming a world prints a figure, or fails with the reason."""

from __future__ import annotations

import re

import pytest

from tests.bench.forming import Broken, _measure, forming


def test_it_prints_figures() -> None:
    said = forming([2], tries=1, c10d_most=0, c10d_timeout_s=1.0)
    assert re.search(r"2 agents: elasticd \d+\.\d{3} s", said), said


def test_a_fleet_that_cannot_run_is_a_reason_and_no_figure() -> None:
    with pytest.raises(Broken, match="cannot import name 'no_such_fleet'"):
        _measure("no_such_fleet", "127.0.0.1:1", 2, 5.0)
