"""The live view in a real pseudo-terminal, read through a terminal emulator."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
from pathlib import Path

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from elasticd.telemetry import footer
from elasticd.telemetry.lines import PARTIAL_MAX_CHARS, LineBuffer, clean, cleaned, shown
from elasticd.telemetry.liveview import PlainView, open_view
from elasticd.telemetry.status import Note
from tests.telemetry.madeup import agent, job, node, running

# ---------------------------------------------------------------- lines


@given(st.lists(st.binary(max_size=20), max_size=10))
def test_how_output_is_cut_into_chunks_changes_nothing(chunks: list[bytes]) -> None:
    pieces, whole = LineBuffer(), LineBuffer()
    lines = [line for chunk in chunks for line in pieces.feed(chunk)]
    assert lines == whole.feed(b"".join(chunks))
    assert pieces.close() == whole.close()


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_nothing_that_is_shown_moves_the_cursor(text: str) -> None:
    left = re.sub(r"\x1b\[[0-9;:<=>?]*[ -/]*m", "", shown(text))
    assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", left)


@given(
    st.lists(
        st.sampled_from(["a", "\x1b", "[", "]", "0;", "m", "\x07", "\\", "\x9b", "\n", "\t", "\u202e", " "])
    )
)
def test_clean_text_has_nothing_in_it_that_a_terminal_obeys(parts: list[str]) -> None:
    text = clean("".join(parts))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert clean(text) == text


@pytest.mark.parametrize(
    ("text", "clean_text"),
    [
        ("plain, \xfcml\xe4uts \u4e16\u754c\n\tand lines", "plain, \xfcml\xe4uts \u4e16\u754c\n\tand lines"),
        ("\x1b]0;owned\x07title", "title"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b[2J\x1b[31mred", "red"),
        ("\x1bP$q\x1b\\dcs \x1bc\x9b2J", "dcs 2J"),
        ("back\b\rspace", "backspace"),
        ("\ud800", ""),
    ],
)
def test_of_a_text_its_words_stay(text: str, clean_text: str) -> None:
    assert clean(text) == clean_text


def test_a_record_is_cleaned_however_deep_its_texts_are() -> None:
    dirty = job(job="a\x1b[2J", agent=agent(events=(Note(0.0, "b\x1b]0;x\x07"),)))
    assert cleaned(dirty) == job(job="a", agent=agent(events=(Note(0.0, "b"),)))
    tidy = job()
    assert cleaned(tidy) is tidy


def test_of_a_progress_bar_the_latest_state_is_shown() -> None:
    buffer = LineBuffer()
    assert buffer.feed(b"\r 10%|#   |\r 20%|##  |") == []
    assert buffer.partial == " 20%|##  |"
    assert buffer.feed(b"\r100%|####|\n") == ["100%|####|"]
    assert buffer.partial == ""


def test_colours_stay_and_end_with_their_line() -> None:
    assert shown("\x1b[31mred") == "\x1b[31mred\x1b[0m"
    assert shown("\x1b[2A\x1b[31mred\x1b[K\x1b]0;title\x07") == "\x1b[31mred\x1b[0m"


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    buffer = LineBuffer()
    assert buffer.feed(b"x" * (PARTIAL_MAX_CHARS + 1)) == ["x" * (PARTIAL_MAX_CHARS + 1)]
    for n in range(PARTIAL_MAX_CHARS // 10):
        assert buffer.feed(b"\r%20d" % n) == []
    assert len(buffer._open) <= PARTIAL_MAX_CHARS


# ---------------------------------------------------------------- the footer


@given(
    width=st.integers(1, 250),
    height=st.integers(1, 80),
    slots=st.integers(0, 70),
    name=st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=300),
)
def test_the_footer_fits_any_terminal(width: int, height: int, slots: int, name: str) -> None:
    lines = footer.render(
        job(node("a", *map(running, range(slots))), job=name, waiting="for more workers " * 9), width, height
    )
    assert len(lines) <= max(1, height // 2)
    for line in lines:
        assert "\n" not in line
        assert Text.from_ansi(line).cell_len <= max(8, width - 1)


# ---------------------------------------------------------------- the whole view

ROOT = Path(__file__).parents[2]
_PRELUDE = """
import os, sys, threading
from elasticd.telemetry.liveview import open_view
from tests.telemetry.madeup import job
view = open_view()
"""


def in_terminal(
    code: str, tmp_path: Path, *, columns: int = 80, rows: int = 24, stdout: Path | None = None
) -> bytes:
    """Return what a program writes to a terminal of this size."""
    script = tmp_path / "program.py"
    script.write_text(_PRELUDE + textwrap.dedent(code))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environ = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    out = stdout.open("wb") if stdout else theirs
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=theirs,
        stdout=out,
        stderr=theirs,
        env={**environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)},
    )
    os.close(theirs)
    written = b""
    try:
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # no process has the other end open any more
                break
            if not chunk:
                break
            written += chunk
        assert process.wait(60) == 0, written.decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return written


def screen_of(written: bytes, columns: int = 80, rows: int = 24) -> list[str]:
    screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=1.0)
    pyte.ByteStream(screen).feed(written)
    above = ["".join(line[x].data for x in range(columns)) for line in screen.history.top]
    return [line.rstrip() for line in [*above, *screen.display]]


def test_workers_output_is_whole_and_in_order_and_the_footer_is_gone_at_the_end(tmp_path: Path) -> None:
    written = in_terminal(
        """
        view.write(1, b"before\\n")
        view.show(job())
        def work(name):
            for n in range(300):
                view.write(1, f"{name} {n} ".encode(), source=name)
                view.write(1, b"done\\n", source=name)
                if n % 50 == 0: view.show(job(step=n))
        threads = [threading.Thread(target=work, args=(name,)) for name in "xyz"]
        for t in threads: t.start()
        for t in threads: t.join()
        view.line("a log line")
        print("printed by the agent")
        view.write(2, b"unfinished")
        view.finish("the end")
        """,
        tmp_path,
    )
    lines = [line for line in screen_of(written) if line]
    for name in "xyz":
        assert [line for line in lines if line.startswith(name)] == [f"{name} {n} done" for n in range(300)]
    assert lines[0] == "before"
    assert set(lines[-4:]) == {"a log line", "printed by the agent", "unfinished", "the end"}
    assert lines[-1] == "the end"
    assert len(lines) == 900 + 5


def test_the_footer_stays_below_while_workers_write(tmp_path: Path) -> None:
    written = in_terminal(
        """
        view.show(job())
        for n in range(100):
            view.write(1, b"line %d\\n" % n)
        view.write(2, b"\\r 50%|#####     |", source="bar")
        view.show(job(step=99))
        frame = view._frame
        painted = threading.Event()
        def watched(*args):
            text = frame(*args)
            if "step 99" in text and "50%" in text:
                os.write(2, text.encode())
                os._exit(0)  # as if killed: the screen stays as it was
            return text
        view._frame = watched
        view.show(job(step=99))
        painted.wait(60)
        """,
        tmp_path,
    )
    lines = [line for line in screen_of(written) if line]
    assert lines[99] == "line 99"
    assert lines[100] == " 50%|#####     |"
    assert lines[101].startswith("───")
    assert "world 2" in lines[102] and "step 99" in lines[102]
    assert "slot 0 rank 0 running" in lines[103]
    assert len(lines) <= 106


def test_a_stream_that_is_no_terminal_gets_the_bytes_as_they_came(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    written = in_terminal(
        r"""
        view.show(job())
        view.write(1, b"\x1b[2Araw\r bytes")
        view.finish("the end")
        """,
        tmp_path,
        stdout=out,
    )
    assert out.read_bytes() == b"\x1b[2Araw\r bytes"
    assert b"raw" not in written


def test_long_lines_are_wrapped_by_the_terminal_and_not_cut(tmp_path: Path) -> None:
    written = in_terminal(
        """
        view.show(job())
        view.write(1, b"0123456789" * 13 + b"\\n")
        view.finish("the end")
        """,
        tmp_path,
        columns=40,
    )
    assert [line for line in screen_of(written, 40) if line] == ["0123456789" * 4] * 3 + [
        "0123456789",
        "the end",
    ]


def test_no_thread_is_started_before_there_is_something_to_show(tmp_path: Path) -> None:
    """The agent forks first, and a process that forks should have no threads."""
    in_terminal(
        """
        view.line("early")
        view.write(1, b"early\\n")
        assert view.live
        assert threading.active_count() == 1
        view.close()
        view.close()
        """,
        tmp_path,
    )


@pytest.mark.parametrize(
    ("plain", "environ"),
    [
        (True, {"TERM": "xterm"}),
        (False, {"TERM": "xterm", "NO_COLOR": "1"}),
        (False, {"TERM": "dumb"}),
        (False, {}),
    ],
)
def test_the_live_view_steps_aside_when_asked(
    plain: bool, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(open_view(plain=plain, environ=environ), PlainView)


def test_without_a_terminal_there_is_no_live_view(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    view = open_view(environ={"TERM": "xterm"})
    assert not view.live
    view.write(1, b"half a li")
    view.write(1, b"ne\r\x1b[31m\n")
    view.line("log")
    view.show(job())
    view.finish("end")
    assert tuple(capfdbinary.readouterr()) == (b"half a line\r\x1b[31m\n", b"log\nend\n")


def test_without_a_live_view_a_log_line_does_not_run_into_a_progress_bar(tmp_path: Path) -> None:
    written = in_terminal(
        """
        view = open_view(plain=True)
        view.write(2, b"\\r 50%|#####     |")
        view.line("a log line")
        view.line("another")
        """,
        tmp_path,
    )
    assert [line for line in screen_of(written) if line] == [" 50%|#####     |", "a log line", "another"]
