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
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.text import Text

from elasticd.core.facts import Limits
from elasticd.telemetry import footer
from elasticd.telemetry.lines import PARTIAL_MAX_CHARS, LineBuffer, clean, cleaned, shown
from elasticd.telemetry.nodenames import told_apart
from elasticd.telemetry.snapshot import Event, SlotLine, SlotState, Snapshot
from elasticd.telemetry.view import PlainView, open_view


def snapshot(slot_count: int = 2, **more: object) -> Snapshot:
    values: dict[str, object] = {
        "job": "train_gpt-3fa2",
        "node": "a",
        "round": 3,
        "phase": "live",
        "world_size": slot_count,
        "limits": Limits(1, 8),
        "slots": tuple(SlotLine("a", n, SlotState.RUNNING, n, 100 + n, 42, 3.5) for n in range(slot_count)),
        "restarts": 1,
        "budget_left": 9,
        "events": (Event(0.0, "round 3 formed"),),
    }
    return Snapshot(**{**values, **more})  # type: ignore[arg-type]


# ---------------------------------------------------------------- lines


@settings(deadline=None)
@given(st.lists(st.binary(max_size=20), max_size=10))
def test_how_output_is_cut_into_chunks_changes_nothing(chunks: list[bytes]) -> None:
    pieces, whole = LineBuffer(), LineBuffer()
    lines = [line for chunk in chunks for line in pieces.feed(chunk)]
    assert lines == whole.feed(b"".join(chunks))
    assert pieces.close() == whole.close()


@settings(deadline=None)
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
    dirty = snapshot(job="a\x1b[2J", events=(Event(0.0, "b\x1b]0;x\x07"),))
    assert cleaned(dirty) == snapshot(job="a", events=(Event(0.0, "b"),))
    tidy = snapshot()
    assert cleaned(tidy) is tidy


def test_nothing_in_a_snapshot_reaches_the_terminal_but_as_text() -> None:
    dirty = snapshot(job=EVIL, waiting=EVIL, phase=EVIL, events=(Event(0.0, EVIL),))
    lines = footer.render(dirty, 120, 60)
    assert not re.search(r"\x1b[^\[]|\x1b\[[^m]*[A-Za-ln-z]|[\x00-\x08\x0a-\x1a\x7f-\x9f]", "".join(lines))
    assert "words" in "".join(lines)


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08words"


def test_of_a_progress_bar_the_latest_state_is_shown() -> None:
    buffer = LineBuffer()
    assert buffer.feed(b"\r 10%|#   |\r 20%|##  |") == []
    assert buffer.partial == " 20%|##  |"
    assert buffer.feed(b"\r100%|####|\n") == ["100%|####|"]
    assert buffer.partial == ""


