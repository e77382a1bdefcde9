"""``elasticd bench scaling``: runs a script with several numbers of workers, and says how it scales."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import click

from elasticd.cli.bench import scaling_text as shown
from elasticd.cli.bench.scaling import STEPS_MIN, WorldMeasured
from elasticd.cli.bench.scaling_advice import scaling_advice
from elasticd.cli.bench.scaling_runs import ELASTICD, TORCHRUN, Measurement, run_measured
from elasticd.cli.command_error import CommandError
from elasticd.cli.machine import Machine, working_directory_fault
from elasticd.cli.option_types import InvalidValue, Seconds, Whole
from elasticd.cli.say import on_screen, say
from elasticd.cli.script import find
from elasticd.cli.sizes import SLOTS_MAX
from elasticd.daemon.config import CommandKind
from elasticd.telemetry.describe import count


class Worlds(click.ParamType[tuple[int, ...]]):
    """Numbers of workers, ascending: 1,2,4."""

    name = "N,N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isascii() and part.isdecimal() for part in parts):
            raise InvalidValue(value, "is no list of numbers of workers, such as 1,2,4", param, ctx)
        numbers = sorted({int(part[:9]) for part in parts})
        if numbers[0] < 1:
            raise InvalidValue(value, "has a world without a worker", param, ctx)
        if numbers[-1] > SLOTS_MAX:
            raise InvalidValue(value, f"has more than the {SLOTS_MAX} workers of one machine", param, ctx)
        return tuple(numbers)


@click.group()
def bench() -> None:
    """Measure a script."""


@bench.command(
    context_settings={
        "allow_interspersed_args": False,  # what follows the script is the script's
        "token_normalize_func": lambda token: token.replace("_", "-"),
    }
)
@click.option(
    "--world",
    type=Worlds(),
    help="Numbers of workers.  [1, 2, 4 and so on, up to one per GPU, else one per core]",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.option("--steps", type=Whole(STEPS_MIN), default=100, help="Steps of each worker to measure.  [100]")
@click.option("--seconds", type=Seconds(1.0), help="Measure for this long instead.")
@click.option(
    "--warm-up",
    type=Whole(1),
    default=10,
    help="First steps of each worker that do not count; nor do those of the first two seconds.  [10]",
)
@click.option(
    "--patience", type=Seconds(1.0), default=600.0, help="Seconds to wait for the next step.  [600]"
)
@click.option("--torchrun/--no-torchrun", default=True, help="Run the script under torchrun, too.  [yes]")
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write the measurement to, as JSON.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def scaling(
    world: tuple[int, ...] | None,
    module: bool,
    steps: int,
    seconds: float | None,
    warm_up: int,
    patience: float,
    torchrun: bool,
    output: Path | None,
    script: str,
    args: tuple[str, ...],
) -> int:
    """Say how SCRIPT scales with the number of workers, where its time goes, and what to do about it.

    SCRIPT runs on this machine with each number of workers, under `elasticd run` and under torchrun. SCRIPT
    also writes its snapshots and other files: give it an empty folder for these. Once enough steps are made,
    SCRIPT gets SIGTERM. Exit codes: 0, measured; 1, the script failed; 2, bad usage, or too few steps.
    """
    if gone := working_directory_fault():
        raise CommandError(gone)
    if script.endswith(".toml"):
        raise CommandError(f"{script} is a job file: give the script that it names, and its arguments.")
    find(CommandKind.MODULE if module else CommandKind.SCRIPT, script, args)
    if output is not None:
        _check_writable(output)
    machine = Machine()
    worlds = world or tuple(_doubling(machine.gpus() or machine.cores()))
    environ = _environ(machine, worlds[-1])
    words = ("-m", script, *args) if module else (script, *args)
    asked = Measurement(words, warm_up, steps, seconds, patience, environ)
    launchers = (ELASTICD, TORCHRUN) if torchrun else (ELASTICD,)
    _end_in_order()
    measured = [_run(launcher, size, asked) for size in worlds for launcher in launchers]
    ours = [one for one in measured if one.launcher == ELASTICD]
    advice = scaling_advice(ours[-1], ours[0], machine.cores())
    say(*shown.throughput(measured), "", *shown.costs(measured), "")
    say(*on_screen(list(shown.conclusion(ours[-1], ours[0], advice))))
    if output is not None:
        document = shown.document(words, environ["OMP_NUM_THREADS"], measured, advice)
        try:
            output.write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise CommandError(f"{output} cannot be written: {error.strerror}") from error
    return 0


def _run(launcher: str, world: int, asked: Measurement) -> WorldMeasured:
    say(f"{launcher}, {count(world, 'worker')} ...", err=True)
    with tempfile.TemporaryDirectory(prefix="elasticd-bench-", ignore_cleanup_errors=True) as folder:
        return run_measured(launcher, world, asked, Path(folder))


def _doubling(most: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on, and ``most``."""
    world = 1
    while world < most:
        yield world
        world *= 2
    yield most


def _environ(machine: Machine, most: int) -> dict[str, str]:
    """Return the environment of both launchers.

    Variables that set options would change what is measured, or have the runs join a job. A worker has as
    many threads in each world, so that worlds can be compared; torchrun would give a single worker all cores.
    """
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTICD_", "PET_"))}
    return {"OMP_NUM_THREADS": str(max(1, machine.cores() // most)), **environ}


def _check_writable(output: Path) -> None:
    """Say now what would otherwise be said after all is measured."""
    folder = output.parent
    if not folder.is_dir():
        raise CommandError(f"{output} cannot be written: there is no folder {folder}.")
    if not os.access(output if output.exists() else folder, os.W_OK):
        raise CommandError(f"{output} cannot be written: Permission denied.")


def _end_in_order() -> None:
    """Have SIGTERM and SIGHUP end the runs as Ctrl-C does, from now until this process exits."""

    def end(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, end)
