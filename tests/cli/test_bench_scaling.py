"""``elasticd bench scaling`` with real workers: jobs with a fault on purpose, and bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.cli.main import _exit_code
from elasticd.procs.linux import descendants, started_at

JOB = str(Path(__file__).parent / "programs" / "scaling_job.py")
PATIENCE_S = 240.0
SLEEPS = """import os, sys, time
with open(sys.argv[1], "w") as told:
    told.write(str(os.getpid()))
time.sleep(1000)
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A folder in which launchers leave no temporary files."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    yield tmp_path
    assert list(temporary.glob("*elastic*")) == []


def start(here: Path, *argv: str, core: int | None = None) -> subprocess.Popen[str]:
    """Start the command. ``core``: the only processor core for the command and its workers."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if core is not None:
            os.sched_setaffinity(0, {core})

    env = {"TMPDIR": str(here / "t"), "XDG_RUNTIME_DIR": str(here), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "elasticd", "bench", "scaling", *argv],
        env={**os.environ, **env, "ELASTICD_ETCD": "http://no.such.host:1"},  # of other runs
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,  # noqa: PLW1509
    )


def measured(here: Path, *argv: str, core: int | None = None) -> tuple[dict[str, Any], str]:
    """Return the measurement, and the command's output."""
    process = start(here, "--output", "found.json", *argv, core=core)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads((here / "found.json").read_text())
    return found, out


def refused(here: Path, *argv: str) -> tuple[int, str]:
    """Return the exit code and the one sentence."""
    process = start(here, *argv)
    out, err = process.communicate(timeout=PATIENCE_S)
    said = [line for line in err.splitlines() if not line.endswith(" ...")]
    assert (out, len(said)) == ("", 1), err
    return process.returncode, said[0]


@pytest.mark.slow
def test_a_slow_worker_is_named(here: Path) -> None:
    found, printed = measured(here, "--world", "2", "--steps", "24", "--no-torchrun", JOB, "slow_worker")
    (run,) = found["runs"]
    assert (run["launcher"], run["workers"]) == ("elasticd run", 2) and run["steps"] >= 24
    assert run["slow_ranks"]["1"] > 1.5
    assert run["step"]["waiting_s"] > 0.01 and run["step"]["step_s"] > 0.06
    assert "slow_worker" in [piece["fault"] for piece in found["advice"]]
    assert "- rank 1 needs " in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "worlds"),
    [
        ("loader", "2"),
        ("small_batch", "2"),
        ("communication", "2"),
        ("uneven_work", "2"),
        ("slower_compute", "1,2"),
    ],
)
def test_a_fault_of_a_job_is_named(fault: str, worlds: str, here: Path) -> None:
    found, _ = measured(here, "--world", worlds, "--steps", "40", "--no-torchrun", JOB, fault)
    assert fault in [piece["fault"] for piece in found["advice"]], found


@pytest.mark.slow
def test_a_global_batch_that_is_small_for_more_workers_is_named(here: Path) -> None:
    found, _ = measured(here, "--world", "1,2", "--steps", "40", "--no-torchrun", JOB, "global_batch")
    assert "small_batch" in [piece["fault"] for piece in found["advice"]], found
    alone, together = found["runs"]
    assert together["efficiency"] == pytest.approx(together["speed_up"] / 2)
    assert together["speed_up"] == pytest.approx(together["throughput"] / alone["throughput"])


@pytest.mark.slow
def test_a_measurement_of_workers_that_share_a_core_advises_no_cpu(here: Path) -> None:
    core = min(os.sched_getaffinity(0))
    found, _ = measured(here, "--world", "2", "--steps", "40", "--no-torchrun", JOB, "no_cpu", core=core)
    assert "no_cpu" in [piece["fault"] for piece in found["advice"]], found


@pytest.mark.slow
def test_torchrun_is_measured_alike(here: Path) -> None:
    found, printed = measured(here, "--world", "1,2", "--steps", "40", JOB, "slow_worker")
    runs = [(run["workers"], run["launcher"]) for run in found["runs"]]
    assert runs == [(w, launcher) for w in (1, 2) for launcher in ("elasticd run", "torchrun")]
    assert [list(run["slow_ranks"]) for run in found["runs"]] == [[], [], ["1"], ["1"]]
    assert found["unit"] == "samples/s"
    assert "2 torchrun" in printed


@pytest.mark.slow
def test_a_script_that_ends_early_is_measured_if_its_steps_suffice(here: Path) -> None:
    found, _ = measured(here, "--world", "1", "--steps", "100000", "--no-torchrun", JOB, "none", "300")
    assert 100 < found["runs"][0]["steps"] < 300
    code, sentence = refused(here, "--world", "1", "--no-torchrun", JOB, "none", "20")
    assert code == 2 and "after 20 steps, which are too few to measure" in sentence


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--world 2,a job.py", "--world 2,a is no list of numbers of workers, such as 1,2,4."),
        ("--world , job.py", "--world , is no list of numbers of workers"),
        ("--world 0,1 job.py", "--world 0,1 has a world without a worker."),
        ("--world 99999999999 job.py", "has more than the 1024 workers of one machine."),
        ("--steps 3 job.py", "--steps 3 is less than 12."),
        ("--seconds soon job.py", "--seconds soon is not a number of seconds."),
        ("--world 1", "Missing argument 'SCRIPT'. See `elasticd bench scaling --help`."),
        ("nowhere.py", "the script nowhere.py does not exist."),
        ("job.toml", "job.toml is a job file: give the script that it names, and its arguments."),
        ("-m nowhere", "there is no module named nowhere."),
        ("--output no/file job.py", "no/file cannot be written: there is no folder no."),
    ],
)
def test_bad_input_is_one_sentence(
    argv: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert _exit_code(["bench", "scaling", *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and says in err


def test_a_script_that_fails_is_one_sentence_with_its_error(here: Path) -> None:
    (here / "job.py").write_text("raise ValueError('this script fails')")
    assert refused(here, "--world", "2", "job.py") == (
        1,
        "elasticd: elasticd run with 2 workers failed (exit code 1): ValueError: this script fails.",
    )


def test_a_script_without_a_step_is_one_sentence(here: Path) -> None:
    (here / "job.py").write_text("print('nothing')")
    code, sentence = refused(here, "--world", "1", "job.py")
    assert code == 2
    assert "has ended under elasticd run with 1 worker, and no step was seen" in sentence


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_of_it(number: signal.Signals, code: int, here: Path) -> None:
    (here / "job.py").write_text(SLEEPS)
    os.mkfifo(here / "told")
    process = start(here, "--world", "1", "job.py", "told")
    worker = int((here / "told").read_text())
    below = {pid: started_at(pid) for pid in descendants(process.pid)}
    assert worker in below
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err.strip()) == (code, "elasticd run, 1 worker ...")
    assert not [pid for pid, began in below.items() if began and started_at(pid) == began]


def test_a_script_that_never_makes_a_step_is_ended(here: Path) -> None:
    (here / "job.py").write_text(SLEEPS)
    code, sentence = refused(here, "--world", "1", "--patience", "3", "job.py", "told")
    assert code == 2 and "has made no step for 3 s under elasticd run with 1 worker" in sentence
