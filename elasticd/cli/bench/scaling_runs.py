"""Run a script under a launcher, hear its workers' steps, and end it once enough steps were made.

The workers write records of their steps into a FIFO: see elasticd/worker/boot/elasticd_steptimes.py. Both
launchers' workers do, so both are measured alike.
"""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from elasticd.cli.bench.scaling import (
    STEPS_MIN,
    WARM_UP_S,
    StepRecord,
    WorldMeasured,
    counted,
    measure,
    spent_s,
)
from elasticd.cli.command_error import CommandError
from elasticd.procs.errorfile import read_tail, tail_of
from elasticd.procs.linux import die_with_parent
from elasticd.procs.page import BOOT_DIR, Page
from elasticd.telemetry.describe import count

ELASTICD = "elasticd run"
TORCHRUN = "torchrun"
FAILED = 1
_RECORD = struct.Struct("=8Q")
_STOP_S = 60.0  # a launcher gives its workers half a minute to end
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Measurement:
    """What to run, and for how long.

    ``words``: the script and its arguments, or -m, a module and its arguments. ``warm_up``: the first steps,
    which do not count. ``steps``: how many steps of each worker to measure; ``seconds``: for how long
    instead. ``patience_s``: the longest time without a step. ``environ``: of the launchers.
    """

    words: tuple[str, ...]
    warm_up: int
    steps: int
    seconds: float | None
    patience_s: float
    environ: Mapping[str, str]


def run_measured(launcher: str, world: int, asked: Measurement, folder: Path) -> WorldMeasured:
    """Run the script with ``world`` workers, and return what was measured. ``folder`` is empty, and only this
    run uses it. Raises CommandError if the script fails, or makes too few steps."""
    with ExitStack() as held:
        fifo = folder / "steps"
        os.mkfifo(fifo, 0o600)
        # Open the pipe for writing, too: otherwise a read ends while no worker has the pipe open.
        hears = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        held.callback(os.close, hears)
        environ = {**asked.environ, "ELASTICD_STEP_TIMES": str(fifo), "XDG_STATE_HOME": str(folder)}
        if launcher == TORCHRUN:
            for rank in range(world):
                held.callback(Page(folder / str(rank)).close)
            environ["ELASTICD_MEASURED"] = json.dumps(asked.words)
            argv = _torchrun(world, folder)
        else:
            argv = _elasticd(world, asked.words, folder)
        process = held.enter_context(_running(argv, environ, folder))
        heard = _Heard(hears, world, asked)
        heard.listen(process)
        return heard.measured(launcher, process, folder)


def _elasticd(world: int, words: tuple[str, ...], folder: Path) -> list[str]:
    argv = [sys.executable, "-P", "-m", "elasticd", "run", "--plain", "--http", "off", "--max-restarts", "0"]
    argv += ["--min", str(world), "--max", str(world), "--log-dir", str(folder / "logs")]
    return [*argv, "--termination-log", str(folder / "end"), *words]


def _torchrun(world: int, folder: Path) -> list[str]:
    argv = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"]
    argv += ["--nproc-per-node", str(world), "--log-dir", str(folder / "logs"), "--redirects", "3"]
    return [*argv, os.path.join(BOOT_DIR, "elasticd_measured.py")]


@contextmanager
def _running(argv: list[str], environ: Mapping[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the launcher, and end it with its workers. Only this process gets the signals of the terminal."""
    with (folder / "output").open("wb") as out:
        process = subprocess.Popen(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  # this process has no other threads
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        finally:  # also if another Ctrl-C comes
            process.kill()
            process.wait()


class _Heard:
    """Receives the steps of one run from its workers."""

    def __init__(self, fifo: int, world: int, asked: Measurement) -> None:
        self._fifo, self._world, self._asked = fifo, world, asked
        self._made: dict[int, list[StepRecord]] = {}

    def listen(self, process: subprocess.Popen[bytes]) -> None:
        """Return once enough steps were made, the launcher has exited, or no step came for too long."""
        exited = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(self._fifo, select.POLLIN)
            poll.register(exited, select.POLLIN)
            until = time.monotonic() + self._asked.patience_s
            while not self._enough():
                ready = dict(poll.poll(max(0.0, until - time.monotonic()) * 1000))
                if self._fifo in ready:
                    self._take()
                    until = time.monotonic() + self._asked.patience_s
                else:  # the launcher has exited and all its workers' steps were heard, or no step comes
                    return
        finally:
            os.close(exited)

    def measured(self, launcher: str, process: subprocess.Popen[bytes], folder: Path) -> WorldMeasured:
        """Return the measurement, also of a script that has ended well a little early."""
        steps, code = self._counted(), process.poll()
        if not self._enough() and (code or len(steps) < STEPS_MIN):
            raise self._too_few(launcher, code, folder)
        return measure(launcher, self._made, steps)

    def _take(self) -> None:
        for values in _RECORD.iter_unpack(os.read(self._fifo, _READ_BYTES // _RECORD.size * _RECORD.size)):
            rank, step, *times_ns, samples, parameter_bytes = values
            at_s, wait_s, data_s, no_cpu_s = (ns / 1e9 for ns in times_ns)
            self._made.setdefault(rank, []).append(
                StepRecord(rank, step, at_s, wait_s, data_s, no_cpu_s, samples, parameter_bytes)
            )

    def _counted(self) -> range:
        return counted(self._made, self._world, self._asked.warm_up)

    def _enough(self) -> bool:
        steps = self._counted()
        if self._asked.seconds is None:
            return len(steps) >= self._asked.steps
        return len(steps) >= STEPS_MIN and spent_s(self._made, steps) >= self._asked.seconds

    def _too_few(self, launcher: str, code: int | None, folder: Path) -> CommandError:
        how = f"{launcher} with {count(self._world, 'worker')}"
        if code:
            return CommandError(f"{how} failed (exit code {code}): {_reason(code, folder)}", FAILED)
        waited = "has ended" if code == 0 else f"has made no step for {self._asked.patience_s:g} s"
        if len(self._made) < self._world:
            return CommandError(
                f"the script {waited} under {how}, and no step was seen: each worker must call step() of an "
                "optimizer of torch.optim"
            )
        least = min(map(len, self._made.values()))
        return CommandError(
            f"the script {waited} under {how}, after {count(least, 'step')}, which are too few to measure: "
            f"those of the first {WARM_UP_S:g} s, and {self._asked.warm_up} steps, do not count; let it run "
            "for longer, or give a smaller --warm-up"
        )


def _reason(code: int, folder: Path) -> str:
    """Return why the launcher failed, in one line: the error of the first worker that raised one, else what
    the launcher says."""
    for file in sorted(folder.glob("logs/**/stderr.log"), key=lambda path: path.stat().st_mtime):
        message, shown = read_tail(tail_of(file), code)
        if "Traceback" in shown:
            return message
    said = tail_of(folder / "end").decode(errors="replace").split("\n")
    end = " ".join([line for line in said if line.strip()][:2])
    return end or read_tail(tail_of(folder / "output"), code)[0] or "it printed nothing"
