"""Several processes write to one console."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticd.procs.merged_console import MergedConsole, WorkerStream


def test_only_whole_lines_are_shown_at_once() -> None:
    screen, a = MergedConsole(terminal=False), WorkerStream()
    assert screen.feed(a, b"one\ntw") == b"one\n"
    assert screen.feed(a, b"o\n") == b"two\n"


def test_a_partial_line_is_shown_when_it_is_flushed_and_goes_on_where_it_was() -> None:
    screen, a = MergedConsole(terminal=False), WorkerStream()
    assert screen.feed(a, b"name: ") == b""
    assert screen.flush(a) == b"name: "
    assert screen.feed(a, b"Ada\n") == b"Ada\n"


def test_a_line_of_another_does_not_go_on_a_partial_line() -> None:
    screen, a, b = MergedConsole(terminal=False), WorkerStream(), WorkerStream()
    screen.feed(a, b"half")
    screen.flush(a)
    assert screen.feed(b, b"whole\n") == b"\nwhole\n"
    assert screen.feed(a, b"rest\n") == b"rest\n"


def test_on_a_terminal_a_line_of_another_takes_the_place_of_a_progress_bar() -> None:
    screen, a, b = MergedConsole(terminal=True), WorkerStream(), WorkerStream()
    screen.feed(a, b"\r10%|#")
    assert screen.flush(a) == b"\r10%|#"
    assert screen.feed(b, b"whole\n") == b"\r\x1b[Kwhole\n"
    screen.feed(a, b"\r20%|##")
    assert screen.flush(a) == b"\r20%|##"


def test_prefixes_begin_each_line_once() -> None:
    screen, a = MergedConsole(terminal=False), WorkerStream(b"[w0]:")
    assert screen.feed(a, b"one\n\ntwo\nth") == b"[w0]:one\n[w0]:\n[w0]:two\n"
    assert screen.flush(a) == b"[w0]:th"
    assert screen.feed(a, b"ree\nfour\n") == b"ree\n[w0]:four\n"


def test_a_progress_bar_keeps_its_prefix_when_it_is_drawn_again() -> None:
    screen, a = MergedConsole(terminal=True), WorkerStream(b"[w0]:")
    screen.feed(a, b"\r10%")
    assert screen.flush(a) == b"\r[w0]:10%"
    assert screen.feed(a, b"\r20%\r\n") == b"\r[w0]:20%\r\n"


def test_a_line_without_end_does_not_grow_for_ever() -> None:
    screen, a = MergedConsole(terminal=False), WorkerStream()
    assert len(screen.feed(a, b"x" * 70_000)) == 70_000


CHUNKS = st.lists(st.tuples(st.integers(0, 2), st.text("ab\n", max_size=6), st.booleans()), max_size=40)


@given(CHUNKS)
def test_no_line_has_two_authors_and_nothing_is_lost(chunks: list[tuple[int, str, bool]]) -> None:
    screen = MergedConsole(terminal=False)
    authors = [WorkerStream() for _ in range(3)]
    out, given = b"", ["", "", ""]
    for who, text, flush in chunks:
        named = "".join(c if c == "\n" else f"{who}" for c in text)  # each process writes only its own digit
        given[who] += named
        out += screen.feed(authors[who], named.encode())
        if flush:
            out += screen.flush(authors[who])
    for author in authors:
        out += screen.flush(author)
    lines = out.decode().split("\n")
    assert all(len(set(line)) <= 1 for line in lines)
    for who in range(3):
        assert "".join(line for line in lines if str(who) in line) == given[who].replace("\n", "")
