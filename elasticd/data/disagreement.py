"""Where the ranks of a round first disagree, from their records: a pure function.

A rank may be behind the others at any moment. So a record that a rank lacks counts only if the rank's script
has ended, or if the round was found to hang.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from elasticd.data.debugrecords import (
    Call,
    DebugNote,
    EpochNote,
    GroupCalls,
    LoadedNote,
    LoaderEndNote,
    RankRecords,
    ScriptEnd,
    SeedNote,
    WeightsNote,
)

Ranks = tuple[int, ...]
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
N = TypeVar("N", SeedNote, WeightsNote, EpochNote, LoadedNote, LoaderEndNote, ScriptEnd)


@dataclass(frozen=True, slots=True)
class OtherCall:
    """Ranks called different collectives as the same collective of a group. ``sides``: the ranks of each
    call, the fewest ranks first. ``group``: empty for all ranks of the round."""

    at: float
    group: Ranks
    number: int
    sides: tuple[tuple[Ranks, Call], ...]


@dataclass(frozen=True, slots=True)
class NoCall:
    """Ranks called a collective that others never reached. ``absent``: the others with their last call in the
    group, if any, and the end of their script, if it has ended."""

    at: float
    group: Ranks
    number: int
    callers: Ranks
    call: Call
    absent: tuple[tuple[int, Call | None, ScriptEnd | None], ...]


@dataclass(frozen=True, slots=True)
class ForgottenCalls:
    """The collectives of a group differed before collective ``number``, and the records no longer go back so
    far."""

    at: float
    group: Ranks
    number: int


@dataclass(frozen=True, slots=True)
class OtherWeights:
    """Ranks have different weights after ``step`` steps; 0: at the beginning. ``parameter``: the first that
    differs; empty if unknown. ``equal``: the last step after which the weights were the same; None if
    unknown."""

    at: float
    model: int
    step: int
    equal: int | None
    parameter: str
    sides: tuple[Ranks, ...]


@dataclass(frozen=True, slots=True)
class OtherBatches:
    """A loader has another number of batches, or of samples, in some ranks. ``sides``: ranks with the number
    of batches and of samples; -1: unknown."""

    at: float
    loader: str
    epoch: int
    sides: tuple[tuple[Ranks, int, int], ...]


@dataclass(frozen=True, slots=True)
class SameData:
    """Ranks that should get different samples got the same first batches."""

    at: float
    loader: str
    epoch: int
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class OtherSampler:
    """The samplers of a loader have a setting that must be the same in all ranks, and is not."""

    at: float
    loader: str
    setting: str
    sides: tuple[tuple[Ranks, int], ...]


@dataclass(frozen=True, slots=True)
class OtherSeeds:
    """Ranks have seeded torch differently."""

    at: float
    sides: tuple[tuple[Ranks, int], ...]


Disagreement = (
    OtherCall | NoCall | ForgottenCalls | OtherWeights | OtherBatches | SameData | OtherSampler | OtherSeeds
)


def disagreements(records: Iterable[RankRecords], *, hung: bool = False) -> tuple[Disagreement, ...]:
    """Return in what the ranks disagree, earliest first; different seeds, which may be meant, come last.

    ``hung``: the round was found to hang, so that a rank that is behind the others will not follow.
    """
    ranks = sorted(records, key=lambda one: one.rank)
    found: list[Disagreement] = [
        *_calls(ranks, hung=hung),
        *_weights(ranks),
        *_batches(ranks),
        *_samplers(ranks),
        *_same_data(ranks),
        *_seeds(ranks),
    ]
    return tuple(sorted(found, key=lambda one: (isinstance(one, OtherSeeds), one.at)))


def compared(records: Iterable[RankRecords]) -> int:
    """Return the greatest number of collectives that a rank called."""
    return max(
        (sum(group.calls[-1].number for group in one.groups if group.calls) for one in records), default=0
    )


# ---------------------------------------------------------------- collectives


def _calls(ranks: Sequence[RankRecords], *, hung: bool) -> Iterator[Disagreement]:
    ends = {one.rank: one.end for one in ranks}
    groups: dict[tuple[str, Ranks], dict[int, GroupCalls]] = {}
    for one in ranks:
        for group in one.groups:
            groups.setdefault((group.name, group.ranks), {})[one.rank] = group
    for (name, members), known in groups.items():
        calls = {rank: known.get(rank, GroupCalls(name, members)).calls for rank in members if rank in ends}
        shown = () if len(members) == ranks[0].world else members
        differing = _first_other_call(calls, shown)
        yield from [differing] if differing is not None else _no_call(calls, shown, ends, hung=hung)


def _first_other_call(calls: Mapping[int, Sequence[Call]], group: Ranks) -> OtherCall | ForgottenCalls | None:
    by_number = {rank: {call.number: call for call in made} for rank, made in calls.items() if made}
    if len(by_number) < 2:
        return None
    kept = set().union(*by_number.values())
    for number in sorted(kept):
        here = {rank: known[number] for rank, known in by_number.items() if number in known}
        sides = _sides(here, lambda call: call.same)
        if len(sides) > 1:
            at = max(call.at for call in here.values())
            return OtherCall(at, group, number, tuple((side, here[side[0]]) for side in sides))
        if len({call.chain for call in here.values()}) > 1:
            return ForgottenCalls(min(call.at for call in here.values()), group, number)
    return None


def _no_call(
    calls: Mapping[int, Sequence[Call]], group: Ranks, ends: Mapping[int, ScriptEnd | None], *, hung: bool
) -> Iterator[NoCall]:
    last = {rank: made[-1].number if made else 0 for rank, made in calls.items()}
    behind = [
        rank
        for rank, number in last.items()
        if number < max(last.values()) and (hung or _will_not_follow(ends[rank]))
    ]
    if not behind:
        return
    number = min(last[rank] for rank in behind) + 1
    made_it = {rank: _numbered(made, number) for rank, made in calls.items() if last[rank] >= number}
    known = {rank: call for rank, call in made_it.items() if call is not None}
    if known:
        absent = tuple(
            (rank, calls[rank][-1] if calls[rank] else None, ends[rank])
            for rank in behind
            if last[rank] < number
        )
        first = min(known)
        at = min(call.at for call in known.values())
        yield NoCall(at, group, number, tuple(made_it), known[first], absent)


def _will_not_follow(end: ScriptEnd | None) -> bool:
    """Whether the script has ended by itself. A collective also fails where another rank is the cause."""
    return end is not None and not end.in_collective


def _numbered(calls: Sequence[Call], number: int) -> Call | None:
    return next((call for call in calls if call.number == number), None)


# ---------------------------------------------------------------- weights


def _weights(ranks: Sequence[RankRecords]) -> Iterator[OtherWeights]:
    models: dict[tuple[int, Ranks], dict[int, dict[int, WeightsNote]]] = {}
    for one in ranks:
        for note in _of(WeightsNote, one.notes):
            steps = models.setdefault((note.model, note.ranks), {})
            steps.setdefault(note.step, {})[one.rank] = note
    for (model, _), steps in models.items():
        equal = None
        for step, notes in sorted(steps.items()):
            sides = _sides(notes, lambda note: note.digest)
            if len(sides) > 1:
                at = max(note.at for note in notes.values())
                yield OtherWeights(at, model, step, equal, _first_other_parameter(notes, sides), sides)
                break
            equal = step if len(notes) > 1 else equal


def _first_other_parameter(notes: Mapping[int, WeightsNote], sides: Sequence[Ranks]) -> str:
    one, other = notes[sides[0][0]], notes[sides[1][0]]
    return next((a[0] for a, b in zip(one.first, other.first, strict=False) if a != b), "")


# ---------------------------------------------------------------- data


def _batches(ranks: Sequence[RankRecords]) -> Iterator[OtherBatches]:
    trained = {note.loader for one in ranks for note in _of(LoadedNote, one.notes)}
    sizes: dict[tuple[str, int], dict[int, tuple[int, int]]] = {}
    times: dict[tuple[str, int], float] = {}
    for one in ranks:
        for note in _of(EpochNote, one.notes):
            sizes.setdefault((note.loader, note.epoch), {})[one.rank] = note.batches, note.samples
            times[note.loader, note.epoch] = note.at
        for end in _of(LoaderEndNote, one.notes):
            batches, samples = sizes.get((end.loader, end.epoch), {}).get(one.rank, (-1, -1))
            if batches < 0 <= end.batches:
                sizes.setdefault((end.loader, end.epoch), {})[one.rank] = end.batches, samples
    told: set[str] = set()
    for (loader, epoch), by_rank in sorted(sizes.items(), key=lambda item: times.get(item[0], 0.0)):
        known = {rank: size for rank, size in by_rank.items() if size != (-1, -1)}
        sides = _sides(known, lambda size: size)
        if loader in trained and len(sides) > 1 and loader not in told:
            told.add(loader)  # later epochs differ in the same way
            yield OtherBatches(
                times[loader, epoch], loader, epoch, tuple((side, *known[side[0]]) for side in sides)
            )


def _samplers(ranks: Sequence[RankRecords]) -> Iterator[OtherSampler]:
    seen: dict[tuple[str, str, int], dict[int, tuple[int, float]]] = {}
    for one in ranks:
        for note in _of(EpochNote, one.notes):
            for setting in note.sampler.keys() - {"rank"}:
                place = seen.setdefault((note.loader, setting, note.epoch), {})
                place[one.rank] = note.sampler[setting], note.at
    told: set[tuple[str, str]] = set()
    for (loader, setting, _), by_rank in sorted(seen.items(), key=lambda item: item[0]):
        sides = _sides(by_rank, lambda value: value[0])
        if len(sides) > 1 and (loader, setting) not in told:
            told.add((loader, setting))
            at = max(at for _, at in by_rank.values())
            values = tuple((side, by_rank[side[0]][0]) for side in sides)
            yield OtherSampler(at, loader, setting, values)


def _same_data(ranks: Sequence[RankRecords]) -> Iterator[SameData]:
    """Compare the first batches of ranks that share one DistributedDataParallel; without any, of all ranks,
    if units have one worker. Batches that are all alike say nothing."""
    loaded: dict[tuple[str, int], dict[int, list[LoadedNote]]] = {}
    for one in ranks:
        for note in _of(LoadedNote, one.notes):
            loaded.setdefault((note.loader, note.epoch), {}).setdefault(one.rank, []).append(note)
    told: set[str] = set()
    for (loader, epoch), by_rank in sorted(loaded.items(), key=lambda item: item[0]):
        for members in _replicas(ranks):
            firsts = {
                rank: tuple(note.digest for note in notes)
                for rank, notes in by_rank.items()
                if rank in members and len({note.digest for note in notes}) > 1
            }
            for side in _sides(firsts, lambda digests: digests):
                if len(side) > 1 and loader not in told:
                    told.add(loader)
                    yield SameData(by_rank[side[0]][0].at, loader, epoch, side)


def _replicas(ranks: Sequence[RankRecords]) -> list[set[int]]:
    """Return sets of ranks that train the same weights with different data."""
    groups: dict[Ranks, set[int]] = {}
    for one in ranks:
        for note in _of(WeightsNote, one.notes):
            groups.setdefault(note.ranks, set()).add(one.rank)
    if groups:
        return list(groups.values())
    return [{one.rank for one in ranks if one.unit == 1}]


# ---------------------------------------------------------------- seeds


def _seeds(ranks: Sequence[RankRecords]) -> Iterator[OtherSeeds]:
    notes = {one.rank: note for one in ranks for note in _of(SeedNote, one.notes)}
    sides = _sides(notes, lambda note: note.seed)
    if len(sides) > 1:
        at = max(note.at for note in notes.values())
        yield OtherSeeds(at, tuple((side, notes[side[0]].seed) for side in sides))


# ---------------------------------------------------------------- helpers


def _of(kind: type[N], notes: Iterable[DebugNote]) -> Iterator[N]:
    return (note for note in notes if isinstance(note, kind))


def _sides(values: Mapping[int, V], key: Callable[[V], K]) -> tuple[Ranks, ...]:
    """Return the ranks by what they have, the fewest ranks first."""
    ranks: dict[K, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(key(value), []).append(rank)
    return tuple(sorted((tuple(side) for side in ranks.values()), key=lambda side: (len(side), side)))
