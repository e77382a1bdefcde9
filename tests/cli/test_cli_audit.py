"""``elasticd audit``: its output and its exit codes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

from elasticd.cli.audit_command import audit
from elasticd.cli.command_error import CommandError
from elasticd.data.auditnotes import FOLDER, BatchNote, CommitNote, EntryNote, Note, Weights, encode, pack
from elasticd.data.order import Shuffled
from elasticd.telemetry import events, runs

DATA = {
    "order": Shuffled(12, 3).facts,
    "global_batch": 4,
    "worker_batch": 0,
    "virtual_ranks": 1,
    "drop_last": False,
}


def training(steps: int = 3) -> list[Note]:
    notes: list[Note] = [EntryNote(1, 0, 1, 0, data=DATA)]
    for step in range(1, steps + 1):
        first = 4 * step - 4
        ids = pack(Shuffled(12, 3).at(0, range(first, first + 4)))
        notes += [BatchNote(step, 0, 0, first, 4, ((0, 4, 1 / step),), ids), CommitNote(step)]
    return [*notes, Weights(steps, "ab" * 32)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "run"


def write(folder: Path, notes: list[Note]) -> str:
    (folder / FOLDER).mkdir(parents=True)
    (folder / FOLDER / "host-1-2.jsonl").write_bytes(b"".join(map(encode, notes)))
    return str(folder)


def say(*argv: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(audit, argv, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output.splitlines()


def test_a_run_is_found_by_its_folder_or_by_the_name_of_its_job(folder):
    write(folder, training())
    proved = (
        0,
        [
            "steps 1 to 3, in 1 round of 1 worker",
            "epoch 0: 12 of 12 samples used",
            "proved: each sample was used once",
        ],
    )
    assert say(str(folder)) == proved
    assert say(str(folder / FOLDER)) == proved
    runs.note(runs.state_dir(), "train", "a", 1.0, folder)
    assert say("train") == proved


def test_of_a_stream_no_more_is_claimed_than_positions_prove(folder):
    data = {**DATA, "order": {"kind": "stream"}}
    notes: list[Note] = [EntryNote(1, 0, 1, 0, data=data)]
    notes += [BatchNote(1, 0, 0, 0, 4, ((0, 4, 1.0),), pack(range(4))), CommitNote(1)]
    code, said = say(write(folder, notes))
    assert code == 0 and said[-1].startswith(
        "proved: each position of the stream was used once; only the stream knows"
    )


def test_a_run_that_is_not_at_its_end_is_proved_so_far(folder):
    write(folder, training(steps=2))
    code, said = say(str(folder))
    assert (code, said[1]) == (0, "epoch 0: 8 of 12 samples used, so far")


def test_the_audit_names_what_it_could_not_prove(folder):
    notes = [n for n in training() if getattr(n, "step", 0) != 2]
    write(folder, notes)
    code, said = say(str(folder))
    lost = Shuffled(12, 3).at(0, range(4, 8))
    assert code == 1
    assert said[2:] == [
        f"epoch 0: samples {', '.join(map(str, lost[:3]))} and {lost[3]} (at positions 4 to 7) lost",
        "not proved",
    ]


def test_two_runs_are_compared_step_by_step(folder):
    one = write(folder / "one", training())
    same = write(folder / "same", training())
    code, said = say(one, "--against", same)
    assert (code, said[-1]) == (0, "3 losses and 1 digest of weights are in both, and equal")

    worse = [
        dataclasses.replace(n, parts=((0, 4, 0.25),)) if isinstance(n, BatchNote) and n.step == 2 else n
        for n in training()
    ]
    other = write(folder / "other", worse)
    code, said = say(one, "--against", other)
    assert (code, said[-1]) == (1, "the first difference is the loss of step 2: 0.5 against 0.25")


def test_runs_of_which_nothing_is_known_are_refused_in_a_sentence(folder):
    with pytest.raises(CommandError, match="nowhere is neither a job that ran on this machine nor a folder"):
        say("nowhere")
    folder.mkdir()
    for others in (events.FILE, events.TIMELINE):
        (folder / others).write_text('{"at": 1.0}\n')
    with pytest.raises(CommandError, match=r"there are no notes for an audit of .*: start the job with"):
        say(str(folder))
    one = write(folder / "one", training())
    other = write(folder / "other", training()[:1])
    with pytest.raises(CommandError, match="not a single step in common"):
        say(one, "--against", other)
