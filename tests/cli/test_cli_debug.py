"""``elasticd debug``: the records of all nodes of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from elasticd.cli.command_error import CommandError
from elasticd.cli.debug_command import debug


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def said(*folders: Path) -> tuple[int, list[str]]:
    result = CliRunner().invoke(debug, [*map(str, folders)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output.splitlines()


def write(folder: Path, rank: int, op: str, *, ended: bool) -> None:
    """Write the records of a rank that called one collective."""
    place = folder / "debug" / "round-3"
    place.mkdir(parents=True, exist_ok=True)
    head = {"v": 1, "rank": rank, "world": 2, "unit": 1, "pid": 1}
    notes = [head, {"n": 1, "t": 9.0, "is": "end"}] if ended else [head]
    call = {"n": 1, "t": 1.0, "same": [op, "", None, ""], "of": "", "at": "train.py:5", "chain": 1}
    group = [{**head, "group": "0", "ranks": [[0, 1]]}, *([call] if op else [])]
    (place / f"rank-{rank}.notes").write_text("".join(f"{json.dumps(line)}\n" for line in notes))
    (place / f"rank-{rank}.group-0").write_text("".join(f"{json.dumps(line)}\n" for line in group))


def test_ranks_of_several_nodes_are_compared(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    write(a, 0, "barrier", ended=True)
    write(b, 1, "all_reduce", ended=True)
    code, [first, _, found, *_] = said(a, b / "debug")
    assert (code, first) == (1, "Round 3")
    assert found == (
        "* As collective 1, rank 0 called barrier at train.py:5; rank 1 called all_reduce at train.py:5."
    )
    code, [_, _, alone, *_] = said(a)
    assert (code, alone) == (
        0,
        "* There is nothing to compare: there are records of less than two ranks here.",
    )


def test_a_rank_that_is_behind_counts_where_the_round_was_found_to_hang(tmp_path: Path) -> None:
    write(tmp_path, 0, "barrier", ended=False)
    write(tmp_path, 1, "", ended=False)
    assert said(tmp_path)[0] == 0
    (tmp_path / "hang-of-round-3").mkdir()
    code, lines = said(tmp_path)
    assert code == 1
    assert lines[2] == (
        "* As collective 1, rank 0 called barrier at train.py:5; rank 1 did not: it called none."
    )


@pytest.mark.parametrize(
    ("name", "says"), [("", "start the job with `elasticd run --debug`"), ("no", "nor a folder")]
)
def test_a_run_without_records_is_refused_in_one_sentence(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(CommandError) as refused:
        said(tmp_path / name)
    assert refused.value.code == 2 and says in refused.value.sentence and "\n" not in refused.value.sentence
