"""The workers' output: into files with torchrun's layout, and onto the console in whole lines."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from elasticd.core.ports import Assignment
from elasticd.procs import output as outputs
from elasticd.procs.logdest import LogDest, trouble_with
from elasticd.procs.merged_console import WorkerStream
from elasticd.procs.output import Feed, Filtered, Output
from tests.procs.agents import PATIENCE_S, PROGRAMS, ROOT
from tests.procs.conftest import Bench, Recorded

BOTH = "import sys; print('to stdout', flush=True); print('to stderr', file=sys.stderr)"


def _goes_to(dest: LogDest) -> Callable[[int, dict[int, dict[str, str]]], LogDest]:
    return lambda _number, _envs: dest


def test_a_log_that_is_tried_out_loses_nothing_that_is_written_meanwhile(tmp_path: Path) -> None:
    log, line = tmp_path / "stdout.log", b"a line\n"

    def write() -> None:
        with open(log, "ab", buffering=0) as file:
            file.writelines(line for _ in range(2000))

    writing = threading.Thread(target=write)
    writing.start()
    while writing.is_alive():
        assert trouble_with(str(log)) == ""
    assert log.read_bytes() == 2000 * line
    assert os.listdir(tmp_path) == [log.name]


def test_by_default_output_goes_to_the_console_unprefixed_and_into_a_copy(
    bench: Bench, tmp_path: Path
) -> None:
    dest = LogDest(capture_dirs={0: str(tmp_path / "a" / "0")})
    (exit,) = bench.run(BOTH, reify=_goes_to(dest))
    assert bench.console.written == {1: b"to stdout\n", 2: b"to stderr\n"}
    assert (tmp_path / "a" / "0" / "stdout.log").read_text() == "to stdout\n"
    assert (tmp_path / "a" / "0" / "stderr.log").read_text() == "to stderr\n"
    assert exit.log == str(tmp_path / "a" / "0")


def test_a_redirected_stream_goes_to_its_file_only(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "stdout.log"
    out.write_text("from an earlier attempt")
    bench.run(BOTH, reify=_goes_to(LogDest(stdouts={0: str(out)}, capture_dirs={0: str(tmp_path / "c")})))
    assert out.read_text() == "to stdout\n"
    assert bench.console.written == {1: b"", 2: b"to stderr\n"}
    assert not (tmp_path / "c" / "stdout.log").exists()


def test_a_redirected_stream_is_the_workers_own_file(bench: Bench, tmp_path: Path) -> None:
    out = str(tmp_path / "stdout.log")
    bench.run(
        "import os, sys; print(os.readlink('/proc/self/fd/1'))", reify=_goes_to(LogDest(stdouts={0: out}))
    )
    assert Path(out).read_text() == f"{Path(out).resolve()}\n"


def test_a_teed_stream_goes_to_its_file_and_with_a_prefix_to_the_console(
    bench: Bench, tmp_path: Path
) -> None:
    files = {rank: str(tmp_path / f"{rank}.log") for rank in (0, 1)}
    dest = LogDest(stdouts=files, tee_stdouts=files)
    bench.run("import os; print('rank', os.environ['RANK'])", 2, reify=_goes_to(dest), role="trainer")
    assert sorted(bench.console.lines()) == [b"[trainer0]:rank 0", b"[trainer1]:rank 1"]
    assert [Path(files[rank]).read_text() for rank in (0, 1)] == ["rank 0\n", "rank 1\n"]


def test_the_prefix_may_name_role_local_rank_and_rank(bench: Bench, tmp_path: Path) -> None:
    files = {0: str(tmp_path / "0.log")}
    dest = LogDest(stderrs=files, tee_stderrs=files)
    bench.run(BOTH, reify=_goes_to(dest), line_prefix="<${role_name} ${local_rank} ${rank} ${other}>")
    assert bench.console.lines(2) == [b"<default 0 0 ${other}>to stderr"]


def test_a_filter_collects_the_matching_lines_of_teed_streams(bench: Bench, tmp_path: Path) -> None:
    files = {rank: str(tmp_path / f"{rank}.log") for rank in (0, 1)}
    dest = LogDest(stdouts=files, tee_stdouts=files, filtered_stdout=str(tmp_path / "filtered.log"))
    program = "import os; print('loss 1'); print('noise'); print('loss of', os.environ['RANK'], end='')"
    bench.run(program, 2, reify=_goes_to(dest), duplicate_stdout=["loss"])
    lines = sorted((tmp_path / "filtered.log").read_text().splitlines())
    assert lines == ["[default0]:loss 1", "[default0]:loss of 0", "[default1]:loss 1", "[default1]:loss of 1"]


def test_a_filter_goes_on_when_the_first_worker_ends_before_the_second_is_started(
    bench: Bench, tmp_path: Path
) -> None:
    files = {rank: str(tmp_path / f"{rank}.log") for rank in (0, 1)}
    dest = LogDest(stdouts=files, tee_stdouts=files, filtered_stdout=str(tmp_path / "filtered.log"))

    def command(a: Assignment) -> list[str]:
        if a.local_rank == 0:
            return ["/no/such/program"]
        bench.wait()
        return ["/bin/echo", "loss 1"]

    bench.start(bench.procs(command, reify=_goes_to(dest), duplicate_stdout=["loss"], heartbeat=False), 2)
    bench.wait(2)
    assert (tmp_path / "filtered.log").read_text() == "[default1]:loss 1\n"


def test_a_filter_keeps_no_more_than_so_much_of_a_line_that_never_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    longest = 4096
    monkeypatch.setattr(outputs, "_LINE_BYTES_MAX", longest)
    kept: list[int] = []

    class Watching(Filtered):
        def write(self, lines: Sequence[bytes], prefix: bytes) -> None:
            kept.extend(map(len, lines))
            super().write(lines, prefix)

    output = Output(Recorded())
    target, feed = output.open(1, prefix=b"", copies=[], terminal=False)
    feed.filtered = Watching(str(tmp_path / "filtered.log"), ["loss"])
    output.carry([feed])
    for _ in range(20):
        os.write(target, b"." * longest)
    os.write(target, b"loss\nnoise\nloss 1")
    os.close(target)
    assert feed.drained.wait(PATIENCE_S)
    output.close()
    assert sum(kept) == 20 * longest + len(b"lossnoiseloss 1")
    assert max(kept) <= longest + outputs._CHUNK_BYTES
    assert (tmp_path / "filtered.log").read_bytes().endswith(b"loss\nloss 1\n")


def test_output_is_passed_on_to_the_end_however_many_files_are_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    taken: list[int] = []
    try:
        while not taken or taken[-1] < 1024:  # select(2) takes no larger numbers
            taken.append(os.dup(2))
        console = Recorded()
        output = Output(console)
        target, feed = output.open(1, prefix=b"", copies=[], terminal=False)
        taken.append(target)
        os.write(target, b"a line\n")
        output.carry([feed])
        output.close(60.0)
        assert feed.drained.is_set()
        assert console.written[1] == b"a line\n"
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_workers_never_share_a_line(bench: Bench) -> None:
    program = """
