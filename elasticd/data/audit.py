"""Judge the notes of a run's workers: was each sample used once, and where do two runs differ? Pure.

A step may have been made several times. Only the attempt counts from which training continued: a round begins
after some step, and later commits of earlier rounds are void.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticd.data.auditnotes import BadNote, BatchNote, CommitNote, EntryNote, Gap, Note, Weights, unpack
from elasticd.data.order import Order, order_from

NAMED_MAX = 20  # samples to name; for the others the positions are enough
Round = tuple[str, int]  # the series and the number of the round
_Made = dict[int, tuple[Round, CommitNote]]  # by step: the commit, and its round


# ---------------------------------------------------------------- what may be found


@dataclass(frozen=True, slots=True)
class LostSamples:
    """Positions of an epoch that no committed step used. ``samples``: the first samples at these positions,
    where they are known."""

    epoch: int
    positions: range
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RepeatedSamples:
    """Positions of an epoch that were used before, and that ``step`` used again."""

    epoch: int
    positions: range
    step: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WrongSamples:
    """Samples that were fetched in place of others. ``too_often`` and ``too_rarely``: by sample, how many
    times too many or too few."""

    epoch: int
    too_often: Mapping[int, int]
    too_rarely: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class MissingNotes:
    """A committed step with no complete note from these ranks of its world."""

    step: int
    ranks: tuple[int, ...]
    world: int


@dataclass(frozen=True, slots=True)
class MissingCommits:
    """A round that began after a step that no worker noted as committed."""

    round: int
    after: int
    last: int


@dataclass(frozen=True, slots=True)
class ConflictingNotes:
    """Workers of one round that noted different facts about the same step."""

    round: int
    step: int
    about: str


@dataclass(frozen=True, slots=True)
class UnequalRanks:
    """Ranks whose weights differ after the same step."""

    step: int
    digests: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class DamagedNote:
    """A line in the middle of a file that is not a note."""

    file: str
    line: int
    why: str


@dataclass(frozen=True, slots=True)
class LostNotes:
    """A worker could not write its notes for a while. ``step``: the first step with notes again."""

    file: str
    step: int
    notes: int
    why: str


Finding = (
    LostSamples
    | RepeatedSamples
    | WrongSamples
    | MissingNotes
    | MissingCommits
    | ConflictingNotes
    | UnequalRanks
    | DamagedNote
    | LostNotes
)


@dataclass(frozen=True, slots=True)
class EpochCount:
    """The use of one epoch.

    ``used``: the number of samples used. ``begun_at``: the first position with notes. ``length``: None if
    it is unknown until the data ends. ``over``: no more samples of this epoch will follow. ``left_out``:
    samples at the end that were left out on request.
    """

    number: int
    begun_at: int
    used: int
    length: int | None
    over: bool
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """The result of an audit.

    ``steps``: the committed steps. ``rounds``: the number of rounds that made them. ``worlds``: the sizes of
    their worlds. ``again``: committed steps that were made again. ``losses`` and ``weights``: by step.
    """

    findings: tuple[Finding, ...]
    epochs: tuple[EpochCount, ...]
    steps: range
    rounds: int
    worlds: tuple[int, ...]
    again: int
    kind: str  # of the data's order; empty without data
    losses: Mapping[int, float]
    weights: Mapping[int, str]


# ---------------------------------------------------------------- from notes to steps


@dataclass(slots=True)
class _Life:
    """The notes of one worker in one round."""

    entered: EntryNote
    took: dict[int, list[BatchNote]] = field(default_factory=lambda: defaultdict(list))
    committed: dict[int, CommitNote] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)


def judge(files: Mapping[str, Iterable[tuple[int, Note | BadNote]]]) -> AuditVerdict:
    """Return the result of an audit. ``files``: each worker's numbered notes, by file name."""
    findings: list[Finding] = []
    rounds: dict[Round, list[_Life]] = defaultdict(list)
    for name, notes in files.items():
        for life in _lives(name, notes, findings):
            rounds[life.entered.series, life.entered.round].append(life)
    made, again = _lineage(rounds, findings)
    taken: dict[int, list[BatchNote]] = {}
    weights: dict[int, str] = {}
    for step, (number, commit) in sorted(made.items()):
        taken[step] = _of_commit(commit, rounds[number], findings)
        if digest := _weights(step, rounds[number], findings):
            weights[step] = digest
    steps = range(made[min(made)][1].first if made else 1, max(made, default=0) + 1)
    began = [life.entered for key in sorted(rounds) for life in rounds[key]]
    data = next((e.data for e in reversed(began) if e.data is not None), None)
    first = next((life.entered for life in rounds[made[min(made)][0]]), None) if made else None
    epochs: tuple[EpochCount, ...] = ()
    if data is not None and first is not None:
        epochs = tuple(_epochs(taken, first, data, findings))
    return AuditVerdict(
        findings=tuple(findings),
        epochs=epochs,
        steps=steps,
        rounds=len({number for number, _ in made.values()}),
        worlds=tuple(sorted({rounds[number][0].entered.world for number, _ in made.values()})),
        again=again,
        kind=str(data["order"]["kind"]) if data is not None else "",
        losses={step: loss for step, batches in taken.items() if (loss := _loss(batches)) is not None},
        weights=weights,
    )


