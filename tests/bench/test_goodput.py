"""What the measurement of goodput does when a launcher is slower than its kills."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.bench.goodput import StillDown, _kept
from tests.bench.launch import Launched
from tests.bench.recovery import WARM_UP_STEPS


def test_a_job_that_is_not_back_at_the_next_kill_has_no_share(tmp_path: Path) -> None:
    no_process = 2**30  # above the largest pid that Linux gives

    def launcher(steps: Path, log: Path) -> Launched:
        steps.write_text(f"{time.monotonic()} 0 1 {no_process} {WARM_UP_STEPS}\n")
        return Launched()

    with pytest.raises(StillDown):
        _kept(launcher, 1, 1, 0.02)
