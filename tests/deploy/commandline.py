"""What the real ``elasticd run`` makes of an environment and arguments that a file here gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

from elasticd.cli.options import collect
from elasticd.cli.run_command import run
from elasticd.cli.run_configuration import Planned, plan

VARIABLES = {v for p in run.params for v in ([p.envvar] if isinstance(p.envvar, str) else p.envvar or ())}


@dataclass(frozen=True)
class Machine:
    """Of 64 cores, and so many GPUs."""

    its_gpus: int = 0

    def gpus(self) -> int:
        return self.its_gpus

    def cores(self) -> int:
        return 64

    def affinity_cores(self) -> int:
        return 64

    def torch_devices(self, kind: str) -> int | None:
        return None


def planned(argv: Sequence[str], env: Mapping[str, str], gpus: int = 0) -> Planned:
    """Raises CommandError, or click's errors, where the command would refuse."""
    ours = {k for k in env if k.startswith(("ELASTICD_", "PET_"))}
    assert ours <= VARIABLES, f"no option reads {ours - VARIABLES}"
    with mock.patch.dict("os.environ", env, clear=True), run.make_context("run", list(argv)) as ctx:
        return plan(collect(ctx, None), env, Machine(gpus))
