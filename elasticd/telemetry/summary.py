"""The last screen of a run. For a failed job it names the worker that failed first, the error, and the
log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from elasticd.core.facts import LAST_OUTPUT, Failure, Outcome, Round
from elasticd.telemetry import describe

TRACEBACK_LINES_MAX = 60
_NOTHING: Mapping[str, float] = MappingProxyType({})


def screen(
    job: str,
    last: Round,
    *,
    restarts: int,
    lasted_s: float,
    spent: Mapping[str, float] = _NOTHING,
    unsaved: str = "",
) -> str:
    """Return the text to print when the job has ended.

    ``last``: the job's last round. ``restarts``: the number of failures of the whole job. ``lasted_s``: the
    job's length in seconds. ``spent``: the time of its slots in seconds, by kind. ``unsaved``: the
    checkpoints that were not saved, in words.
    """
    return "\n".join([*_ending(job, last, restarts, lasted_s), *_balance(spent, unsaved)])


def left(
    job: str,
    node: str,
    why: str,
    last: Round | None,
    *,
    lasted_s: float,
    spent: Mapping[str, float] = _NOTHING,
    unsaved: str = "",
) -> str:
    """Return the text to print when a node has left a job that goes on. ``why``: a verb such as "drained".
    ``last``: the last round, where the job runs on this node alone. For the other arguments see
    ``screen``."""
    course = f" in {describe.count(last.number, 'round')}{_restarted(last.restarts)}" if last else ""
    said = f"{job}: {node} {why}, after {describe.span(lasted_s)}{course}."
    return "\n".join([said, *_balance(spent, unsaved)])


def _balance(spent: Mapping[str, float], unsaved: str) -> Sequence[str]:
    told = describe.spent(spent)
    return [
        *([f"Time: {told}."] if told else []),
        *([f"Not saved: {unsaved}."] if unsaved else []),
    ]


def _restarted(restarts: int) -> str:
    return f", {describe.count(restarts, 'restart')} on the way" if restarts else ""


def _ending(job: str, last: Round, restarts: int, lasted_s: float) -> Sequence[str]:
    outcome = last.outcome or Outcome.STOPPED
    head = f"{job} {describe.ended(outcome)} after {describe.span(lasted_s)}"
    if outcome is Outcome.SUCCEEDED:
        rounds = f" in {describe.count(last.number, 'round')}"
        at_end = f", with {describe.count(last.world_size, 'worker')} at the end"
        return [f"{head}{rounds}{at_end}{_restarted(restarts)}."]
    said = f"{head}: {last.why}." if last.why else f"{head}."
    if outcome is Outcome.FAILED and last.failure is not None:
        return [said, *_failure(last.failure, restarts > 1)]
    return [said]


def _failure(failure: Failure, several_rounds: bool) -> Sequence[str]:
    exit = failure.exit
    when = " in its last round" if several_rounds else ""
    who = describe.worker(failure.node, exit)
    lines = ["", f"First to fail{when}: {who}, which {describe.ending(exit.code, hung=exit.hung)}."]
    traceback = exit.traceback.rstrip()
    if traceback:
        lines += ["Its last output:"] if exit.message.startswith(LAST_OUTPUT) else []
        lines += ["", *(f"    {line}" for line in _shortened(traceback.splitlines()))]
    elif exit.message.strip():
        lines += [
            "",
            *(f"    {line}" for line in _shortened(exit.message.strip().splitlines())),
        ]
    else:
        lines += ["", "    It left no traceback and wrote nothing to stderr."]
    lines.append("")
    if exit.log:
        lines.append(f"Its output: {exit.log} (on {failure.node})")
    else:
        lines.append("Its output was not kept; run with --log-dir DIR --tee 3 to have it in files.")
    return lines


def _shortened(lines: list[str]) -> list[str]:
    """Leave out the middle of a long traceback. Its start and its end matter; a deep recursion fills the
    middle."""
    if len(lines) <= TRACEBACK_LINES_MAX:
        return lines
    head = TRACEBACK_LINES_MAX // 3
    tail = TRACEBACK_LINES_MAX - head - 1
    return [
        *lines[:head],
        f"... {len(lines) - head - tail} lines left out ...",
        *lines[-tail:],
    ]