import os, random, sys
me = os.environ["RANK"]
for i in range(300):
    text = (me * random.randint(1, 300) + "\\n").encode()
    cut = random.randint(0, len(text))
    os.write(1, text[:cut])
    os.write(1, text[cut:])
"""
    bench.run(program, 8)
    lines = bench.console.lines()
    assert all(len(set(line)) <= 1 for line in lines)
    assert len([line for line in lines if line]) >= 8 * 300


def test_a_prompt_without_a_line_end_is_shown(bench: Bench) -> None:
    procs = bench.procs(["/bin/sh", "-c", "printf 'ready? '; sleep 1000"])
    bench.start(procs)
    bench.console.wait_for(b"ready? ")


def test_the_last_output_has_arrived_when_the_exit_is_reported(bench: Bench) -> None:
    class Slow(Recorded):
        def write(self, stream: int, data: bytes) -> None:
            threading.Event().wait(0.02)
            super().write(stream, data)

    slow = Slow()
    bench.run("import os; os.write(1, b'x' * 50_000); os._exit(1)", output=Output(slow))
    assert len(slow.written[1]) == 50_000


def test_a_console_that_is_stuck_does_not_hold_up_exits(bench: Bench) -> None:
    release = threading.Event()

    class Stuck(Recorded):
        def write(self, stream: int, data: bytes) -> None:
            release.wait(60.0)

    try:
        exits = bench.run("print('hello'); raise SystemExit(3)", 2, output=Output(Stuck()))
        assert [exit.code for exit in exits] == [3, 3]
        assert not release.is_set()
    finally:
        release.set()


def test_where_the_console_is_a_terminal_workers_have_one(bench: Bench, tmp_path: Path) -> None:
    bench.console.terminal = True
    dest = LogDest(stderrs={0: str(tmp_path / "e")}, tee_stderrs={0: str(tmp_path / "e")})
    bench.run("import os; print(os.isatty(1), os.isatty(2))", reify=_goes_to(dest))
    assert bench.console.lines() == [b"True False"], "a tee'd stream is a file to torchrun's workers"
    assert b"\r" not in bench.console.written[1]


def test_a_workers_terminal_has_the_consoles_size_and_follows_it(tmp_path: Path) -> None:
    program = """
