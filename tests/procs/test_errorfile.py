"""The reason of a worker's failure is read from its error file and from the end of its output. Neither is
trusted."""

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
def test_an_invalid_error_file_yields_no_message(tmp_path: Path, content: bytes) -> None:
    assert read_error_file(_file(tmp_path, content)) is None


def test_a_message_that_is_not_all_text_is_one_that_etcd_takes(tmp_path: Path) -> None:
    """Else the agent's report would never be the same as what etcd has, and be written without end."""
    content = json.dumps({"message": "no such file: caf\udce9"}).encode()
    assert read_error_file(_file(tmp_path, content)) == ("no such file: caf\ufffd", "")


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


# ---------------------------------------------------------------- the end of its output

DEEP = 'Traceback (most recent call last):\n  File "job.py", line 3, in <module>\n    main()\n'
IGNORED = (
    "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f>\n"
    'Traceback (most recent call last):\n  File "dataloader.py", line 1, in __del__\n'
    "    self._shutdown_workers()\nAssertionError: can only test a child process\n"
)
THREAD = (
    "Exception in thread Thread-1 (beat):\n"
    'Traceback (most recent call last):\n  File "threading.py", line 9, in _bootstrap_inner\n    self.run()\n'
    "ConnectionError: the dashboard is away\n"
)
BAR = "\r 20%|██        | 8/40 [00:01<00:03, 9.9it/s]\r 25%|██▌       | 10/40 [00:01<00:03, 9.98it/s]"

RAISED = {
    "plain": (DEEP + "ValueError: no\n", "ValueError: no"),
    "without a message": (DEEP + "KeyboardInterrupt\n", "KeyboardInterrupt"),
    "dotted": (DEEP + "torch.DistError: NCCL error\n", "torch.DistError: NCCL error"),
    "of torch with a rank": (
        "\n".join(f"[rank1]: {line}" for line in (DEEP + "RuntimeError: lost").splitlines()),
        "RuntimeError: lost",
    ),
    "after a bar": (BAR + "\n" + DEEP + "ValueError: no\n", "ValueError: no"),
    "on the line of a bar": (BAR + DEEP + "ValueError: no\n", "ValueError: no"),
    "before a bar's last": (DEEP + "ValueError: no\n" + BAR, "ValueError: no"),
    "before what a destructor says": (DEEP + "ValueError: no\n" + IGNORED, "ValueError: no"),
    "after what a destructor says": (IGNORED + DEEP + "ValueError: no\n", "ValueError: no"),
    "beside a thread's": (DEEP + "ValueError: no\n" + THREAD, "ValueError: no"),
    "before a warning": (
        DEEP + "ValueError: no\n[W1122 ProcessGroup.cpp:1] Warning: destroy_process_group() was not called\n",
        "ValueError: no",
    ),
    "chained": (
        DEEP
        + "KeyError: 'x'\n\nDuring handling of the above exception, another exception occurred:\n\n"
        + DEEP
        + "RuntimeError: no x\n",
        "RuntimeError: no x",
    ),
    "of more lines": (
        DEEP + "RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for w: [2] and [3].\n",
        "RuntimeError: Error(s) in loading state_dict for Net:",
    ),
    "of CUDA": (
        DEEP + "RuntimeError: CUDA error: device-side assert triggered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA`.\n\n",
        "RuntimeError: CUDA error: device-side assert triggered",
    ),
    "of a DataLoader's worker": (
        DEEP + "RuntimeError: Caught ValueError in DataLoader worker process 0.\n"
        'Original Traceback (most recent call last):\n  File "worker.py", line 3, in _worker_loop\n'
        "ValueError: a bad image\n",
        "RuntimeError: Caught ValueError in DataLoader worker process 0.",
    ),
    "of a group": (
        (
            "  + Exception Group Traceback (most recent call last):\n"
            '  |   File "job.py", line 1, in <module>\n  |     raise ExceptionGroup("many", [])\n'
            "  | ExceptionGroup: many (2 sub-exceptions)\n"
            "  +-+---------------- 1 ----------------\n    | ValueError: a\n"
            "    +---------------- 2 ----------------\n    | Traceback (most recent call last):\n"
            '    |   File "job.py", line 1, in f\n    | TypeError: b\n'
            "    +------------------------------------\n"
        ),
        "ExceptionGroup: many (2 sub-exceptions)",
    ),
    "of syntax": (
        '  File "/home/me/job.py", line 3\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n',
        "SyntaxError: invalid syntax",
    ),
    "of recursion": (
        DEEP + '  File "job.py", line 2, in f\n    f()\n  [Previous line repeated 996 more times]\n'
        "RecursionError: maximum recursion depth exceeded\n",
        "RecursionError: maximum recursion depth exceeded",
    ),
    "of rich": (
        (
            "╭──────────── Traceback (most recent call last) ────────────╮\n│ job.py:3 in <module> │\n"
            "╰────────╯\nZeroDivisionError: division by zero\n"
        ),
        "ZeroDivisionError: division by zero",
    ),
    "logged before the end": (
        "ERROR:root:step 12 failed\n" + DEEP + "ValueError: no\nINFO:root:leaving\n",
        "ValueError: no",
    ),
}


