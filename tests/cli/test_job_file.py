"""A job file gives ``elasticd run`` its script and its options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elasticd.cli.job_file import job_file_of
from tests.cli.commandline import parse, planned, refused


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(text: str) -> str:
    Path("job.toml").write_text(text)
    return "job.toml"


def test_a_job_file_gives_the_script_its_arguments_and_the_options() -> None:
    job = written(
        'script = "train.py"\nargs = ["--lr", "3"]\nmin = 2\nhang-after = "90"\njoin_timeout = 1.5\n'
        "nproc-per-node = 4\naudit = true\nplain = false\nmodule = true\n"
    )
    options = parse(job)
    assert (options.target, options.args) == ("train.py", ("--lr", "3"))
    assert (options.min, options.hang_after, options.join_timeout) == (2, "90", 1.5)
    assert (options.nproc_per_node, options.audit, options.plain, options.module) == ("4", True, False, True)


def test_the_command_line_and_then_the_environment_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICD_MAX", "7")
    monkeypatch.setenv("ELASTICD_SPARES", "7")
    job = written('script = "train.py"\nargs = ["a"]\nmin = 2\nmax = 3\nspares = 3\n')
    options = parse("--max", "9", job, "--min", "b")
    assert (options.min, options.max, options.spares) == (2, 9, 7)
    assert options.args == ("a", "--min", "b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("min = 2", 'the job file job.toml names no script: write script = "train.py".'),
        ('script = "other.toml"', 'the job file job.toml names no script: write script = "train.py".'),
        ('script = "a.py"\nargs = "--lr 3"', 'args is not a list of texts: write args = ["--epochs", "3"].'),
        ('script = "a.py"\nmni = 2', "job.toml: there is no option mni; did you mean min?"),
        ('script = "a.py"\ntarget = "b.py"', "`elasticd run --help-all` shows all options."),
        ('script = "a.py"\nhelp-all = true', "job.toml: there is no option help_all"),
        ('script = "a.py"\nmin = true', "job.toml: min is not a number without quotes."),
        ('script = "a.py"\nmin = [2]', "job.toml: min is not a number without quotes."),
        ('script = "a.py"\nmin = "2"', "job.toml: min is not a number without quotes."),
        ('script = "a.py"\njoin-timeout = "30"', "job.toml: join_timeout is not a number without quotes."),
        ('script = "a.py"\nslots = true', "job.toml: slots is not a text in quotes or a number."),
        ('script = "a.py"\nlog-dir = 7', "job.toml: log_dir is not a text in quotes."),
        ('script = "a.py"\naudit = 1', "job.toml: audit is not true or false without quotes."),
        ('script = "a.py"\naudit = "true"', "job.toml: audit is not true or false without quotes."),
        ('script = "a.py"\nmin = 2.5', "--min 2.5 is not a whole number (from the job file)."),
        ('script = "a.py"\nreplicate = 0.5', "--replicate 0.5 is not a whole number (from the job file)."),
        ('script = "a.py"\nmaster-port = 1.5', "--master-port 1.5 is not a whole number (from"),
        (f'script = "a.py"\njob = 0x{"f" * 5000}', "job.toml: job is too large a number."),
        ('script = "a.py"\nmin = 0', "--min 0 is less than 1 (from the job file)."),
        ('script = "a.py"\njoin-timeout = 1\njoin_timeout = 2', "an option is given twice"),
        ('script = "a.py"\nmonitor-interval = "5"', "monitor_interval is not a number without quotes."),
        ('script = "a\\u0000.py"', "job.toml: a text has a NUL character"),
        ('script = "a.py"\nargs = ["a", "\\u0000"]', "job.toml: a text has a NUL character"),
        ('script = "a.py"\nlog-dir = "\\u0000"', "job.toml: a text has a NUL character"),
        ("script = a.py", "the job file job.toml is not TOML: "),
        ("a = " + "[" * 5000, "the job file job.toml is not TOML: "),
    ],
)
def test_a_mistake_is_one_sentence(text: str, said: str) -> None:
    assert said in refused(written(text))


def test_a_job_file_that_is_missing_or_no_text_is_refused() -> None:
    assert "the job file none.toml cannot be read: No such file" in refused("none.toml")
    Path("job.toml").write_bytes(b"\xff")
    assert "the job file job.toml is not TOML" in refused("job.toml")


def test_the_job_file_of_a_command_gives_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.py").touch()
    monkeypatch.setenv("ELASTICD_MAX", "7")
    command = ("--min", "2", "--etcd", "http://localhost:1", "--job", "j", "--audit", "--join-timeout", "1.5")
    args = ("--note", 'a "b" \\ \x7f\u202e\n', "café")
    plan = planned(*command, "--log-dir", "logs", "--node", "n", "train.py", *args)
    found = parse(written(plan.config.job_file))
    assert replace(found, from_environment=frozenset()) == replace(
        parse(*command, "--log-dir", "logs", "train.py", *args), from_environment=frozenset()
    )
    assert found.max == 7, "what the environment gives is written, too"
    assert "node" not in plan.config.job_file, "each node has its own name"


def test_arguments_that_are_too_long_to_keep_are_left_out_with_a_word() -> None:
    text = job_file_of("train.py", ["x" * 40_000], {"min": 2})
    assert "# 1 arguments of the script are left out" in text
    assert parse(written(text)).args == ()
