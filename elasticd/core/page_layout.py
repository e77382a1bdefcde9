"""The layout of the page of memory that a worker shares with its agent: words of 8 bytes. Only the worker
writes, each word with one instruction.

The first two words are a magic number and a version. The heartbeat (elasticd/worker/boot, which imports
nothing of elasticd) writes the first eight words, and the times of the last steps into the second half of the
page. The words in between hold the reports of ``elasticd.worker`` and the measured waits. All counts begin at
0 with the process. A word that is described as 1 + n is 0 while n is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag, StrEnum
from typing import Final

PID: Final = 2
STEPS: Final = 3
LAST_NS: Final = 4  # the time of the last step, in ns of CLOCK_MONOTONIC
STACKS: Final = 6  # 1 + the worker's descriptor for its stacks
ENDED_WELL: Final = 7  # 1 if the script and its exit handlers have ended well
SAMPLES: Final = 8  # samples trained on
COMMITTED: Final = 9  # 1 + the last committed step
NONFINITE: Final = 10  # steps with a value that was NaN or infinite
HELD_NS: Final = 11  # the time for which checkpoints held up training
HELD: Final = 12  # how many checkpoints held up training
BASE: Final = 13  # 1 + the job's step at which this worker began
BASE_STEPS: Final = 14  # the process's steps when BASE was written
LOSS: Final = 15  # a double: the last loss
LOSSES: Final = 16  # how many losses the script has reported
WAIT_NS: Final = 17  # in measured steps: the time spent waiting for other ranks
WAITS: Final = 18  # in measured steps: how many waits
FATAL: Final = 19  # why a restart would not help: the index in FATALS; 0 otherwise
ASTRAY: Final = 20  # 1 + the job's step with a value that was not finite, for which the job goes back
COMMITS: Final = 21  # the number of this process's commits
USES: Final = 22  # the parts of elasticd.worker that the script uses: a sum of Use
MADE: Final = 23  # 1 + the optimizer's steps before this process; the heartbeat writes this word

DELAY_NS: Final = 24  # in measured steps, outside waits: the worker was ready to run but had no CPU
SHARD_BYTES: Final = 25  # of a sharded model: the worker's part of parameters and optimizers' state
COPIES_BYTES: Final = 26  # the host's memory for copies of shards, the worker's own and others'
MEASURED: Final = 27  # measured steps: all long ones, and some of many short ones
MEASURED_NS: Final = 28  # the time of the measured steps

VALUES: Final = 32  # the script's own values: a name and a double each
VALUES_MAX: Final = 12
NAME_WORDS: Final = 5
VALUE_WORDS: Final = NAME_WORDS + 1
WORDS: Final = VALUES + VALUES_MAX * VALUE_WORDS
MUTEX: Final = WORDS  # held by the worker's main thread: see elasticd/worker/boot/elasticd_mutex.py
MUTEX_WORDS: Final = 8
assert MUTEX + MUTEX_WORDS <= 256  # the second half belongs to the heartbeat


class Use(IntFlag):
    """The parts of elasticd.worker that a script has used so far."""

    STATE = 1  # the script's workers keep their process
    CHECKPOINTS = 2
    DATA = 4
    CHECKPOINTED = 8  # the script reports checkpoints of its own
    PLACE = 16  # the script counts its place in the data in samples, without worker.Data


NOTHING: Final = Use(0)


class Fatal(StrEnum):
    """The reason why the end of a worker ends the job, without a restart."""

    NOT_FINITE = "not_finite"  # a loss or gradient is not finite, and the job is to stop then
    NO_CHECKPOINT = "no_checkpoint"  # no checkpoint is whole, although one was required
    BAD_DATA = "bad_data"  # the data differs from the data of the training to resume


# The index of a reason is its number in the page.
FATALS: Final = (None, Fatal.NOT_FINITE, Fatal.NO_CHECKPOINT, Fatal.BAD_DATA)


@dataclass(frozen=True, slots=True)
class PageContents:
    """The contents of the page, as the agent reads them. Times are in seconds; None: not reported."""

    pid: int = 0
    steps: int = 0
    samples: int = 0
    committed: int | None = None
    nonfinite: int = 0
    held_s: float = 0.0
    held: int = 0
    base: int | None = None  # the job's step at which this process counted 0 steps
    loss: float | None = None
    stepped_at: float = 0.0  # seconds of CLOCK_MONOTONIC
    measured: int = 0  # measured steps
    measured_s: float = 0.0  # the time of the measured steps
    wait_s: float = 0.0  # in measured steps: the sum of all waits for other ranks
    waits: int = 0
    shard_bytes: int = 0  # the worker's part of a sharded model, and of its optimizers' state
    copies_bytes: int = 0  # the host's memory for copies of shards
    delay_s: float = 0.0  # in measured steps, outside waits: the worker was ready to run but had no CPU
    fatal: Fatal | None = None
    astray: int | None = None
    commits: int = 0
    uses: Use = NOTHING
    made: int | None = None  # the steps that the optimizer had counted before this process began
    stacks_fd: int = -1  # the worker's descriptor for its stacks
    ended_well: bool = False  # the script had ended well; only Python's finalisation was left
    values: tuple[tuple[str, float], ...] = ()