@pytest.mark.parametrize("kind", RAISED)
def test_the_cause_is_the_last_traceback_that_ended_the_process(kind: str) -> None:
    text, error = RAISED[kind]
    message, shown = read_tail(text.encode(), 1)
    assert message == error
    assert error in shown


UNEXPLAINED = {
    "a bar": (BAR, 1, "25%|██▌       | 10/40 [00:01<00:03, 9.98it/s]"),
    "a log line before a kill": ("step 3\nINFO saving\n", -9, "INFO saving"),
    "a warning before a kill": (DEEP + "UserWarning: slow\n", -9, "UserWarning: slow"),
    "a kill after an error that was caught": (DEEP + "ValueError: no\ngoing on\n", -9, "going on"),
    "words of SystemExit": ("data not found\n", 1, "data not found"),
    "usage": (
        "usage: job.py\njob.py: error: unrecognized arguments: -x\n",
        2,
        "job.py: error: unrecognized arguments: -x",
    ),
    "a destructor": (IGNORED, 1, "AssertionError: can only test a child process"),
    "a thread": (THREAD, 3, "ConnectionError: the dashboard is away"),
    "a traceback cut short": ("Traceback (most recent call last):\n  File", 1, "File"),
}


@pytest.mark.parametrize("kind", UNEXPLAINED)
def test_the_last_printed_line_is_marked_as_not_being_the_cause(kind: str) -> None:
    text, code, last = UNEXPLAINED[kind]
    assert read_tail(text.encode(), code)[0] == f"last output: {last}"


ABORTED = {
    "C++": (
        (
            "step 3\nterminate called after throwing an instance of 'c10::Error'\n"
            "  what():  CUDA error: an illegal memory access was encountered\n"
            "Exception raised from c10_cuda_check (most recent call first):\nframe #0\n"
        ),
        "c10::Error: CUDA error: an illegal memory access was encountered",
    ),
    "C++ without words": (
        "terminate called without an active exception\n",
        "terminate called without an active exception",
    ),
    "faulthandler": (
        (
            "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n"
            '  File "job.py", line 1 in <module>\n\nThread 0x00007e (most recent call first):\n'
            '  File "threading.py", line 1 in wait\n\nExtension modules: numpy (total: 1)\n'
        ),
        "Fatal Python error: Segmentation fault",
    ),
    "glibc": ("double free or corruption (out)\n", "double free or corruption (out)"),
    "assert": (
        "job: net.c:3: send: Assertion `n > 0' failed.\n",
        "job: net.c:3: send: Assertion `n > 0' failed.",
    ),
}


@pytest.mark.parametrize("kind", ABORTED)
def test_what_took_a_process_down_from_within_is_the_cause(kind: str) -> None:
    text, error = ABORTED[kind]
    assert read_tail(text.encode(), -6)[0] == error


def test_what_is_shown_begins_with_the_first_of_those_that_are_chained() -> None:
    noise = "".join(f"line {n}\n" for n in range(30))
    _, shown = read_tail((noise + RAISED["chained"][0] + noise).encode(), 1)
    assert shown.startswith(DEEP + "KeyError") and "RuntimeError: no x" in shown
