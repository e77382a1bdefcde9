"""What must be true of a training, read from the ledgers that its workers wrote. Pure: the functions take
lines, and return a sentence for each rule that is broken.

A *whole step* is one that every rank of its world has applied. A worker that was stopped and continues may
apply its step alone; a world makes a step only together.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

WOKEN_S: Final = 2.0  # the time that a continued node's guard needs to end workers that must not continue


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a ledger. ``what``: entered, step, committed, saved or ended. ``step``: the number of steps
    made by then. ``since``: when the step began. ``id``: of the process."""

    what: str
    at: float
    node: str
    id: str
    pid: int = 0
    slot: int = 0
    round: int = 0
    rank: int = 0
    world: int = 0
    step: int = 0
    epoch: int = 0
    since: float = 0.0
    samples: tuple[int, ...] = ()
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Whole:
    """A step that a whole world has made. ``began``: when the last worker began the step. ``applied``: when
    the first worker had applied the step."""

    round: int
    step: int
    epoch: int
    world: int
    began: float
    applied: float
    nodes: frozenset[str]
    samples: tuple[int, ...]
    digests: frozenset[str]


@dataclass(frozen=True, slots=True)
class Reference:
    """The same training in one process, undisturbed: the samples of each step, and the digest of the weights
    after it."""

    samples: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    epochs: Mapping[int, int] = field(default_factory=dict)
    digests: Mapping[int, str] = field(default_factory=dict)


def parse(text: str) -> list[Line]:
    """Return the lines of a ledger. The last line may be incomplete, since its writer was killed."""
    found = []
    for raw in text.splitlines(keepends=True):
        if not raw.endswith("\n"):
            break
        said: dict[str, Any] = json.loads(raw)
        what = said.pop("is")
        said["samples"] = tuple(said.get("samples", ()))
        found.append(Line(what, **said))
    return found


def whole_steps(lines: Iterable[Line]) -> list[Whole]:
    """Return the whole steps, in the order of rounds and of steps."""
    by: dict[tuple[int, int], dict[int, Line]] = {}
    for line in lines:
        if line.what == "step":
            by.setdefault((line.round, line.step), {})[line.rank] = line
    found = []
    for (round, step), ranks in sorted(by.items()):
        world = max(line.world for line in ranks.values())
        if set(ranks) == set(range(world)):
            found.append(
                Whole(
                    round,
                    step,
                    ranks[0].epoch,
                    world,
                    max(line.since for line in ranks.values()),
                    min(line.at for line in ranks.values()),
                    frozenset(line.node for line in ranks.values()),
                    tuple(sample for rank in range(world) for sample in ranks[rank].samples),
                    frozenset(line.digest for line in ranks.values()),
                )
            )
    return found


def reference(lines: Iterable[Line]) -> Reference:
    steps = whole_steps(lines)
    return Reference(
        {s.step: s.samples for s in steps},
        {s.step: s.epoch for s in steps},
        {s.step: digest for s in steps for digest in s.digests},
    )


# ---------------------------------------------------------------- the oracles


def judge(
    lines: Sequence[Line],
    expected: Reference | None = None,
    *,
    thawed: Sequence[tuple[float, str]] = (),
    same_weights: bool = False,
) -> list[str]:
    """Apply all rules below. ``thawed``: the times at which a node continued whose processes had all been
    stopped. ``same_weights``: the weights must have the bits of the reference."""
    steps = whole_steps(lines)
    found = [
        *two_worlds(steps, thawed),
        *rank_twice(lines),
        *fell_behind(lines),
        *different_weights(steps),
        *left_out(steps, lines),
    ]
    if expected is not None:
        found += wrong_samples(steps, expected)
        if same_weights:
            found += [*other_weights(steps, expected), *committed_other_weights(steps, lines, expected)]
    return found


def two_worlds(steps: Sequence[Whole], thawed: Sequence[tuple[float, str]] = ()) -> Iterator[str]:
    """Once a world has made a step, no worker of an earlier world begins a step and completes it."""
    earliest: dict[int, float] = {}
    for step in steps:
        earliest[step.round] = min(step.applied, earliest.get(step.round, step.applied))
    for step in steps:
        later = min(((at, number) for number, at in earliest.items() if number > step.round), default=None)
        if later is None or step.began <= later[0]:
            continue
        woken = any(node in step.nodes and at <= step.began < at + WOKEN_S for at, node in thawed)
        if not woken:
            yield (
                f"two worlds stepped at once: round {step.round} began step {step.step} "
                f"{step.began - later[0]:.3f} s after round {later[1]} had made a step"
            )


def rank_twice(lines: Iterable[Line]) -> Iterator[str]:
    """In a round each rank is one process, and all ranks know the same world size."""
    who: dict[tuple[int, int], set[str]] = {}
    sizes: dict[int, set[int]] = {}
    for line in lines:
        if line.what in ("entered", "step", "committed"):
            who.setdefault((line.round, line.rank), set()).add(f"{line.node} {line.id}")
            sizes.setdefault(line.round, set()).add(line.world)
    for (round, rank), processes in sorted(who.items()):
        if len(processes) > 1:
            yield f"rank {rank} is there {len(processes)} times in round {round}: {sorted(processes)}"
    for round, several in sorted(sizes.items()):
        if len(several) > 1:
            yield f"round {round} has several sizes: {sorted(several)}"


