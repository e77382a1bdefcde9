"""An audit proves which samples were used once, whichever workers died when, and names the other samples."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.data.audit import (
    AuditVerdict,
    ConflictingNotes,
    DamagedNote,
    Difference,
    LostSamples,
    MissingCommits,
    MissingNotes,
    RepeatedSamples,
    UnequalRanks,
    WrongSamples,
    compare,
    judge,
)
from elasticd.data.auditnotes import (
    BadNote,
    BatchNote,
    CommitNote,
    EntryNote,
    Note,
    Weights,
    as_of,
    decode,
    encode,
    lines,
    pack,
    unpack,
)
from elasticd.data.dealing import next_batch, parts_of
from elasticd.data.order import Sequential, Shuffled

Files = dict[str, list[Note]]
Happened = list[tuple[str, Note]]  # in which file the note is, in order of time


def facts(length: int, batch: int, *, seed: int = 0, drop_last: bool = False) -> dict[str, object]:
    return {
        "order": Shuffled(length, seed).facts,
        "global_batch": batch,
        "worker_batch": 0,
        "virtual_ranks": 4,
        "drop_last": drop_last,
    }


def train(
    chance: random.Random,
    *,
    length: int = 23,
    batch: int = 6,
    epochs: int = 2,
    drop_last: bool = False,
    fails: float = 0.4,
    until: int | None = None,
) -> Files:
    """Return the notes of workers in a training in which some die at any instant, and others join. Sometimes
    all die, and the training continues from an earlier step."""
    data = facts(length, batch, drop_last=drop_last)
    files: Files = {}
    states = [(0, 0)]  # after each step, the epoch and the position that are committed
    number = 0
    workers: list[str] = []
    while True:
        number += 1
        world = chance.randint(1, 5)
        workers = (workers + [f"worker{len(files) + i}" for i in range(world)])[:world]
        for rank, name in enumerate(workers):
            position = states[-1]
            entered = EntryNote(number, rank, world, len(states) - 1, "", *position, data)
            files.setdefault(name, []).append(entered)
        while True:
            epoch, position = states[-1]
            taken = next_batch(epoch, position, length=length, size=batch, drop_last=drop_last)
            step = len(states)
            if taken.epoch == epochs or step == until:
                return files
            dead = {w for w in workers if chance.random() < fails / 5}
            if len(dead) == len(workers):
                dead = {chance.choice(workers)}
            early = {w for w in dead if chance.random() < 0.3}
            for rank, name in enumerate(workers):
                if name in early:
                    continue
                parts = parts_of(rank, world, samples=taken.samples, virtual_ranks=4)
                ids = [
                    i
                    for p in parts
                    for i in Shuffled(length, 0).at(
                        taken.epoch, range(taken.first + p.samples.start, taken.first + p.samples.stop)
                    )
                ]
                noted = tuple((p.samples.start, len(p.samples), loss(step, p.samples)) for p in parts)
                files[name].append(
                    BatchNote(step, 0, taken.epoch, taken.first, taken.samples, noted, pack(ids))
                )
            left_behind = (
                set(workers) if early else {w for w in workers if chance.random() < 0.5} & (dead or set())
            )
            committed = [w for w in workers if not early and w not in left_behind]
            survivors = [w for w in workers if w not in dead]
            for name in committed:
                files[name].append(CommitNote(step))
                if step % 2 == 0:
                    files[name].append(Weights(step, f"digest {step}"))
            if any(w in committed for w in survivors):
                states.append((taken.epoch, taken.end))
            if dead or chance.random() < fails / 4:
                workers = survivors
                if chance.random() < 0.2:
                    workers = []
                    del states[chance.randint(1, len(states)) :]
                break


def in_order(files: Files) -> Happened:
    """Return an order in which the notes may have been written. All workers took the samples before the
    commit; a round begins after the step from which it continues; each file is written in its own order."""
    rounds = sorted({n.round for notes in files.values() for n in notes if isinstance(n, EntryNote)})
    happened: Happened = []
    for number in rounds:
        lives = {name: life for name, notes in files.items() if (life := life_of(notes, number))}
        happened += [(name, life.pop(0)) for name, life in lives.items()]
        while any(lives.values()):
            step = min(life[0].step for life in lives.values() if life)
            for kind in (BatchNote, CommitNote, Weights):
                for name, life in lives.items():
                    while life and life[0].step == step and isinstance(life[0], kind):
                        happened.append((name, life.pop(0)))
    assert len(happened) == sum(map(len, files.values()))
    return happened


def life_of(notes: list[Note], number: int) -> list[Note]:
    begins = [i for i, n in enumerate(notes) if isinstance(n, EntryNote)] + [len(notes)]
    return next((notes[a:b] for a, b in pairwise(begins) if notes[a].round == number), [])


def loss(step: int, samples: range) -> float:
    return 1.0 / step + 0.1 * samples.start


def verdict_of(files: Files) -> AuditVerdict:
    return judge({name: enumerate(notes, start=1) for name, notes in files.items()})


@pytest.mark.parametrize("block", range(10))
def test_after_any_faults_a_sound_training_is_proved_with_the_losses_of_an_undisturbed_one(block):
    for seed in range(block * 60, block * 60 + 60):
        chance = random.Random(seed)
        shape = {
            "length": chance.choice([1, 5, 6, 12, 23, 40]),
            "epochs": chance.randint(1, 3),
            "drop_last": chance.random() < 0.3,
        }
        if shape["drop_last"]:
            shape["length"] += 6
        found = verdict_of(train(chance, **shape))
        assert found.findings == (), seed
        alone = verdict_of(train(random.Random(1), fails=0, **shape))
        assert [(e.used, e.over) for e in found.epochs] == [(e.used, e.over) for e in alone.epochs], seed
        assert found.losses == alone.losses, "bit by bit"
        assert all(e.over and e.used + e.left_out == e.length for e in found.epochs)
        assert compare(found, alone).difference is None


def test_a_run_that_crashed_is_proved_as_far_as_it_came():
    found = verdict_of(train(random.Random(5), until=6))
    assert found.findings == () and found.steps == range(1, 6)
    assert [(e.number, e.used, e.over) for e in found.epochs] == [(0, 23, True), (1, 6, False)]


def test_commits_of_several_steps_and_of_none_are_proved_like_others():
    """The first commit is of three steps. The second is of a result that needed no samples. A worker dies
    before the third, and its two steps are made again."""
    data = facts(23, 6)

    def took(step: int, turn: int, first: int, samples: int, rank: int, world: int) -> BatchNote:
        parts = parts_of(rank, world, samples=samples, virtual_ranks=4)
        at = [first + i for p in parts for i in p.samples]
        ids = [Shuffled(23, 0).at(0, range(i, i + 1))[0] for i in at]
        noted = tuple((p.samples.start, len(p.samples), loss(step + turn, p.samples)) for p in parts)
        return BatchNote(step, turn, 0, first, samples, noted, pack(ids))

    files: Files = {
        f"worker{rank}": [
            EntryNote(1, rank, 2, 0, "", 0, 0, data),
            *(took(1, turn, 6 * turn, 6, rank, 2) for turn in range(3)),
            CommitNote(3, 3),
            CommitNote(4, 0),
            took(5, 0, 18, 5, rank, 2),
        ]
        for rank in range(2)
    }
    files["worker0"] += [EntryNote(2, 0, 1, 4, "", 0, 18, data), took(5, 0, 18, 5, 0, 1), CommitNote(5)]
    found = verdict_of(files)
    assert found.findings == () and found.steps == range(1, 6) and found.again == 0
    assert [(e.used, e.over) for e in found.epochs] == [(23, True)]
    files["worker1"].remove(CommitNote(3, 3))
    files["worker1"].insert(4, CommitNote(3, 2))
    assert verdict_of(files).findings == (ConflictingNotes(1, 3, "how many steps are committed with it"),)
    del files["worker1"][2:]
    assert any(isinstance(f, MissingNotes) for f in verdict_of(files).findings)


def test_a_run_that_goes_on_while_its_notes_are_read_is_proved_so_far():
    """The size of each file is seen first. Each file is read at a later moment."""
    for seed in range(60):
        chance = random.Random(seed)
        files = train(chance, epochs=3)
        happened = in_order(files)
        seen_at = chance.randint(1, len(happened))
        seen = {name: min(len(happened), seen_at + chance.randint(0, 12)) for name in files}
        read_at = max(seen.values())
        read = {name: min(len(happened), read_at + chance.randint(0, 12)) for name in files}

        def written(name: str, until: int, happened: Happened = happened) -> bytes:
            return b"".join(encode(note) for whose, note in happened[:until] if whose == name)

        parts = {
            name: (written(name, read[name]), max(0, len(written(name, seen[name])) - chance.choice([0, 3])))
            for name in files
        }
        found = judge(as_of(parts))
        assert found.findings == (), seed
        assert len(found.steps) <= len(verdict_of(files).steps)


def test_steps_after_the_one_that_is_gone_on_from_are_no_more():
    """Round 2 began after step 1. No worker is left that made step 2 of round 1."""
    files = train(random.Random(1), fails=0, epochs=1)
    [name] = [n for n, notes in files.items() if notes[0].rank == 0]
    entered = files[name][0]
    again = [dataclasses.replace(entered, round=2, step=1, position=6, rank=0, world=1)]
    found = verdict_of({**files, "later": again})
    assert found.steps == range(1, 2) and found.again == 3
    assert [(e.used, e.over) for e in found.epochs] == [(6, False)]


def test_a_round_continues_the_round_whose_checkpoint_it_resumed_from():
    """Round 1 gets to step 4 and dies. Round 2 begins from the start, before the saver has committed the
    checkpoint of step 4, and dies after one step. Round 3 resumes from step 4."""
    first = train(random.Random(1), fails=0, epochs=1)
    world = next(iter(first.values()))[0].world

    def begun(notes: list[Note], number: int, step: int) -> Note:
        return dataclasses.replace(notes[0], round=number, step=step, position=6 * step)

    alone = {f"{n} alone": [begun(v, 2, 0), *(x for x in v[1:] if x.step == 1)] for n, v in first.items()}
    later = {f"{n} later": [begun(v, 3, 4)] for n, v in first.items()}
    found = verdict_of({**first, **alone, **later})
    assert found.findings == () and found.steps == range(1, 5) and found.worlds == (world,)
    assert found.rounds == 1 and found.again == 1  # the step of round 2


def undisturbed() -> Files:
    """Return the notes of four steps in a world of one, in which each note is easy to find."""
    files = train(random.Random(0), fails=0, epochs=1)
    world = next(iter(files.values()))[0].world
    assert world > 1, "more than one, to have something to differ from"
    return files


def change(files: Files, which: Callable[[Note], bool], to: Callable[[Note], Note | None]) -> Files:
    """Return the notes with the first such note of a later rank changed or left out."""
    for name, notes in reversed(files.items()):
        for i, note in enumerate(notes):
            if which(note):
                new = to(note)
                return {**files, name: [*notes[:i], *([new] if new else []), *notes[i + 1 :]]}
    raise AssertionError("no such note")


def took(step: int) -> Callable[[Note], bool]:
    return lambda note: isinstance(note, BatchNote) and note.step == step and bool(note.parts)


def test_a_sample_that_was_fetched_in_place_of_another_is_named():
    def wrongly(note: Note) -> Note:
        ids = unpack(note.ids)
        return dataclasses.replace(note, ids=pack([*ids[:-1], ids[0]]))

    files = undisturbed()
    found = verdict_of(change(files, took(2), wrongly))
    [mistaken] = found.findings
    assert isinstance(mistaken, WrongSamples) and mistaken.epoch == 0
    [note] = [n for n in next(reversed(files.values())) if took(2)(n)]
    assert mistaken.too_often == {unpack(note.ids)[0]: 1}
    assert mistaken.too_rarely == {unpack(note.ids)[-1]: 1}


def test_a_step_that_was_left_out_is_named_with_its_samples():
    files = {
        name: [n for n in notes if getattr(n, "step", 0) != 2 or isinstance(n, EntryNote)]
        for name, notes in undisturbed().items()
    }
    found = verdict_of(files)
    assert LostSamples(0, range(6, 12), tuple(Shuffled(23, 0).at(0, range(6, 12)))) in found.findings


def test_a_batch_that_was_used_in_two_steps_is_named():
    def again(note: Note) -> Note:
        return dataclasses.replace(note, first=0)

    files = undisturbed()
    for _ in range(next(iter(files.values()))[0].world):
        files = change(files, lambda n: took(2)(n) and n.first == 6, again)
    found = verdict_of(files).findings
    assert any(isinstance(f, RepeatedSamples) and f.step == 2 for f in found)
    assert any(isinstance(f, LostSamples) for f in found)


def test_the_end_of_an_epoch_that_was_never_used_is_lost():
    files = {
        name: [
            dataclasses.replace(n, data={**n.data, "order": Shuffled(30, 0).facts})
            if isinstance(n, EntryNote)
            else n
            for n in notes
        ]
        for name, notes in train(random.Random(2), fails=0).items()
    }
    assert any(
        isinstance(f, LostSamples) and f.positions == range(23, 30) for f in verdict_of(files).findings
    )


def test_a_missing_note_is_not_taken_for_granted():
    found = verdict_of(change(undisturbed(), took(3), lambda _: None)).findings
    assert any(isinstance(f, MissingNotes) and f.step == 3 for f in found)


def test_files_of_a_node_that_are_not_there_are_missed():
    files = undisturbed()
    del files[next(reversed(files))]
    world = next(iter(files.values()))[0].world
    assert MissingNotes(1, (world - 1,), world) in verdict_of(files).findings


def test_a_round_that_continues_from_a_step_without_a_note_is_named():
    files = undisturbed()
    later = dataclasses.replace(next(iter(files.values()))[0], round=9, step=7, rank=0, world=1)
    assert MissingCommits(9, 7, 4) in verdict_of({**files, "later": [later]}).findings


def test_workers_that_disagree_about_a_batch_are_named():
    found = verdict_of(change(undisturbed(), took(2), lambda n: dataclasses.replace(n, samples=5))).findings
    assert any(isinstance(f, ConflictingNotes) and f.step == 2 for f in found)


def test_weights_that_differ_between_ranks_are_named():
    files = change(undisturbed(), lambda n: isinstance(n, Weights), lambda n: Weights(n.step, "another"))
    [diverged] = verdict_of(files).findings
    assert isinstance(diverged, UnequalRanks) and set(diverged.digests.values()) == {"digest 2", "another"}


def test_the_first_difference_of_two_runs_is_named():
    one = verdict_of(undisturbed())
    worse = change(
        undisturbed(),
        took(3),
        lambda n: dataclasses.replace(n, parts=((*n.parts[0][:2], n.parts[0][2] + 1e-9), *n.parts[1:])),
    )
    other = verdict_of(change(worse, lambda n: n == Weights(4, "digest 4"), lambda n: Weights(4, "x")))
    compared = compare(one, other)
    assert compared.difference == Difference(3, "loss", one.losses[3], other.losses[3])
    assert (compared.losses, compared.weights) == (3, 1)
    assert compare(one, one).difference is None


def test_a_stream_is_proved_by_its_positions_and_ends_where_it_ends():
    def streamed(note: Note) -> Note:
        if isinstance(note, EntryNote):
            return dataclasses.replace(note, data={**note.data, "order": {"kind": "stream"}})
        if isinstance(note, BatchNote):
            ids = [note.first + start + i for start, count, _ in note.parts for i in range(count)]
            return dataclasses.replace(note, ids=pack(ids))
        return note

    files = {name: [streamed(n) for n in notes] for name, notes in train(random.Random(3)).items()}
    found = verdict_of(files)
    assert found.findings == () and [(e.used, e.length) for e in found.epochs] == [(23, None), (23, None)]


def test_rounds_are_counted_anew_by_another_etcd():
    """There are two series of rounds. The second continues from a checkpoint after step 2, and has small
    numbers again."""
    files = train(random.Random(1), fails=0, epochs=1)
    world = next(iter(files.values()))[0].world

    def begun(series: str, step: int) -> Callable[[Note], Note]:
        return lambda n: dataclasses.replace(n, series=series, step=step, position=6 * step, round=5 - step)

    first = {
        n: [begun("1", 0)(x) if isinstance(x, EntryNote) else x for x in notes] for n, notes in files.items()
    }
    second = {
        f"{n} later": [begun("2", 2)(notes[0]), *(x for x in notes[1:] if x.step > 2)]
        for n, notes in files.items()
    }
    found = verdict_of({**second, **first})
    assert found.findings == () and found.again == 2 and found.rounds == 2 and found.worlds == (world,)


# ---------------------------------------------------------------- lines


NOTES: list[Note] = [
    EntryNote(3, 1, 4, 17, "5.5", 1, 96, facts(23, 6)),
    EntryNote(1, 0, 1, 0),
    BatchNote(18, 1, 1, 96, 32, ((8, 2, 0.1), (10, 3, float("inf"))), pack([5, 3, 10**12, 0, 9])),
    CommitNote(18),
    CommitNote(18, 4),
    Weights(100, "abc"),
]


@pytest.mark.parametrize("note", NOTES, ids=lambda n: type(n).__name__)
def test_notes_are_read_as_they_were_written(note):
    assert decode(encode(note)) == note
    assert encode(note).count(b"\n") == 1


def test_a_line_that_was_cut_off_is_passed_over_and_one_that_is_damaged_is_not():
    data = b"".join(map(encode, NOTES))
    for end in range(len(data)):
        assert all(not isinstance(note, BadNote) for _, note in lines(data[:end]))
    damaged = [
        (number, note)
        for number, note in lines(data.replace(b'"took"', b'"to', 1))
        if isinstance(note, BadNote)
    ]
    assert [number for number, _ in damaged] == [3]
    [finding] = [f for f in judge({"a": lines(b"rubbish\n")}).findings if isinstance(f, DamagedNote)]
    assert (finding.file, finding.line) == ("a", 1) and "rubbish" in finding.why


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{}",
        b'{"is":"committed"}',
        b'{"is":"committed","step":"1"}',
        b"\xff",
        b'{"is":"took","parts":[[1]]}',
        b'{"is":"took","parts":[[0,1,"0x1p99999"]]}',
        b'{"is":"took","parts":[[Infinity,1,"0x0p0"]]}',
        b"[" * 100_000,
    ],
)
def test_a_line_that_is_no_note_raises_bad_note(line):
    with pytest.raises(BadNote):
        decode(line)


@given(st.lists(st.integers(0, 2**62)))
def test_any_numbers_are_packed_and_unpacked(numbers):
    assert list(unpack(pack(numbers))) == numbers


def test_neighbours_are_packed_small():
    assert len(pack(range(1000, 2000))) < 1400
    assert Sequential(5).at(0, range(5)) == list(unpack(pack(range(5))))


@pytest.mark.parametrize("text", ["!", "gA==", "a"])
def test_packed_numbers_that_were_cut_raise_bad_note(text):
    with pytest.raises(BadNote):
        unpack(text)


@settings(max_examples=300)
@given(st.data())
def test_a_note_that_is_damaged_anywhere_is_a_finding_or_changes_nothing_and_stops_no_audit(data):
    facts = {
        "order": {"kind": "shuffled", "length": 16, "seed": 1},
        "global_batch": 4,
        "drop_last": False,
    }
    order = Shuffled(16, 1)
    good = encode(EntryNote(1, 0, 1, 0, "", 0, 0, facts))
    for step in range(4):
        ids = pack(order.at(0, range(4 * step, 4 * step + 4)))
        good += encode(BatchNote(step + 1, 0, 0, 4 * step, 4, ((0, 4, 1.0),), ids))
        good += encode(CommitNote(step + 1))
    damaged = bytearray(good)
    damaged[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not judge({"a": lines(good)}).findings
    judge({"a": lines(bytes(damaged))})


def test_positions_that_no_epoch_has_are_a_finding():
    def facts(length: int) -> dict[str, Any]:
        order = {"kind": "shuffled", "length": length, "seed": 1}
        return {"order": order, "global_batch": 4, "drop_last": False}

    notes = [
        EntryNote(1, 0, 1, 0, "", 0, 500, facts(1000)),
        BatchNote(1, 0, 0, 500, 4, ((0, 4, 1.0),), pack([1, 2, 3, 4])),
        CommitNote(1),
        EntryNote(2, 0, 1, 1, "", 1, 0, facts(100)),
    ]
    assert WrongSamples(0, {1: 1, 2: 1, 3: 1, 4: 1}, {}) in judge({"a": enumerate(notes)}).findings