def test_colours_stay_and_end_with_their_line() -> None:
    assert shown("\x1b[31mred") == "\x1b[31mred\x1b[0m"
    assert shown("\x1b[2A\x1b[31mred\x1b[K\x1b]0;title\x07") == "\x1b[31mred\x1b[0m"
    assert shown("\x1b[31mred", colors=False) == "red"


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    buffer = LineBuffer()
    assert buffer.feed(b"x" * (PARTIAL_MAX_CHARS + 1)) == ["x" * (PARTIAL_MAX_CHARS + 1)]
    for n in range(PARTIAL_MAX_CHARS // 10):
        assert buffer.feed(b"\r%20d" % n) == []
    assert len(buffer._open) <= PARTIAL_MAX_CHARS


# ---------------------------------------------------------------- the footer


@settings(deadline=None)
@given(
    width=st.integers(1, 250),
    height=st.integers(1, 80),
    slots=st.integers(0, 70),
    job=st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=300),
)
def test_the_footer_fits_any_terminal(width: int, height: int, slots: int, job: str) -> None:
    lines = footer.render(snapshot(slots, job=job, waiting="for more workers " * 9), width, height)
    assert len(lines) <= max(1, height // 2)
    for line in lines:
        assert "\n" not in line
        assert Text.from_ansi(line).cell_len <= max(8, width - 1)


def text_of(lines: list[str]) -> str:
    return "\n".join(Text.from_ansi(line).plain for line in lines)


def test_a_wide_terminal_shows_everything() -> None:
    text = text_of(footer.render(snapshot(), 120, 40))
    for part in (
        "train_gpt-3fa2",
        "world 2",
        "(1..8)",
        "round 3",
        "step 42",
        "3.5 steps/s",
        "restarts 1",
        "(9 left)",
    ):
        assert part in text
    assert "slot 1 rank 1 running 42 3.5/s" in text and "round 3 formed" in text


def test_a_narrow_terminal_shows_the_world_first() -> None:
    text = text_of(footer.render(snapshot(), 30, 10))
    assert "world 2" in text and "restarts" not in text


def test_nodes_are_told_apart_however_alike_their_names_are() -> None:
    nodes = {f"gpu-worker-{n:03d}.training.cluster.example" for n in range(12)}
    assert set(told_apart(nodes).values()) == {f"gpu-worker-{n:03d}" for n in range(12)}
    alike = {f"a-pool-of-{n}-machines-of-the-third-kind.example" for n in range(12)}
    names = told_apart(alike)
    assert len(set(names.values())) == 12 and max(map(len, names.values())) < 30
    for plain in ({"10.0.0.1", "11.0.0.1"}, {"a.here", "a.there"}, {"a"}):
        assert told_apart(plain) == {name: name for name in plain}, "the first part alone says nothing"
    slots = tuple(SlotLine(node, 3, SlotState.RUNNING, 5) for node in sorted(alike))
    text = text_of(footer.render(snapshot(0, slots=slots), 200, 60))
    assert len(set(re.findall(r"(\S+)/3 rank 5", text))) == 12


def test_what_happened_is_told_to_its_end_beside_many_slots_where_there_is_a_whole_screen() -> None:
    slots = tuple(SlotLine("a", n, SlotState.RUNNING, n) for n in range(500))
    hang = "rank 2 on node b is in train_gpt.py:188, data loading; the other 63 wait for it in all_reduce"
    crowded = snapshot(0, slots=slots, events=(Event(0.0, hang),))
    text = text_of(footer.render(crowded, 80, 48, rows_max=23, fold=True))
    assert hang in " ".join(text.split()) and len(text.splitlines()) <= 24


def test_of_many_slots_those_in_trouble_are_shown() -> None:
    slots = [SlotLine("a", n, SlotState.RUNNING, n) for n in range(500)]
    slots[321] = SlotLine("a", 321, SlotState.FAILED, 321)
    text = text_of(footer.render(snapshot(0, slots=tuple(slots)), 80, 24))
    assert "slot 321 rank 321 failed" in text and "more slots" in text


def test_what_the_job_waits_for_is_shown() -> None:
    assert "waiting for 1 more worker" in text_of(
        footer.render(snapshot(waiting="waiting for 1 more worker"), 80, 24)
    )


# ---------------------------------------------------------------- the whole view

_PRELUDE = """
import os, sys, threading
from tests_prelude import snapshot
from elasticd.telemetry.view import open_view
view = open_view()
"""


def in_terminal(
    code: str, tmp_path: Path, *, columns: int = 80, rows: int = 24, stdout: Path | None = None
) -> bytes:
    """What a program writes to a terminal of this size."""
    (tmp_path / "tests_prelude.py").write_text(
        "from elasticd.core.facts import Limits\n"
        "from elasticd.telemetry.snapshot import *\n"
        "def snapshot(step=42):\n"
        "    slots = tuple(SlotLine('a', n, SlotState.RUNNING, n, 100, step, 3.5) for n in range(2))\n"
        "    return Snapshot('train', 'a', 3, 'live', 2, Limits(1, 8), slots, 1, 9, '', ())\n"
    )
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
        env={**environ, "TERM": "xterm-256color", "PYTHONPATH": str(tmp_path)},
    )
    os.close(theirs)
    written = b""
    try:
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # nobody holds the other end any more
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
        view.show(snapshot())
        def work(name):
            for n in range(300):
                view.write(1, f"{name} {n} ".encode(), source=name)
                view.write(1, b"done\\n", source=name)
                if n % 50 == 0: view.show(snapshot(n))
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
        view.show(snapshot())
        for n in range(100):
            view.write(1, b"line %d\\n" % n)
        view.write(2, b"\\r 50%|#####     |", source="bar")
        view.show(snapshot(99))
        frame = view._frame
        painted = threading.Event()
        def watched(*args):
            text = frame(*args)
            if "step 99" in text and "50%" in text:
                os.write(2, text.encode())
                os._exit(0)  # as if killed: the screen stays as it was
            return text
        view._frame = watched
        view.show(snapshot(99))
        painted.wait(60)
        """,
        tmp_path,
    )
    lines = [line for line in screen_of(written) if line]
    assert lines[99] == "line 99"
    assert lines[100] == " 50%|#####     |"
    assert lines[101].startswith("───")
    assert "world 2" in lines[102] and "step 99" in lines[102]
    assert "slot 0 rank 0 running 99" in lines[103]
    assert len(lines) <= 106


def test_a_stream_that_is_no_terminal_gets_the_bytes_as_they_came(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    written = in_terminal(
        r"""
        view.show(snapshot())
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
        view.show(snapshot())
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
    """The agent forks first, and a fork wants no threads."""
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
    view.show(snapshot())
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