import os, signal, sys, time
last = None
while True:
    size = os.get_terminal_size(1)
    if size != last:
        print("size", size.columns, size.lines, flush=True)
        last = size
    time.sleep(0.01)
"""
    asked = {"folder": str(tmp_path), "command": [sys.executable, "-c", program], "workers": 1}
    master, slave = os.openpty()
    _resize(slave, 123, 45)
    agent = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "agent.py"), json.dumps(asked)],
        stdout=slave,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    os.close(slave)
    try:
        _read_until(master, b"size 123 45\r\n")
        _resize(master, 80, 24)
        os.kill(agent.pid, signal.SIGWINCH)
        _read_until(master, b"size 80 24\r\n")
    finally:
        agent.kill()
        agent.wait()
        os.close(master)


def _resize(fd: int, columns: int, lines: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def _read_until(fd: int, text: bytes) -> None:
    seen = b""
    while text not in seen:
        seen += os.read(fd, 4096)


def test_what_a_worker_printed_is_drained_even_if_the_console_was_stuck_since_it_started() -> None:
    stuck, free = threading.Event(), threading.Event()

    class Stuck(Recorded):
        def write(self, stream: int, data: bytes) -> None:
            stuck.set()
            assert free.wait(PATIENCE_S)

    output = Output(Stuck())
    first, one = output.open(1, prefix=b"", copies=(), terminal=False)
    second, other = output.open(2, prefix=b"", copies=(), terminal=False)
    output.carry([one])
    os.write(first, b"a line\n")
    assert stuck.wait(PATIENCE_S)
    tails = []

    class Drained(threading.Event):
        def set(self) -> None:
            tails.append(other.tail)
            super().set()

    other.drained = Drained()
    output.carry([other])
    os.write(second, b"its last words\n")
    output.drain([other], 0.0)
    free.set()
    assert other.drained.wait(PATIENCE_S)
    assert tails == [b"its last words\n"]
    os.close(first)
    os.close(second)
    output.close()


def test_a_process_that_prints_without_end_does_not_hold_up_other_output() -> None:
    output = Output(Recorded())
    target, feed = output.open(1, prefix=b"", copies=(), terminal=False)
    endless = Feed(1, os.eventfd(2**31, os.EFD_SEMAPHORE), WorkerStream(b""), [])
    output.carry([endless, feed])
    output.drain([endless], 0.0)
    os.write(target, b"a line\n")
    assert endless.drained.wait(PATIENCE_S)
    output.drain([feed], PATIENCE_S)
    assert feed.tail == b"a line\n"
    os.close(target)
    output.close()


def test_an_unfinished_last_line_is_filtered_as_well_while_the_stream_is_still_open(tmp_path: Path) -> None:
    output = Output(Recorded())
    target, feed = output.open(1, prefix=b"", copies=(), terminal=False)
    feed.filtered = Filtered(str(tmp_path / "filtered.log"), ["loss"])
    output.carry([feed])
    os.write(target, b"noise\nloss 1")
    output.drain([feed], PATIENCE_S)
    assert (tmp_path / "filtered.log").read_bytes() == b"loss 1\n"
    os.close(target)
    output.close()