def _lives(
    name: str, notes: Iterable[tuple[int, Note | BadNote]], findings: list[Finding]
) -> Iterator[_Life]:
    life: _Life | None = None
    for number, note in notes:
        if isinstance(note, BadNote):
            findings.append(DamagedNote(name, number, str(note)))
        elif isinstance(note, Gap):
            findings.append(LostNotes(name, note.step, note.notes, note.why))
        elif isinstance(note, EntryNote):
            if life is not None:
                yield life
            life = _Life(note)
        elif life is None:
            findings.append(DamagedNote(name, number, "it belongs to no round"))
        else:
            match note:
                case BatchNote(step, turn):
                    if turn == 0:  # the step starts again and was never committed
                        life.took[step].clear()
                    life.took[step].append(note)
                case CommitNote(step):
                    life.committed[step] = note
                case Weights(step, digest):
                    life.weights[step] = digest
    if life is not None:
        yield life


def _lineage(rounds: Mapping[Round, Sequence[_Life]], findings: list[Finding]) -> tuple[_Made, int]:
    """Return the valid commits with their rounds, by step, and the number of steps that were made again.

    A round continues the newest earlier round that got to the step after which the round begins. The previous
    round may not have got there: it may have begun and ended while a saver still wrote a checkpoint of the
    round before, from which the next round resumes.
    """
    lines: list[tuple[int, _Made]] = []  # after each round: the first step, and the valid commits
    covered = 0
    for key in sorted(rounds):
        lives = rounds[key]
        begins = {life.entered.step for life in lives}
        if len(begins) > 1 or len({life.entered.world for life in lives}) > 1:
            findings.append(ConflictingNotes(key[1], min(begins), "where the round begins"))
        after = max(begins)
        earlier = [(first, {k: v for k, v in made.items() if k <= after}) for first, made in reversed(lines)]
        joined = (line for line in earlier if max(line[1], default=line[0]) == after)
        first, made = next(joined, (after, earlier[0][1] if earlier else {}))
        if after > (last := max(made, default=after)):
            findings.append(MissingCommits(key[1], after, last))
        commits = {commit for life in lives for commit in life.committed.values()}
        for commit in sorted(commits, key=lambda c: (c.step, c.covers)):
            if made.get(commit.step, ("", commit))[0] == key:
                findings.append(ConflictingNotes(key[1], commit.step, "how many steps are committed with it"))
            else:
                covered += commit.covers
            made[commit.step] = key, commit
        lines.append((first, made))
    made = lines[-1][1] if lines else {}
    return made, covered - sum(commit.covers for _, commit in made.values())


def _of_commit(commit: CommitNote, lives: Sequence[_Life], findings: list[Finding]) -> list[BatchNote]:
    """Return the samples that all workers took for a commit: one BatchNote for each worker and global
    batch."""
    world = lives[0].entered.world
    if not commit.covers or all(life.entered.data is None for life in lives):
        return []
    step = commit.step
    by_rank = {life.entered.rank: life.took.get(commit.first, []) for life in lives}
    batches = max((len(t) for t in by_rank.values()), default=0)
    missing = tuple(rank for rank in range(world) if len(by_rank.get(rank, ())) < max(1, batches))
    if missing:
        findings.append(MissingNotes(step, missing, world))
    together = []
    for turn in range(batches):
        of_all = [by_rank[rank][turn] for rank in sorted(by_rank) if rank not in missing]
        if len({(t.epoch, t.first, t.samples) for t in of_all}) > 1:
            findings.append(ConflictingNotes(lives[0].entered.round, step, "which samples it is made of"))
        together += of_all
    return together


def _weights(step: int, lives: Sequence[_Life], findings: list[Finding]) -> str:
    digests = {life.entered.rank: life.weights[step] for life in lives if step in life.weights}
    if len(set(digests.values())) > 1:
        findings.append(UnequalRanks(step, digests))
    return digests[min(digests)] if digests else ""


