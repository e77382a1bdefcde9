"""Faults before the command line is read, or while the agent starts: one sentence each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = [sys.executable, "-m", "elasticd.cli.begin"]


def said(*argv: str, cwd: Path | None = None, **env: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [*BEGIN, *argv], cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=100
    )
    return done.returncode, done.stderr.splitlines()


@pytest.fixture
def job(tmp_path: Path) -> str:
    script = tmp_path / "job.py"
    script.write_text("print('hello')\n")
    return str(script)


def test_python_m_elasticd_is_the_command() -> None:
    argv = [sys.executable, "-m", "elasticd", "run", "--nonsense", "job.py"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "--nonsense" in done.stderr


@pytest.mark.parametrize("module", ["json", "logging"])
def test_a_module_that_shadows_one_of_pythons_own_is_named(module: str, job: str, tmp_path: Path) -> None:
    shadow = tmp_path / "shadow" / f"{module}.py"
    shadow.parent.mkdir()
    shadow.write_text("mine = 1\n")
    code, lines = said("run", "--plain", job, PYTHONPATH=str(shadow.parent))
    assert code == 2 and len(lines) == 1, lines
    assert str(shadow) in lines[0] and "PYTHONPATH" in lines[0] and f"module {module} " in lines[0]


def test_an_error_of_our_own_is_not_blamed_on_what_is_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    program = (
        "import sys, elasticd.cli.begin as begin, elasticd.cli.main as main\n"
        "main.main = lambda: 1 / 0\n"
        "begin.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("argv", [("run", "--plain", "JOB"), ("ckpt", "ls", "x"), ("doctor",)])
def test_a_removed_working_folder_is_a_clear_error(argv: tuple[str, ...], job: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = [*BEGIN, *(job if word == "JOB" else word for word in argv)]
    program = f"import os, sys\nos.rmdir(os.getcwd())\nos.execv(sys.executable, {command})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=gone,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines() == [
        "elasticd: the working directory no longer exists: change to another."
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_who_may_not_read_python_gets_a_sentence(job: str, tmp_path: Path) -> None:
    """As in a program that calls ``setuid`` and then starts elasticd."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o700)
    program = (
        "import os, sys\n"
        f"os.symlink(sys.executable, {str(locked / 'python')!r})\n"
        f"sys.executable = {str(locked / 'python')!r}\n"
        "import elasticd.cli.begin as begin\n"
        "os.setgid(65534); os.setuid(65534)\n"
        f"sys.argv = ['elasticd', 'run', '--plain', {job!r}]\n"
        # an import that fails, as that of a file that cannot be read
        "sys.modules['elasticd.cli.main'] = None\n"
        "begin.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "user 65534 may not" in done.stderr


# Where the command is when the signal comes: at the import of these modules.
MOMENTS = {
    "at once": "elasticd.cli.main",
    "as the agent is imported": "elasticd.daemon.run_agent",
    "in the agent, as it looks for GPUs": "pynvml",
}


@pytest.mark.parametrize(
    ("moment", "number"), [("at once", signal.SIGINT), *((moment, signal.SIGTERM) for moment in MOMENTS)]
)
def test_a_signal_while_it_starts_is_one_line(
    moment: str, number: signal.Signals, job: str, tmp_path: Path
) -> None:
    """A finder of modules sends the signal when Python looks for the named module."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {MOMENTS[moment]!r} and 'elasticd.cli.begin' in sys.orig_argv:\n"
        f"            os.kill(os.getpid(), {number})\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    last_words = tmp_path / "last words"
    code, lines = said(
        "run",
        "--plain",
        f"--termination-log={last_words}",
        job,
        PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[2]}",
        XDG_STATE_HOME=str(tmp_path),
        XDG_RUNTIME_DIR=str(tmp_path),
    )
    assert code == 128 + number
    people = [line for line in lines if not line.startswith("{")]
    if moment == "in the agent, as it looks for GPUs":  # by then the agent runs, and leaves as agents do
        assert "drained" in people[0]
    else:
        assert people == [f"elasticd: stopped by {number.name} before the job began."]
    if moment.startswith("as the agent"):
        assert number.name in last_words.read_text()
