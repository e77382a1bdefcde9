"""The command line of a worker, the same as torchrun's."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
from collections.abc import Callable

from elasticd.core.ports import Assignment
from elasticd.daemon.config import CannotStart, CommandKind, RunConfig

LOCAL_RANK_MACRO = "${local_rank}"  # torch.distributed.elastic.utils.macros


def worker_command(config: RunConfig) -> Callable[[Assignment], list[str]]:
    """Return a function that makes a worker's argv. Raise CannotStart if the configuration asks for NUMA
    binding and this machine cannot provide it."""
    command = config.command
    if command.kind is CommandKind.PROGRAM:
        argv = [command.target]
    else:
        python = os.environ.get("PYTHON_EXEC", sys.executable)
        argv = [python, "-u", *(["-m"] if command.kind is CommandKind.MODULE else []), command.target]
    bind = _numa(config.numa_binding)

    def make(assignment: Assignment) -> list[str]:
        local_rank = str(assignment.local_rank)
        args = [arg.replace(LOCAL_RANK_MACRO, local_rank) for arg in command.args]
        return bind([*argv, *args], assignment)

    return make


def _numa(mode: str | None) -> Callable[[list[str], Assignment], list[str]]:
    if mode is None:
        return lambda argv, _: argv
    try:
        from torch.numa import binding  # a private module, which torchrun's option --numa-binding uses too

        wrap = binding._maybe_wrap_command_args_with_numa_binding
    except (ImportError, AttributeError):
        raise CannotStart("--numa-binding needs PyTorch 2.10 or newer") from None
    if shutil.which("numactl") is None:
        raise CannotStart("--numa-binding needs the program numactl, which is not installed here")
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    # The parameter is ``gpu_index`` before torch 2.14.
    index = "gpu_index" if "gpu_index" in inspect.signature(wrap).parameters else "device_index"

    def bound(argv: list[str], assignment: Assignment) -> list[str]:
        return list(wrap(tuple(argv), **{index: assignment.slot}, numa_options=options))

    return bound