def fell_behind(lines: Iterable[Line]) -> Iterator[str]:
    """A process never repeats a step that it has committed. No world continues from an earlier step than the
    last one that any of its workers has committed."""
    committed: dict[str, int] = {}
    for line in sorted(lines, key=lambda line: line.at):
        had = committed.get(line.id, 0)
        if line.what == "committed":
            if line.step != had + 1 and had:
                yield f"{line.node} {line.id} committed step {had}, and then {line.step}"
            committed[line.id] = line.step
        elif line.what == "entered":
            if line.step < had:
                yield (
                    f"{line.node} {line.id} had committed step {had}, and enters round {line.round} at "
                    f"{line.step}"
                )
            committed[line.id] = line.step


def different_weights(steps: Iterable[Whole]) -> Iterator[str]:
    """After a step all workers have the same weights."""
    for step in steps:
        if len(step.digests) > 1:
            yield f"after step {step.step} of round {step.round} workers have different weights"


def left_out(steps: Sequence[Whole], lines: Iterable[Line] = ()) -> Iterator[str]:
    """Every step from the first to the last was made. The step of a rank that is killed before its ledger has
    the step counts if another worker has committed the step: workers commit only what the whole world has
    made."""
    made = {step.step for step in steps} | {line.step for line in lines if line.what == "committed"}
    missing = sorted(set(range(1, max(made, default=0) + 1)) - made)
    if missing:
        yield f"steps {missing[:10]} were never made by a whole world"


def wrong_samples(steps: Iterable[Whole], expected: Reference) -> Iterator[str]:
    """Each attempt of a step used the samples of the undisturbed training, each of them once."""
    for step in steps:
        wanted = Counter(expected.samples.get(step.step, ()))
        used = Counter(step.samples)
        if used != wanted:
            lost, twice = sorted((wanted - used).elements()), sorted((used - wanted).elements())
            yield (
                f"step {step.step} of round {step.round} left out samples {lost[:10]} and used {twice[:10]} "
                "which are not its own"
            )


def other_weights(steps: Iterable[Whole], expected: Reference) -> Iterator[str]:
    for step in steps:
        wanted = expected.digests.get(step.step)
        if step.digests != {wanted}:
            yield (
                f"after step {step.step} of round {step.round} the weights are {sorted(step.digests)}, not "
                f"{wanted} as undisturbed"
            )


def committed_other_weights(
    steps: Iterable[Whole], lines: Sequence[Line], expected: Reference
) -> Iterator[str]:
    """Committed steps have the reference's weights, too, even if the ledgers of other ranks lack the step."""
    whole = {(step.round, step.step) for step in steps}
    committed = {(line.id, line.round, line.step) for line in lines if line.what == "committed"}
    for line in lines:
        if line.what != "step" or (line.id, line.round, line.step) not in committed:
            continue
        wanted = expected.digests.get(line.step)
        if (line.round, line.step) not in whole and line.digest != wanted:
            yield (
                f"{line.node} {line.id} committed step {line.step} of round {line.round} with weights "
                f"{line.digest}, not {wanted} as undisturbed"
            )


def not_each_once(expected: Reference, samples: int) -> Iterator[str]:
    """The reference itself uses each sample once in a complete epoch."""
    epochs: dict[int, list[int]] = {}
    for step, used in expected.samples.items():
        epochs.setdefault(expected.epochs[step], []).extend(used)
    for epoch, used in sorted(epochs.items()):
        once = len(set(used)) == len(used) and set(used) <= set(range(samples))
        if not once or (epoch < max(epochs) and len(used) != samples):
            yield f"epoch {epoch} of the undisturbed run uses {len(used)} samples, {len(set(used))} different"


def wrong_charge(charged: int, least: int, most: int) -> Iterator[str]:
    """Each failure of user code is charged at most once, and nothing else is charged."""
    if not least <= charged <= most:
        right = f"{least}" if least == most else f"{least} to {most}"
        yield f"{charged} failures were charged to the budget, and {right} would be right"


def resumed_too_early(lines: Sequence[Line], floors: Sequence[tuple[float, int]]) -> Iterator[str]:
    """A round continues from no older step than was durable while an earlier round still trained. ``floors``:
    when a step was seen to be durable. A stopped worker that later applies its step does not train: its round
    trained until its last whole step."""
    entered: dict[int, Line] = {}
    for line in lines:
        if line.what == "entered":
            entered.setdefault(line.round, line)
    last: dict[int, float] = {}
    for step in whole_steps(lines):
        last[step.round] = max(step.applied, last.get(step.round, 0.0))
    for round, line in sorted(entered.items()):
        trained_until = max((at for number, at in last.items() if number < round), default=0.0)
        floor = max((step for at, step in floors if at < trained_until), default=0)
        if line.step < floor:
            yield f"round {round} goes on from step {line.step}, though step {floor} was durable before"


def tracebacks(text: str) -> Iterator[str]:
    """Yield the tracebacks that the agent itself logged. Its log is JSON lines, without the workers'
    output."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if line.startswith("{"):
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if said.get("exception") or said.get("exc_info") or said.get("stack"):
                yield f"an agent logged an exception: {line[:2000]}"
        elif "Traceback (most recent call last)" in line:
            yield "an agent printed a traceback: " + " | ".join(lines[i : i + 30])[:3000]
