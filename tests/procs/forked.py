"""Compares workers that are forked from a zygote with the same workers started afresh."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticd.core.facts import Exit
from elasticd.procs.workers import LocalProcs
from tests.procs.conftest import Bench, wait_until_ready


@dataclass(frozen=True)
class Ran:
    exits: list[Exit]
    out: bytes
    err: bytes


def both(
    bench: Bench, argv: list[str], workers: int = 1, *, more: Mapping[str, str] = {}, **how: Any
) -> tuple[Ran, Ran]:
    """Run the program in a fresh worker, which tells the zygote its imports, and then in a forked one."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    procs = bench.procs(
        [sys.executable, "-u", *argv], zygote=True, base_env={**env, "WORD": "given", **more}, **how
    )
    first = run(bench, procs, workers)
    wait_until_ready(procs)
    return first, run(bench, procs, workers)


def run(bench: Bench, procs: LocalProcs, workers: int = 1) -> Ran:
    bench.start(procs, workers)
    exits = bench.wait(workers)
    return Ran(exits, bench.console.written[1], bench.console.written[2])
