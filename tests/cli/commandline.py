"""Returns what the real ``elasticd run`` would do with given arguments and a given environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from unittest import mock

import click
import pytest

from elasticd.cli.command_error import CommandError
from elasticd.cli.machine import Machine
from elasticd.cli.main import _sentence
from elasticd.cli.options import RunOptions, collect
from elasticd.cli.run_command import run
from elasticd.cli.run_configuration import Planned, plan

VARIABLES = {v for p in run.params for v in ([p.envvar] if isinstance(p.envvar, str) else p.envvar or ())}


@dataclass(frozen=True)
class PretendMachine(Machine):
    """A machine with as many devices as a test wants."""

    gpu_count: int = 0
    core_count: int = 4
    affinity: int = 16

    def gpus(self) -> int:
        return self.gpu_count

    def cores(self) -> int:
        return self.core_count

    def affinity_cores(self) -> int:
        return self.affinity

    def torch_devices(self, kind: str) -> int | None:
        return {"xpu": 0, "npu": 3}.get(kind)


def parse(*argv: str) -> RunOptions:
    with run.make_context("run", list(argv)) as ctx:
        return collect(ctx, None)


def planned(*argv: str, environ: Mapping[str, str] | None = None, machine: Machine | None = None) -> Planned:
    """Return the plan of the command. ``environ``: the whole environment; by default that of this process.
    Raises CommandError, or click's errors, if the command would refuse."""
    unknown = {v for v in environ or () if v.startswith(("ELASTICD_", "PET_"))} - VARIABLES
    assert not unknown, f"no option reads {unknown}"
    given = {**os.environ, "OMP_NUM_THREADS": "1"} if environ is None else dict(environ)
    with mock.patch.dict("os.environ", given, clear=True):
        return plan(parse(*argv), given, machine or PretendMachine())


def refused(*argv: str, environ: Mapping[str, str] | None = None, machine: Machine | None = None) -> str:
    """Return the sentence with which the command refuses."""
    with pytest.raises((CommandError, click.ClickException)) as caught:
        planned(*argv, environ=environ, machine=machine)
    if isinstance(caught.value, click.ClickException):
        return _sentence(caught.value)
    assert caught.value.code == 2
    return caught.value.sentence
