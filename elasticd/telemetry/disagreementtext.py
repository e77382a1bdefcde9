"""Where ranks disagree, in words: for the terminal, and for the summary in the run's folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import assert_never

from elasticd.data.debugrecords import Call, RankRecords, ScriptEnd
from elasticd.data.disagreement import (
    Disagreement,
    ForgottenCalls,
    NoCall,
    OtherBatches,
    OtherCall,
    OtherSampler,
    OtherSeeds,
    OtherWeights,
    SameData,
    compared,
)
from elasticd.telemetry.describe import count, ranks_in_words

_LAST = 10


def disagreement(found: Disagreement) -> str:
    """Return one or two sentences without the last full stop."""
    match found:
        case OtherCall(_, group, number, sides):
            called = "; ".join(f"{ranks_in_words(ranks)} called {_call(call)}" for ranks, call in sides)
            return f"as {_nth(number, group)}, {called}"
        case NoCall(_, group, number, callers, call, absent):
            others = "; ".join(_absent(*one) for one in absent)
            return f"as {_nth(number, group)}, {ranks_in_words(callers)} called {_call(call)}; {others}"
        case ForgottenCalls(_, group, number):
            return (
                f"the ranks called different collectives before {_nth(number, group)}, and the "
                "records go back no further"
            )
        case OtherWeights():
            return _weights(found)
        case OtherBatches(_, loader, epoch, sides):
            had = "; ".join(
                f"{ranks_in_words(ranks)} {_has(ranks)} {_batches(batches)}{_samples(samples)}"
                for ranks, batches, samples in sides
            )
            return f"the DataLoader at {loader} is not of one length in all ranks in epoch {epoch}: {had}"
        case SameData(_, loader, epoch, ranks):
            got = f"{ranks_in_words(ranks)} got the same first batches of epoch {epoch}"
            return f"{got} from the DataLoader at {loader}: the data is not dealt to the ranks"
        case OtherSampler(_, loader, setting, sides):
            had = "; ".join(f"{ranks_in_words(ranks)} {_has(ranks)} {value}" for ranks, value in sides)
            return f"the samplers of the DataLoader at {loader} differ in {setting}: {had}"
        case OtherSeeds(_, sides):
            had = "; ".join(f"{ranks_in_words(ranks)} {_has(ranks)} {seed}" for ranks, seed in sides[:4])
            return f"the ranks have different seeds (torch.initial_seed()): {had}"
        case _:
            assert_never(found)


def all_agree(records: Sequence[RankRecords]) -> str:
    """Return the sentence of a round in which nothing was found."""
    if len(records) < 2:
        return "there is nothing to compare: there are records of less than two ranks here"
    return (
        f"the {len(records)} ranks with records here agree, as far as they are compared: each called "
        f"{count(compared(records), 'collective')}"
    )


def summary(round: int, found: Sequence[Disagreement], records: Sequence[RankRecords]) -> str:
    """Return the text of a round's summary: what was found, and each rank's end and last collectives."""
    lines = [f"Round {round}", ""]
    lines += [f"* {_sentence(disagreement(one))}" for one in found] or [f"* {_sentence(all_agree(records))}"]
    for one in records:
        lines += ["", f"rank {one.rank}: {_end(one.end)}"]
        for group in one.groups:
            lines += [f"  the last collectives of group {group.name} ({ranks_in_words(group.ranks)}):"]
            lines += [f"  {call.number:>8} {_call(call)}" for call in group.calls[-_LAST:]]
    return "\n".join([*lines, ""])


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _call(call: Call) -> str:
    how = f" ({call.how})" if call.how else ""
    of = f" of {call.tensors}" if call.tensors else ""
    return f"{call.op}{how}{of}{_at(call.place)}"


def _at(place: str) -> str:
    return f" at {place}" if place else ""


def _nth(number: int, group: Sequence[int]) -> str:
    return f"collective {number}" + (f" of the group of {ranks_in_words(group)}" if group else "")


def _absent(rank: int, last: Call | None, end: ScriptEnd | None) -> str:
    before = f"its last one was {_call(last)}" if last is not None else "it called none"
    if end is None:
        return f"rank {rank} did not: {before}"
    return f"rank {rank} {_end(end)}: {before}"


def _end(end: ScriptEnd | None) -> str:
    if end is None:
        return "its script did not end by itself"
    return f"raised {end.error}{_at(end.place)}" if end.error else "came to the end of its script"


def _weights(found: OtherWeights) -> str:
    model = f" of model {found.model}" if found.model else ""
    name = f", first in {found.parameter}" if found.parameter else ""
    when = f"after step {found.step}" if found.step else "at the beginning"
    before = f" (they are the same after step {found.equal})" if found.equal else ""
    before = " (they are the same at the beginning)" if found.equal == 0 else before
    sides = " and of ".join(map(ranks_in_words, found.sides))
    return f"the weights{model} of {sides} differ {when}{name}{before}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _batches(batches: int) -> str:
    return "1 batch" if batches == 1 else f"{batches} batches" if batches >= 0 else "batches"


def _samples(samples: int) -> str:
    return f", of {count(samples, 'sample')}" if samples >= 0 else ""


def subject(found: Disagreement) -> str:
    """Return a text that stays the same when a later comparison knows more of the same disagreement."""
    names = ("group", "loader", "model", "setting")
    return " ".join([type(found).__name__, *(str(getattr(found, name, "")) for name in names)])


def sentences(found: Iterable[Disagreement]) -> list[str]:
    """Return a sentence for each disagreement."""
    return [_sentence(disagreement(one)) for one in found]
