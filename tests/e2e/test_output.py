"""What people see of workers' output: on the terminal, and in files laid out as torchrun's."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from fcntl import ioctl
from pathlib import Path

import pyte
import pytest

from tests.e2e.harness import ELASTICD, PATIENCE_S, Cluster
from tests.e2e.stage import Player, Script


def speak(player: Player) -> Script:
    """Print the worker's name on both streams, then make a step and end."""
    text, error_text = f"out of rank {player.rank}\n", f"err of rank {player.rank}\n"
    return Script(steps=1, orders=({"do": "print", "text": text, "error_text": error_text},))


def test_tee_prefixes_each_line_with_its_worker_and_keeps_files_where_torchrun_does(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.limits = (2, 2)
    cluster.direct(speak)
    logs = tmp_path / "logs"
    (a,) = cluster.start("a", slots=2, options=[f"--log-dir={logs}", "-t", "3", "--role", "trainer"])
    assert a.end() == 0
    assert sorted(a.out) == ["[trainer0]:out of rank 0", "[trainer1]:out of rank 1"]
    assert sorted(t for t in a.text if "rank" in t) == [
        "[trainer0]:err of rank 0",
        "[trainer1]:err of rank 1",
    ]
    (run,) = logs.iterdir()
    assert run.name.startswith(f"{cluster.job}_")
    found = {str(p.relative_to(run)): p.read_text() for p in run.rglob("*.log")}
    assert found == {
        f"attempt_0/{rank}/{stream}.log": f"{stream[3:]} of rank {rank}\n"
        for rank in (0, 1)
        for stream in ("stdout", "stderr")
    }


def test_redirected_output_is_in_files_alone_a_folder_for_each_round(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.limits = (2, 2)
    wrong = {"do": "raise", "text": "once"}

    def direct(player: Player) -> Script:
        first = player.round == 1
        orders = (*speak(player).orders, *([wrong] if first and player.rank == 1 else []))
        return Script(steps=None if first else 1, orders=orders)

    cluster.direct(direct)
    logs = tmp_path / "logs"
    (a,) = cluster.start("a", slots=2, options=[f"--log-dir={logs}", "-r", "3"])
    assert a.end() == 0
    assert a.out == []
    assert not [t for t in a.text if "of rank" in t or "once" in t]
    (run,) = logs.iterdir()
    assert {p.name for p in run.iterdir()} == {"attempt_0", "attempt_1", "course.jsonl", "events.jsonl"}
    assert (run / "attempt_1" / "0" / "stdout.log").read_text() == "out of rank 0\n"
    assert "RuntimeError: once" in (run / "attempt_0" / "1" / "stderr.log").read_text()


def test_without_either_output_passes_as_it_came(cluster: Cluster) -> None:
    cluster.limits = (2, 2)
    cluster.direct(speak)
    (a,) = cluster.start("a", slots=2)
    assert a.end() == 0
    assert sorted(a.out) == ["out of rank 0", "out of rank 1"]


class Terminal:
    """A pseudo-terminal that keeps all that was written to it."""

    def __init__(self, rows: int, columns: int) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=1.0)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        self._ours, self.theirs = pty.openpty()
        ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # the last process that had the terminal open has ended
                return
            self.written += data
            self._stream.feed(data)

    def close(self) -> None:
        """Close the terminal, once no process writes to it any more."""
        self._reader.join(PATIENCE_S)
        os.close(self._ours)

    @property
    def lines(self) -> list[str]:
        """Return the lines on the screen, after the lines that have scrolled away."""
        columns = self.screen.columns
        above = ["".join(line[x].data for x in range(columns)) for line in self.screen.history.top]
        return [line.rstrip() for line in (*above, *self.screen.display)]


def test_the_live_view_leaves_every_line_of_the_workers_whole(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text(
        "import os, sys, time\n"
        "for i in range(200):\n"
        "    print(f'<{os.environ[\"RANK\"]}:{i}:' + 'x' * 40 + '>', flush=True)\n"
        "    time.sleep(0.01)\n"
    )
    terminal = Terminal(24, 100)
    argv = [sys.executable, "-m", "elasticd.cli.main", "run", "--min=2", "--max=2", "--slots=2"]
    argv += [*cluster.etcd_options, f"--job={cluster.job}", "--node=a", str(script)]
    agent = subprocess.Popen(
        argv,
        env=cluster.environment("a") | {"TERM": "xterm-256color"},
        stdin=terminal.theirs,
        stdout=terminal.theirs,
        stderr=terminal.theirs,
        start_new_session=True,
    )
    os.close(terminal.theirs)
    try:
        assert agent.wait(PATIENCE_S) == 0
    finally:
        if agent.poll() is None:
            agent.send_signal(signal.SIGKILL)
            agent.wait()
    terminal.close()
    assert b"\x1b[1A\x1b[2K" in terminal.written, "there was a live view"
    whole = [line for line in terminal.lines if re.fullmatch(r"<[01]:\d+:x{40}>", line)]
    assert len(whole) == len(set(whole)) == 400
    assert [line for line in terminal.lines if "x" * 3 in line and line not in whole] == []
    assert any("finished" in line for line in terminal.lines)
    assert terminal.lines.index(whole[-1]) < next(
        i for i, line in enumerate(terminal.lines) if f"{cluster.job} finished" in line
    )


ON_A_SMALL_DISK = 'mount -t tmpfs -o size=1m none "$1" && shift && exec "$@"'
FILLS_IT = "for _ in range(300): print('x' * 10_000, flush=True)\nprint('and so it ended')"


@pytest.mark.slow
def test_a_log_disk_that_gets_full_is_its_nodes_fault_and_the_job_goes_on_without(
    tmp_path: Path,
) -> None:
    own_mounts = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*own_mounts, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no disk of its own can be had here")
    logs, job = tmp_path / "logs", tmp_path / "job.py"
    logs.mkdir()
    job.write_text(FILLS_IT)
    run = [ELASTICD, "run", "--plain", "--log-format=json", "--log-dir", str(logs), "--redirects=3", str(job)]
    ended = subprocess.run(
        [*own_mounts, "sh", "-c", ON_A_SMALL_DISK, "sh", str(logs), *run],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.endswith("and so it ended\n")
    events = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    (failed,) = (e for e in events if e["event"] == "worker.ended" and e["code"])
    assert failed["message"].startswith("the node is at fault, not the worker: ")
    assert failed["message"].endswith(".log cannot be written: No space left on device")
    assert [e["cause"] for e in events if e["event"] == "round.closing"] == ["node_fault"]
    assert [e["slot"] for e in events if e["event"] == "log.not_kept"] == [0]
    assert not [e for e in events if e["event"] == "failure.charged"]
