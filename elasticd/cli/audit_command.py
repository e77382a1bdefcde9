"""``elasticd audit``: proves from the workers' notes that each sample was used once, or names the samples
that were not; compares two runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import assert_never

import click

from elasticd.cli.command_error import CommandError
from elasticd.cli.say import say
from elasticd.data.audit import (
    AuditVerdict,
    ConflictingNotes,
    DamagedNote,
    EpochCount,
    Finding,
    LostNotes,
    LostSamples,
    MissingCommits,
    MissingNotes,
    RepeatedSamples,
    RunComparison,
    UnequalRanks,
    WrongSamples,
    compare,
    judge,
)
from elasticd.data.auditnotes import FOLDER, SUFFIX, Numbered, as_of
from elasticd.telemetry import runs
from elasticd.telemetry.describe import count, listing
from elasticd.telemetry.events import FILE, TIMELINE

NOT_PROVED = 1
_SHOWN = 20
_NAMED = 10


@click.command()
@click.argument("run", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--against", multiple=True, metavar="RUN", help="Compare losses and weights with RUN, bit by bit."
)
def audit(run: tuple[str, ...], against: tuple[str, ...]) -> int:
    """Prove that RUN used each sample of an epoch once.

    RUN was started with `elasticd run --audit`, and may have crashed or still be running. Give a job's name,
    or the folder of the run's logs; for a job on several nodes, the folders of all nodes. Exit codes: 0,
    proved; 1, not proved, with the reason; 2, the run left no notes for an audit.
    """
    verdict = _judged(run)
    for line in _summary(verdict):
        say(line)
    for found in verdict.findings[:_SHOWN]:
        say(finding(found), fg="red")
    if len(verdict.findings) > _SHOWN:
        say(f"and {len(verdict.findings) - _SHOWN} more findings")
    proved = not verdict.findings and bool(verdict.steps) and bool(verdict.epochs)
    if against:
        compared = compare(verdict, _judged(against))
        if not compared.losses and not compared.weights:
            raise CommandError("the two runs have not a single step in common, so nothing can be compared")
        alike = compared.difference is None
        say(_comparison(compared), fg=None if alike else "red")
        return 0 if alike and not verdict.findings else NOT_PROVED
    say(_proved(verdict.kind) if proved else "not proved")
    return 0 if proved else NOT_PROVED


def _judged(names: tuple[str, ...]) -> AuditVerdict:
    folders = [folder for name in names for folder in _folders(name)]
    try:
        notes = _notes(folders)
        if not notes:
            raise CommandError(
                f"there are no notes for an audit of {listing(names)}: start the job with "
                "`elasticd run --audit`, and use worker.State in its script"
            )
        return judge(notes)
    except OSError as error:
        raise CommandError(f"{error.filename} cannot be read: {error.strerror}") from error


def _folders(name: str) -> list[Path]:
    if known := runs.of_job(runs.state_dir(), name):
        return [run.folder for run in known]
    if Path(name).is_dir():
        return [Path(name)]
    raise CommandError(f"{name} is neither a job that ran on this machine nor a folder")


def _notes(folders: Iterable[Path]) -> dict[str, Numbered]:
    """Return the notes by file name. Each folder is a run's folder, or the ``audit`` folder in it. Raises
    OSError."""
    places = [folder / FOLDER if (folder / FOLDER).is_dir() else folder for folder in folders]
    others = (FILE, TIMELINE)  # every run has these files, also without an audit
    paths = [p for place in places for p in sorted(place.glob(f"*{SUFFIX}")) if p.name not in others]
    sizes = [path.stat().st_size for path in paths]
    return as_of({str(path): (path.read_bytes(), size) for path, size in zip(paths, sizes, strict=True)})


# ---------------------------------------------------------------- sentences without a full stop


def _summary(verdict: AuditVerdict) -> Iterator[str]:
    """Yield one sentence about the steps of the run, and one about each epoch."""
    if not verdict.steps:
        yield "no step is committed"
        return
    sizes = verdict.worlds
    of = count(sizes[0], "worker") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} workers"
    again = f"; {count(verdict.again, 'step')} repeated" if verdict.again else ""
    yield (
        f"steps {verdict.steps[0]} to {verdict.steps[-1]}, in {count(verdict.rounds, 'round')} of {of}{again}"
    )
    for epoch in verdict.epochs:
        yield f"epoch {epoch.number}: {_used(epoch, verdict.kind)}"
    if not verdict.epochs:
        yield "the worker.State of this run has no `data`, so its samples are unknown"


def _proved(kind: str) -> str:
    if kind == "stream":
        return "proved: each position of the stream was used once; only the stream knows its samples"
    return f"proved: each {'draw' if kind == 'weighted' else 'sample'} was used once"


def _used(epoch: EpochCount, kind: str) -> str:
    what = "draw" if kind == "weighted" else "sample"
    of = f" of {epoch.length}" if epoch.length is not None else ""
    start = f" from position {epoch.begun_at} on" if epoch.begun_at else ""
    rest = f", and the last {epoch.left_out} left out" if epoch.left_out else ""
    return f"{epoch.used}{of} {what}s used{start}{rest}" + ("" if epoch.over else ", so far")


def finding(found: Finding) -> str:
    match found:
        case LostSamples(epoch, positions, samples):
            return f"epoch {epoch}: {_samples(positions, samples)} lost"
        case RepeatedSamples(epoch, positions, step, samples):
            return f"epoch {epoch}: {_samples(positions, samples)} used again, in step {step}"
        case WrongSamples(epoch, too_often, too_rarely):
            parts = [_too("too often", too_often), _too("too rarely", too_rarely)]
            said = " and ".join(p for p in parts if p) or "samples in another order than they should be"
            return f"epoch {epoch}: {said}"
        case MissingNotes(step, ranks, world):
            whose = listing([str(rank) for rank in ranks])
            return (
                f"step {step}: there is no note of the samples of rank {whose} of {world} "
                "(for a job on several nodes, give the folders of all nodes)"
            )
        case MissingCommits(round, after, last):
            return f"round {round} goes on after step {after}, but notes end with step {last}"
        case ConflictingNotes(round, step, about):
            return f"workers of round {round} do not agree at step {step} {about}"
        case UnequalRanks(step, digests):
            return f"after step {step} weights differ between ranks: {_by_digest(digests)}"
        case DamagedNote(file, line, why):
            return f"{Path(file).name}, line {line}: {why}"
        case LostNotes(file, step, notes, why):
            return (
                f"{Path(file).name}: {count(notes, 'note')} before step {step} could not be written ({why})"
            )
        case _:
            assert_never(found)


def _comparison(compared: RunComparison) -> str:
    found = compared.difference
    if found is not None:
        one, other = (f"{v!r}" if isinstance(v, float) else v[:16] for v in (found.one, found.other))
        return f"the first difference is the {found.what} of step {found.step}: {one} against {other}"
    return (
        f"{count(compared.losses, 'loss').replace('losss', 'losses')} and "
        f"{count(compared.weights, 'digest')} of weights are in both, and equal"
    )


def _samples(positions: range, samples: Sequence[int]) -> str:
    at = f"position {positions[0]}" if len(positions) == 1 else f"positions {positions[0]} to {positions[-1]}"
    if not samples:
        return f"{count(len(positions), 'sample')} at {at}"
    named = [str(s) for s in samples[:_NAMED]]
    more = len(positions) - len(named)
    which = f"{', '.join(named)} and {more} more" if more else listing(named, most=_NAMED)
    return f"sample{'s' if len(positions) > 1 else ''} {which} (at {at})"


def _too(how: str, samples: Mapping[int, int]) -> str:
    if not samples:
        return ""
    named = [f"{s} ({n} x)" if n > 1 else str(s) for s, n in sorted(samples.items())]
    return f"sample{'s' if len(named) > 1 else ''} {listing(named, most=_NAMED)} {how}"


def _by_digest(digests: Mapping[int, str]) -> str:
    groups: dict[str, list[str]] = {}
    for rank, digest in sorted(digests.items()):
        groups.setdefault(digest, []).append(str(rank))
    return ", ".join(f"{digest[:16]} on rank {listing(ranks)}" for digest, ranks in groups.items())
