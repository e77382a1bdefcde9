"""What a worker wrote about its failure is read with distrust."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.procs.errorfile import read_error_file, read_tail


def _file(folder: Path, content: bytes) -> Path:
    path = folder / "error.json"
    path.write_bytes(content)
    return path


def test_message_and_traceback_of_torchs_record(tmp_path: Path) -> None:
    content = {
        "message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "T\n  at x", "timestamp": "1"}}
    }
    assert read_error_file(_file(tmp_path, json.dumps(content).encode())) == ("ValueError: x", "T\n  at x")


def test_a_message_that_is_a_string(tmp_path: Path) -> None:
    assert read_error_file(_file(tmp_path, b'{"message": "out of memory"}')) == ("out of memory", "")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"{}",
        b'{"message": null}',
        b'{"message": 5}',
        b'{"message": {"message": []}}',
        b"\xff\xfe",
        b"[" * 500_000,
    ],
)
def test_what_is_no_error_file_says_nothing(tmp_path: Path, content: bytes) -> None:
    assert read_error_file(_file(tmp_path, content)) is None


def test_odd_details_do_not_spoil_the_message(tmp_path: Path) -> None:
    odd: list[Any] = [None, [], "x", {"py_callstack": 7}]
    for extra in odd:
        content: dict[str, Any] = {"message": {"message": "m", "extraInfo": extra}}
        assert read_error_file(_file(tmp_path, json.dumps(content).encode())) == ("m", "")


def test_sizes_are_bounded_and_terminals_are_safe(tmp_path: Path) -> None:
    content = {
        "message": {
            "message": "\x1b[31mred\x1b[0m\x07" + "x" * 9999,
            "extraInfo": {"py_callstack": "y" * 99_999},
        }
    }
    found = read_error_file(_file(tmp_path, json.dumps(content).encode()))
    assert found is not None
    assert found[0].startswith("redxxx")
    assert len(found[0]) == 2000
    assert len(found[1]) == 50_000


def test_absent_files_folders_and_devices_say_nothing(tmp_path: Path) -> None:
    assert read_error_file(tmp_path / "absent") is None
    assert read_error_file(tmp_path) is None
    assert read_error_file("/dev/zero") is None
    assert read_error_file("") is None


def test_a_tail_gives_its_last_line_and_its_last_lines() -> None:
    message, tail = read_tail(b"\n".join(b"line %d" % i for i in range(100)) + b"\nError: x\n\n", 1)
    assert message == "last output: Error: x"
    assert tail.splitlines()[-1] == "Error: x"
    assert len(tail.splitlines()) <= 20
    assert read_tail(b"", 1) == ("", "")


@given(st.binary(max_size=200), st.integers(-64, 255))
def test_no_output_makes_a_tail_that_controls_a_terminal(output: bytes, code: int) -> None:
    assert not {c for text in read_tail(output, code) for c in text if ord(c) < 32 and c not in "\n\t"}
