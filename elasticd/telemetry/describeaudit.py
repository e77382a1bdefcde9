"""The findings of an audit as sentences without a full stop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import assert_never

from elasticd.data.audit import (
    AuditVerdict,
    Damaged,
    Disagreed,
    DivergedRuns,
    EpochCount,
    Finding,
    Interrupted,
    Jumped,
    LostSamples,
    Mistaken,
    Repeated,
    RunComparison,
    Unrecorded,
)
from elasticd.telemetry.describe import count, listing

_NAMED = 10


def summary(verdict: AuditVerdict) -> Iterator[str]:
    """Yield one sentence about the steps of the run, and one about each epoch."""
    if not verdict.steps:
        yield "no step is committed"
        return
    sizes = verdict.worlds
    of = count(sizes[0], "worker") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} workers"
    again = f"; {count(verdict.again, 'step')} more were made anew" if verdict.again else ""
    yield (
        f"steps {verdict.steps[0]} to {verdict.steps[-1]}, in {count(verdict.rounds, 'round')} of {of}{again}"
    )
    for epoch in verdict.epochs:
        yield f"epoch {epoch.number}: {_used(epoch, verdict.kind)}"
    if not verdict.epochs:
        yield "the State of this run has no data, so nothing is known of its samples"


def proved(kind: str) -> str:
    if kind == "stream":
        return "proved: each position of the stream was used once; which sample it has there only it knows"
    return "proved: each was used once"


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
        case Repeated(epoch, positions, step, samples):
            return f"epoch {epoch}: {_samples(positions, samples)} used again, in step {step}"
        case Mistaken(epoch, too_often, too_rarely):
            parts = [_too("too often", too_often), _too("too rarely", too_rarely)]
            said = " and ".join(p for p in parts if p) or "samples in another order than they should be"
            return f"epoch {epoch}: {said}"
        case Unrecorded(step, ranks, world):
            whose = listing([str(rank) for rank in ranks])
            return (
                f"step {step}: nothing is noted of what rank {whose} of {world} took "
                "(of a job on several nodes, give all their folders)"
            )
        case Jumped(round, after, last):
            return f"round {round} goes on after step {after}, but notes end with step {last}"
        case Disagreed(round, step, about):
            return f"workers of round {round} do not agree at step {step} {about}"
        case DivergedRuns(step, digests):
            return f"after step {step} weights differ between ranks: {_by_digest(digests)}"
        case Damaged(file, line, why):
            return f"{Path(file).name}, line {line}: {why}"
        case Interrupted(file, step, notes, why):
            return (
                f"{Path(file).name}: {count(notes, 'note')} before step {step} could not be written ({why})"
            )
        case _:
            assert_never(found)


def comparison(compared: RunComparison) -> str:
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
