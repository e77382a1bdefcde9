"""Scripts in the style of the public tutorials, and scripts that are parts of packages."""

import json
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from .conftest import PATIENCE_S, PROGRAMS, Launcher


def alone(program: str, *arguments: str) -> str:
    """Return the output of the script under plain python, without a launcher."""
    command = [sys.executable, str(PROGRAMS / program), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_the_tutorials_snapshots_carry_a_killed_job_to_the_same_weights(launcher: Launcher) -> None:
    whole = launcher.run(PROGRAMS / "tutorial_ddp.py", "6", "1", "--snapshot", "whole.pt")
    assert whole.status == 0, whole.err
    killed = launcher.run(
        PROGRAMS / "tutorial_ddp.py", "6", "1", "--snapshot", "killed.pt", "--die-at", "2", restarts=3
    )
    assert killed.status == 0, killed.err
    assert whole.out.startswith("done, weights ")
    assert killed.printed(
        "[0] Resuming training from snapshot at Epoch 3",
        "[1] Resuming training from snapshot at Epoch 3",
        whole.out.strip(),
    )


@pytest.mark.slow
def test_spawn_started_data_loader_workers_find_the_script(launcher: Launcher) -> None:
    ended = launcher.run(PROGRAMS / "spawn_loader.py", nproc=1)
    assert ended.status == 0, ended.err
    total = sum(i * i for i in range(32))
    assert ended.printed(f"rank 0 total {total}")


def test_a_progress_bar_arrives_with_its_carriage_returns(launcher: Launcher) -> None:
    ended = launcher.run(PROGRAMS / "progress_bar.py")
    assert ended.status == 0, ended.err
    assert "epoch 1: 100%" in ended.err
    assert ended.err.count("\r") >= 40
    assert ended.printed("Training finished")


def test_a_recorded_error_is_told_and_fails_the_job(launcher: Launcher) -> None:
    ended = launcher.run(PROGRAMS / "recorded_error.py")
    assert ended.status == 1
    assert ended.printed(*["environment names an error file: True"] * 2)
    assert "the dataset has moved to another shelf" in ended.err
    assert "Traceback" in ended.err


def test_sigterm_to_the_launcher_reaches_the_scripts_own_handler(launcher: Launcher) -> None:
    running = launcher.start(PROGRAMS / "graceful.py", launcher.folder)
    deadline = time.monotonic() + PATIENCE_S
    while len(list(launcher.folder.glob("ready-*"))) < 2:  # torchrun does not tell when workers have started
        assert running.process.poll() is None, running.err.read_text()
        assert time.monotonic() < deadline, running.err.read_text()
        time.sleep(0.05)
    running.process.send_signal(signal.SIGTERM)
    assert running.end().status != 0
    assert [(launcher.folder / f"saved-{rank}").read_text() for rank in (0, 1)] == ["SIGTERM"] * 2


def test_stdin_is_the_workers(launcher: Launcher) -> None:
    ended = launcher.run(PROGRAMS / "stdin_reader.py", nproc=1, stdin=b"a line from the shell\n")
    assert ended.printed("read: a line from the shell")


@pytest.mark.slow
def test_a_module_of_a_package_imports_its_siblings(launcher: Launcher) -> None:
    ended = launcher.run("-m", "world_size_app.main")
    assert ended.status == 0, ended.err
    assert ended.printed(*(f"rank: {rank}, computed world_size: 2" for rank in range(2)))


def test_a_program_that_is_not_python_is_run_as_it_stands(launcher: Launcher) -> None:
    ended = launcher.run("--no-python", PROGRAMS / "shell.sh", "two words", "-x")
    assert ended.status == 0, ended.err
    assert ended.printed(*(f"rank {rank} of 2 got 2 arguments: two words -x" for rank in (0, 1)))


def test_attempts_are_counted_in_the_environment(launcher: Launcher) -> None:
    ended = launcher.run(PROGRAMS / "attempts.py", nproc=1, restarts=2)
    assert ended.status == 0, ended.err
    assert ended.printed("rank 0 attempt 0 of run True", "rank 0 attempt 1 of run True")


ON_CPU = {"ACCELERATE_USE_CPU": "true"}


def test_accelerates_own_training_checks_pass(launcher: Launcher) -> None:
    origin = find_spec("accelerate.test_utils.scripts.test_script")
    assert origin is not None
    assert origin.origin is not None
    ended = launcher.run(Path(origin.origin), env=ON_CPU)
    assert ended.status == 0, ended.err
    assert "DistributedType.MULTI_CPU" in ended.out


@pytest.mark.slow
@pytest.mark.parametrize(("script", "way"), [("test_ops", "path"), ("test_sync", "module")])
def test_accelerates_other_checks_pass(launcher: Launcher, script: str, way: str) -> None:
    """Without a GPU these scripts join a gloo group and leave it, sometimes before the other rank has joined.
    Then they have to start again, also under torchrun."""
    module = f"accelerate.test_utils.scripts.{script}"
    origin = find_spec(module)
    assert origin is not None
    target = ["-m", module] if way == "module" else [str(origin.origin)]
    ended = launcher.run(*target, env=ON_CPU, restarts=5)
    assert ended.status == 0, ended.err


OWN_FLAGS = [
    "--logs", "here", "--log", "--max-steps", "7", "--max", "3", "--min=2", "--node", "a",
    "--run", "r1", "--role", "student", "-m", "x", "rest",
]  # fmt: skip


def test_a_script_gets_all_of_its_flags_even_those_named_like_elasticds(elasticd: Launcher) -> None:
    """torchrun takes --logs for its own --logs-specs, even after the script's name."""
    ended = elasticd.run(PROGRAMS / "own_flags.py", *OWN_FLAGS)
    assert ended.status == 0, ended.err
    assert ended.out == alone("own_flags.py", *OWN_FLAGS)


@pytest.mark.parametrize("arguments", [["--", "a", "--", "", "two words", "ü"], ["--help"]], ids=str)
def test_arguments_arrive_to_the_letter(elasticd: Launcher, arguments: list[str]) -> None:
    """torchrun drops a leading --, and answers --help itself."""
    ended = elasticd.run(PROGRAMS / "argv.py", *arguments, nproc=1)
    assert ended.status == 0, ended.err
    assert json.loads(ended.out) == arguments
