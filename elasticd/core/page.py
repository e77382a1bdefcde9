"""What stands where in the page that a worker shares with its agent: words of 8 bytes, each stored by one
instruction, written by the worker alone.

The first eight, and the second half with the times of the last steps, are the heartbeat's (elasticd/
worker/boot, which is self-contained, and elasticd/procs/page.py). These are between: what the library
says in the script's own process, and what is measured of the steps. All count from the process's start.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag, StrEnum
from typing import Final

PID: Final = 2
STEPS: Final = 3
LAST_NS: Final = 4
SAMPLES: Final = 8  # trained on
COMMITTED: Final = 9  # 1 + the step that every rank has applied
NONFINITE: Final = 10  # steps of which something told was NaN or infinite
HELD_NS: Final = 11  # for which checkpoints held up training
HELD: Final = 12  # how often
BASE: Final = 13  # 1 + the job's step after which this worker began
BASE_STEPS: Final = 14  # how many it had made by then
LOSS: Final = 15  # a double
LOSSES: Final = 16  # how often it was told
WAIT_NS: Final = 17  # spent waiting for other ranks
WAITS: Final = 18  # how often that was measured
FATAL: Final = 19  # why starting it again makes no sense, as Fatal has it; 0 otherwise
ASTRAY: Final = 20  # 1 + the job's step at which it ends to go back, as something was NaN or infinite
COMMITS: Final = 21  # how often this process has committed
USES: Final = 22  # what of elasticd.worker the script uses: the sum of its Use
MADE: Final = (
    23  # 1 + the steps that the optimizer counted before this process's first: the heartbeat's to write
)

DELAY_NS: Final = 24  # outside these waits, in which it was ready to run and had no processor

VALUES: Final = 32  # what the script tells by names of its own: the name, and a double
VALUES_MAX: Final = 12
NAME_WORDS: Final = 5
VALUE_WORDS: Final = NAME_WORDS + 1
WORDS: Final = VALUES + VALUES_MAX * VALUE_WORDS
assert WORDS < 256  # the second half is the heartbeat's


class Use(IntFlag):
    """What of elasticd.worker a script has used so far."""

    STATE = 1  # it keeps its process
    CHECKPOINTS = 2
    DATA = 4
    CHECKPOINTED = 8  # it tells of checkpoints of its own


NOTHING: Final = Use(0)


class Fatal(StrEnum):
    """Why a worker ended that nobody shall start again, by its own word: the job ends with it."""

    NOT_FINITE = "not_finite"  # a loss or gradient is NaN or infinite, and the job is to stop then
    NO_CHECKPOINT = "no_checkpoint"  # none is whole, and one was required
    BAD_DATA = "bad_data"  # not what the training that is to be gone on with was committed with


FATALS: Final = (None, Fatal.NOT_FINITE, Fatal.NO_CHECKPOINT, Fatal.BAD_DATA)  # by their numbers in the page


@dataclass(frozen=True, slots=True)
class Told:
    """The same, as the agent has read it. Times in seconds; None where nothing was said."""

    pid: int = 0
    steps: int = 0
    samples: int = 0
    committed: int | None = None
    nonfinite: int = 0
    held_s: float = 0.0
    held: int = 0
    base: int | None = None  # the job's step at which this process's own count was 0
    loss: float | None = None
    stepped_at: float = 0.0  # seconds of CLOCK_MONOTONIC
    wait_s: float = 0.0
    waits: int = 0
    delay_s: float = 0.0
    fatal: Fatal | None = None
    astray: int | None = None
    commits: int = 0
    uses: Use = NOTHING
    made: int | None = None  # steps that its optimizer had made before this process, by its own count
    values: tuple[tuple[str, float], ...] = ()