def _loss(batches: Sequence[BatchNote]) -> float | None:
    """Return the mean loss over the global batch, summed so that the world size does not matter.

    Over several batches of one step it is their mean. None if a part of a batch is missing.
    """
    whole: dict[tuple[int, int], int] = {}
    terms: list[float] = []
    for took in batches:
        whole.setdefault((took.epoch, took.first), took.samples)
        terms += [loss * (count / took.samples) for _, count, loss in took.parts]
    if not whole or sum(count for took in batches for _, count, _ in took.parts) != sum(whole.values()):
        return None
    if not all(map(math.isfinite, terms)):
        return sum(terms)
    return math.fsum(terms) / len(whole)


# ---------------------------------------------------------------- from steps to samples


def _epochs(
    taken: Mapping[int, Sequence[BatchNote]],
    first: EntryNote,
    data: Mapping[str, Any],
    findings: list[Finding],
) -> Iterator[EpochCount]:
    order = order_from(data["order"])
    length = data["order"].get("length")
    used: dict[int, list[BatchNote]] = defaultdict(list)
    for batches in taken.values():
        for took in batches:
            used[took.epoch].append(took)
    most = data["global_batch"] or max((t.samples for of in used.values() for t in of), default=0)
    last = max(used, default=first.epoch)
    for epoch in range(first.epoch, last + 1):
        begun_at = first.position if epoch == first.epoch else 0
        position = begun_at
        expected: Counter[int] = Counter()
        actual: Counter[int] = Counter()
        count = 0
        for start, stop, ids, step in sorted(_spans(used[epoch])):
            if start > position:
                findings.append(_lost(order, epoch, range(position, start)))
            if start < position:
                positions = range(start, min(position, stop))
                findings.append(RepeatedSamples(epoch, positions, step, _at(order, epoch, positions)))
            count += stop - start
            position = max(position, stop)
            should = _should(order, data, epoch, range(start, stop))
            if should is not None and should != ids:
                expected.update(should)
                actual.update(ids)
        if expected or actual:
            findings.append(WrongSamples(epoch, dict(actual - expected), dict(expected - actual)))
        left = (length if length is not None else position) - position
        left_out = left if data["drop_last"] and left < most else 0
        over = epoch < last or (length is not None and left == left_out)
        if over and left > left_out:
            findings.append(_lost(order, epoch, range(position, position + left)))
        yield EpochCount(epoch, begun_at, count, length, over, left_out)


def _spans(batches: Iterable[BatchNote]) -> Iterator[tuple[int, int, list[int], int]]:
    """Yield spans of positions, the samples fetched for each span, and the step."""
    for took in batches:
        ids = list(unpack(took.ids))
        at = 0
        for start, count, _ in took.parts:
            yield took.first + start, took.first + start + count, ids[at : at + count], took.step
            at += count


def _should(order: Order | None, data: Mapping[str, Any], epoch: int, positions: range) -> list[int] | None:
    """Return the samples that belong at these positions; None where the notes do not tell them."""
    if order is not None:
        return order.at(epoch, _within(order, positions))
    return list(positions) if data["order"]["kind"] == "stream" else None


def _lost(order: Order | None, epoch: int, positions: range) -> LostSamples:
    return LostSamples(epoch, positions, _at(order, epoch, positions))


def _at(order: Order | None, epoch: int, positions: range) -> tuple[int, ...]:
    return tuple(order.at(epoch, _within(order, positions)[:NAMED_MAX])) if order is not None else ()


def _within(order: Order, positions: range) -> range:
    """Return the positions that an epoch has."""
    return range(min(positions.start, order.length), min(positions.stop, order.length))


# ---------------------------------------------------------------- two runs


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two runs. ``what``: "loss" or "weights"."""

    step: int
    what: str
    one: float | str
    other: float | str


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Two runs compared. ``losses`` and ``weights``: how many values are in both runs, up to the first
    difference."""

    difference: Difference | None
    losses: int
    weights: int


def compare(one: AuditVerdict, other: AuditVerdict) -> RunComparison:
    """Compare two runs step by step, bit for bit."""
    losses = weights = 0
    for step in sorted(one.losses.keys() & other.losses.keys() | one.weights.keys() & other.weights.keys()):
        if step in one.losses and step in other.losses:
            losses += 1
            mine, theirs = one.losses[step], other.losses[step]
            if mine.hex() != theirs.hex():
                return RunComparison(Difference(step, "loss", mine, theirs), losses, weights)
        if step in one.weights and step in other.weights:
            weights += 1
            if one.weights[step] != other.weights[step]:
                found = Difference(step, "weights", one.weights[step], other.weights[step])
                return RunComparison(found, losses, weights)
    return RunComparison(None, losses, weights)
