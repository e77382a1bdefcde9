"""What the options of ``elasticd run`` mean, compared with torchrun's own parser where it has one."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.cli.log_options import _commas
from elasticd.cli.main import _exit_code
from elasticd.cli.run_command import run
from elasticd.core.facts import Limits, Policy, Resume
from elasticd.core.hang.judging import Patience
from elasticd.daemon.config import CommandKind, LogOptions
from elasticd.telemetry.http import Tls
from tests.cli.commandline import PretendMachine, parse, planned, refused
from tests.etcd.cluster import Authority

SHARED = "--etcd=http://127.0.0.1:1 --job=j"


@pytest.fixture
def job(tmp_path: Path) -> str:
    script = tmp_path / "job.py"
    script.write_text("print('hello')\n")
    return str(script)


# ---------------------------------------------------------------- the script's own arguments

_words = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(
        ["", "--", "-", "--logs", "--log", "--max", "--max=3", "--node", "--run", "-m", "-t3", "--help"]
    ),
)


@given(
    args=st.lists(_words, max_size=8),
    dashes=st.booleans(),
    before=st.sampled_from([(), ("--min", "2"), ("-t3",)]),
)
def test_the_scripts_own_arguments_are_never_touched(
    args: list[str], dashes: bool, before: tuple[str, ...]
) -> None:
    options = parse(*before, *(("--",) if dashes else ()), "job.py", *args)
    assert options.target == "job.py"
    assert list(options.args) == args
    assert options.min == (2 if before and before[0] == "--min" else None)


@given(args=st.lists(_words, max_size=6))
def test_the_group_does_not_touch_them_either(args: list[str]) -> None:
    from elasticd.cli.main import cli

    with cli.make_context("elasticd", ["run", "--plain", "job.py", *args]) as ctx:
        assert ctx._protected_args + ctx.args == ["run", "--plain", "job.py", *args]


@pytest.mark.parametrize(
    ("short", "full"),
    [
        (("--redirect=3",), ("--redirects=3",)),
        (("--nproc", "2"), ("--nproc-per-node", "2")),
        (("--nproc_per", "2"), ("--nproc-per-node", "2")),
        (("--standal",), ("--standalone",)),
        (("--rdzv_i=x",), ("--rdzv-id=x",)),
        (("--max-r", "3"), ("--max-restarts", "3")),
        (("--log-d", "x"), ("--log-dir", "x")),
    ],
)
def test_an_option_may_be_abbreviated_as_with_torchrun(
    short: tuple[str, ...], full: tuple[str, ...], job: str
) -> None:
    assert parse(*short, job) == parse(*full, job)


@pytest.mark.parametrize("several", ["--node-", "--rdzv", "--m", "--log", "--no", "--etcd-c"])
def test_what_may_be_several_options_is_refused(several: str, job: str) -> None:
    with pytest.raises(click.NoSuchOption):
        parse(several, "2", job)


def test_a_value_is_never_taken_for_an_abbreviation(job: str) -> None:
    assert parse("--stragglers", "report", "--job", "standal", job).job == "standal"
    with pytest.raises(click.BadParameter):
        parse("--stragglers", "repo", job)


def test_underscores_and_dashes_are_the_same(job: str) -> None:
    assert parse("--nproc_per_node", "2", "--rdzv_id=x", job) == parse(
        "--nproc-per-node=2", "--rdzv-id", "x", job
    )


# ---------------------------------------------------------------- torchrun's flags


def torchruns_actions() -> dict[str, tuple[str, ...]]:
    from torch.distributed.run import get_args_parser

    positional = {"help", "training_script", "training_script_args"}
    return {a.dest: tuple(a.option_strings) for a in get_args_parser()._actions if a.dest not in positional}


def test_every_flag_that_torchrun_has_is_known_here_under_each_of_its_spellings() -> None:
    assert set(SAMPLES) | SWITCHES == set(torchruns_actions()), "each is compared below"
    ours = {p.name: p for p in run.params if isinstance(p, click.Option)}
    for destination, spellings in torchruns_actions().items():
        assert destination in ours, f"torchrun has {spellings}, which elasticd run does not know"
        known = {o.replace("_", "-") for o in ours[destination].opts}
        assert {s.replace("_", "-") for s in spellings} <= known
        assert ours[destination].envvar == f"PET_{destination.upper()}"


SAMPLES = {
    "nnodes": "1:1",
    "nproc_per_node": "2",
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "host:1",
    "rdzv_id": "name",
    "rdzv_conf": "join_timeout=5",
    "max_restarts": "3",
    "monitor_interval": "0.5",
    "start_method": "fork",
    "event_log_handler": "console",
    "role": "trainer",
    "log_dir": "logs",
    "redirects": "3",
    "tee": "0:1,1:2",
    "local_ranks_filter": "0,1",
    "duplicate_stdout_filters": "a,,b,c",
    "duplicate_stderr_filters": "x",
    "node_rank": "1",
    "master_addr": "host",
    "master_port": "29500",
    "local_addr": "127.0.0.1",
    "logs_specs": "default",
    "numa_binding": "node",
    "signals_to_handle": "SIGTERM,SIGUSR1",
    "shutdown_timeout": "7",
}
SWITCHES = {"standalone", "module", "no_python", "run_path", "virtual_local_rank"}


@pytest.mark.parametrize("name", sorted(SAMPLES))
@pytest.mark.parametrize("way", ["dash", "underscore", "environment"])
def test_a_value_is_read_as_torchrun_reads_it(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    value = SAMPLES[name]
    if way == "environment":
        monkeypatch.setenv(f"PET_{name.upper()}", value)
        argv = ["job.py"]
        # torchrun reads these from no environment variable; elasticd does
        if name in ("logs_specs", "numa_binding"):
            argv = [f"--{name.replace('_', '-')}", value, "job.py"]
    else:
        argv = [f"--{name if way == 'underscore' else name.replace('_', '-')}", value, "job.py"]
    theirs = getattr(get_args_parser().parse_args(argv), name)
    ours = getattr(parse(*argv), name)
    if name.startswith("duplicate"):
        ours = list(_commas(ours))
    if name == "log_dir":
        ours = str(ours)
    if name in ("monitor_interval", "shutdown_timeout"):
        theirs = float(theirs)
    if way == "environment" and isinstance(theirs, str) and not isinstance(ours, str):
        theirs = type(ours)(theirs)
    assert ours == theirs


@pytest.mark.parametrize("name", sorted(SWITCHES))
@pytest.mark.parametrize("value", [None, "0", "1"])
def test_a_switch_is_read_as_torchrun_reads_it(
    name: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.run import get_args_parser

    if value is not None:
        monkeypatch.setenv(f"PET_{name.upper()}", value)
    for argv in (["job.py"], [f"--{name.replace('_', '-')}", "job.py"]):
        assert getattr(parse(*argv), name) == getattr(get_args_parser().parse_args(argv), name)


def program(path: Path) -> str:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_every_flag_changes_the_configuration_or_is_reported_as_ignored(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "numactl")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    base = planned(job)
    alone = {"rdzv_endpoint": ["--rdzv-backend", "c10d"]}
    values = SAMPLES | {"nnodes": "1", "log_dir": str(Path(job).parent), "local_addr": "127.0.0.2"}
    for name, value in values.items():
        if name == "logs_specs":
            continue  # the name of an installed entry point; see below
        argv = [*alone.get(name, []), f"--{name.replace('_', '-')}", value, job]
        got = planned(*argv)
        config = replace(got.config, job=base.config.job, job_file=base.config.job_file)
        same = config == base.config and name != "rdzv_id"
        if name == "nnodes":
            assert same  # one node is the default
        else:
            assert not same or got.notes, f"--{name} is silently ignored"


@pytest.mark.parametrize(
    "name",
    ["monitor_interval", "start_method", "event_log_handler", "node_rank", "master_addr"],
)
def test_an_ignored_flag_is_reported_once(name: str, job: str) -> None:
    option = f"--{name.replace('_', '-')}"
    notes = planned(option, SAMPLES[name], job).notes
    assert sum(option in note for note in notes) == 1
    assert "means nothing here" in "".join(notes)


def test_the_master_s_address_has_a_meaning_beside_its_port(job: str) -> None:
    notes = planned("--master-addr", "host", "--master-port", "29500", job).notes
    assert not any("--master-addr" in note for note in notes)


@pytest.mark.parametrize(
    ("source", "args", "names"),
    [
        ("", ("--min", "2", "--max=3"), ["--min", "--max"]),
        ("", ("--steps", "2", "min", "-max"), []),
        ("parser.add_argument('--min')", ("--min", "2", "--max=3"), ["--max"]),
        ("parser.add_argument('--max-steps')", ("--max", "3"), ["--max"]),
    ],
)
def test_options_of_elasticd_after_the_script_are_reported(
    source: str, args: tuple[str, ...], names: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(f"# {source}\n")
    got = planned(str(script), *args)
    assert [note.partition(" ")[0] for note in got.notes if "went to the script" in note] == names
    assert got.config.command.args == args


def test_a_job_with_room_for_other_nodes_and_a_made_up_name_notes_the_name(job: str) -> None:
    shared = ("--etcd=http://127.0.0.1:1", "--slots=2", "--min=2")
    got = planned(*shared, "--max=4", job)
    assert any(f"only with --job {got.config.job}" in note for note in got.notes)
    for whole in (("--max=2",), ("--max=4", "--job=j")):
        assert not any("--job" in note for note in planned(*shared, *whole, job).notes)


def test_flags_that_were_not_given_are_not_talked_about(job: str) -> None:
    assert planned(job).notes == ()


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("options", "machine", "limits", "slots"),
    [
        ("", {}, Limits(1, 1), 1),
        ("--nproc-per-node 4", {}, Limits(4, 4), 4),
        ("--nproc-per-node gpu", {"gpu_count": 8}, Limits(8, 8), 8),
        ("--nproc-per-node auto", {"gpu_count": 2}, Limits(2, 2), 2),
        ("--nproc-per-node auto", {}, Limits(16, 16), 16),
        ("--nproc-per-node cpu", {"gpu_count": 2}, Limits(16, 16), 16),
        ("--nproc-per-node npu", {}, Limits(3, 3), 3),
        (f"--nnodes=2:4 --nproc-per-node=8 {SHARED}", {}, Limits(16, 32), 8),
        ("--nnodes=1:4 --standalone --nproc-per-node=2", {}, Limits(2, 2), 2),
        ("--min 2 --max 8", {}, Limits(2, 8), 4),
        ("--min 2 --max 8", {"core_count": 1}, Limits(2, 8), 2),
        ("--min 2 --max 8", {"core_count": 64}, Limits(2, 8), 8),
        ("--min 2 --max 8", {"gpu_count": 3}, Limits(2, 8), 3),
        ("--min 2", {}, Limits(2, 4), 4),
        ("--max 3", {}, Limits(1, 3), 3),
        ("--slots 3", {}, Limits(3, 3), 3),
        ("--slots auto", {}, Limits(4, 4), 4),
        ("--min=1 --max=2 --slots=4", {}, Limits(1, 2), 4),
        ("--max=2 --slots=2 --spares=1", {}, Limits(1, 2), 3),
        ("--max=2 --spares=1", {"gpu_count": 2}, Limits(1, 2), 2),
        (f"--min=6 --max=8 {SHARED}", {}, Limits(6, 8), 4),
        ("--min=2 --max=8 --nproc-per-node=3", {}, Limits(2, 8), 3),
        (f"--min=5000 --max=9999 {SHARED}", {"core_count": 4096}, Limits(5000, 9999), 1024),
        ("--min 1024", {}, Limits(1024, 1024), 1024),
        ("--unit=4", {}, Limits(4, 4, unit=4), 4),
        ("--unit=3 --slots=auto", {}, Limits(3, 3, unit=3), 3),
        ("--unit=2 --max=4", {}, Limits(2, 4, unit=2), 4),
        ("--unit=3 --min=3", {}, Limits(3, 3, unit=3), 3),
        ("--sizes=8,2,4", {}, Limits(2, 8, sizes=(2, 4, 8)), 4),
        ("--sizes=2,4 --unit=2 --min=1", {}, Limits(2, 4, unit=2, sizes=(2, 4)), 4),
        (f"--unit=8 --max=16 --slots=4 {SHARED}", {}, Limits(8, 16, unit=8), 4),
    ],
)
def test_limits_and_slots_follow_from_what_is_given_and_what_the_machine_has(
    options: str, machine: dict[str, int], limits: Limits, slots: int, job: str
) -> None:
    config = planned(*options.split(), job, machine=PretendMachine(**machine)).config
    assert (config.limits, config.slots) == (limits, slots)


def test_the_command_line_beats_the_environment(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICD_MIN", "1")
    monkeypatch.setenv("PET_NNODES", "4")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "8")
    got = planned("--min", "2", "--max", "3", "--slots", "2", job)
    assert (got.config.limits, got.config.slots) == (Limits(2, 3), 2)
    assert any("ignored: the environment's --nnodes" in note for note in got.notes)
    monkeypatch.delenv("PET_NNODES")
    assert planned("--nnodes", "1", "--nproc-per-node", "2", job).config.limits == Limits(2, 2)


# ---------------------------------------------------------------- where nodes meet


def test_an_etcd_given_as_torchruns_rendezvous_is_used(job: str) -> None:
    config = planned(
        *(
            "--nnodes=2",
            "--rdzv-backend=etcd-v3",
            "--rdzv-endpoint=127.0.0.1:23,127.0.0.1:24",
            "--rdzv-id=x/y".replace("/", "-"),
        ),
        job,
    ).config
    assert config.etcd is not None
    assert config.etcd.endpoints == ("127.0.0.1:23", "127.0.0.1:24")
    assert config.job == "x-y"


def test_timeouts_of_rdzv_conf_are_used_and_other_keys_are_reported(job: str) -> None:
    got = planned("--rdzv-conf", "join_timeout=7,last_call_timeout=3,is_host=1,store_type=file", job)
    assert (got.config.policy.join_timeout_s, got.config.policy.settle_s) == (7.0, 3.0)
    assert any("is_host, store_type of --rdzv-conf mean nothing here" in note for note in got.notes)
    assert (
        planned("--rdzv-conf", "join_timeout=7", "--join-timeout", "9", job).config.policy.join_timeout_s == 9
    )


def test_a_job_without_a_name_gets_a_readable_one_of_its_own(job: str) -> None:
    one, other = planned(job).config.job, planned(job).config.job
    assert one.startswith("job-") and other.startswith("job-") and one != other


def test_a_standalone_run_is_on_loopback(job: str) -> None:
    assert planned(job).config.address == "127.0.0.1"
    assert planned(job).config.etcd is None


def test_a_host_name_that_resolves_to_loopback_is_reported(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts gives the machine's own name 127.0.1.1."""
    names = {"a": "127.0.1.1", "b": "10.0.0.2"}
    resolve = socket.getaddrinfo

    def resolved(host: str, *args: Any, **how: Any) -> Any:
        return resolve(names.get(host, host), *args, **how)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    elsewhere, here = ("--etcd", "http://10.0.0.9:2379"), ("--etcd", "http://127.0.0.1:2379")
    got = planned(*elsewhere, "--address", "a", job)
    assert got.config.address == "127.0.1.1"
    (note,) = [note for note in got.notes if "cannot reach this node" in note]
    assert "--address a, which is 127.0.1.1 on this machine" in note
    assert "127.0.0.1, which is a loopback address" in " ".join(
        planned(*elsewhere, "--address", "127.0.0.1", job).notes
    )
    for argv, address in (((*here, "--address", "a"), "127.0.1.1"), ((*elsewhere, "--address", "b"), "b")):
        got = planned(*argv, job)
        assert got.config.address == address and "cannot reach" not in " ".join(got.notes)


# ---------------------------------------------------------------- other options


def test_torchruns_restarts_are_the_budget_and_nothing_ends_the_job_before_it(job: str) -> None:
    policy = planned("--max-restarts", "5", job).config.policy
    assert policy.restarts_max == 5
    assert policy.futile_max > 5
    assert planned(job).config.policy == Policy()


def test_whether_to_resume_is_the_policy_s_and_the_workers_(job: str) -> None:
    config = planned("--resume", "required", "--checkpoint-every", "5m", "--checkpoints", "x", job).config
    assert config.policy.resume is Resume.REQUIRED
    told = {"ELASTICD_RESUME": "required", "ELASTICD_CHECKPOINT_EVERY": "5m"}
    assert told.items() <= config.env.items()
    assert config.env["ELASTICD_CHECKPOINTS"] == os.path.abspath("x")
    url = planned("--checkpoints", "s3://bucket/run/", job).config.env
    assert url["ELASTICD_CHECKPOINTS"] == "s3://bucket/run" and "ELASTICD_RESUME" not in url
    assert "ELASTICD_CHECKPOINTS" not in planned(job).config.env


def test_how_fast_checkpoints_are_written_is_the_agent_s_to_know(job: str) -> None:
    assert planned("--checkpoint-rate", "200M", job).config.checkpoint_rate == 200_000_000
    assert planned(job).config.checkpoint_rate is None


@pytest.mark.parametrize(
    ("given", "memory"), [((), None), (("--memory", "24G"), 24 * 10**9), (("--memory=off",), 0)]
)
def test_a_node_may_be_told_what_memory_its_workers_may_use(
    job: str, given: tuple[str, ...], memory: int | None
) -> None:
    assert planned(*given, job).config.memory == memory


def test_stragglers_are_reported_unless_they_are_to_be_drained(job: str) -> None:
    assert not planned(job).config.policy.straggler_drain
    assert not planned("--stragglers=report", job).config.policy.straggler_drain
    assert planned("--stragglers=drain", job).config.policy.straggler_drain


def test_workers_are_told_what_to_do_about_numbers_that_are_not_finite(job: str) -> None:
    assert "ELASTICD_ON_NONFINITE" not in planned(job).config.env
    assert planned("--on-nonfinite=stop", job).config.env["ELASTICD_ON_NONFINITE"] == "stop"


def test_the_shutdown_time_is_also_read_from_torchs_variable(job: str) -> None:
    environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "12", "OMP_NUM_THREADS": "1"}
    assert planned(job, environ=environ).config.policy.shutdown_s == 12
    assert planned("--shutdown-timeout", "3", job, environ=environ).config.policy.shutdown_s == 3


def test_workers_are_forked_unless_told_otherwise(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not planned(job).config.fresh_start
    assert planned("--fresh-start", job).config.fresh_start
    monkeypatch.setenv("ELASTICD_FRESH_START", "1")
    assert planned(job).config.fresh_start


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        (None, ("127.0.0.1", 9408)),
        ("0.0.0.0:9500", ("0.0.0.0", 9500)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:80", ("::1", 80)),
        ("off", None),
    ],
)
def test_metrics_are_served_on_loopback_by_default(
    job: str, asked: str | None, meant: tuple[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planned(*(["--http", asked] if asked else []), job).config.http == meant
    if asked:
        monkeypatch.setenv("ELASTICD_HTTP", asked)
        assert planned(job).config.http == meant


@pytest.mark.parametrize(
    ("where", "tls", "token", "note"),
    [
        ("0.0.0.0:0", False, False, "without --http-token-file, --http-cert and --http-key"),
        ("[::]:0", True, False, "without --http-token-file"),
        ("0.0.0.0:0", False, True, "unencrypted without --http-cert, --http-key"),
        ("0.0.0.0:0", True, True, None),
        ("127.0.0.1:0", False, False, None),
        ("localhost:0", False, True, None),
        ("[::1]:0", False, False, None),
        ("off", False, False, None),
    ],
)
def test_serving_beyond_loopback_warns_who_can_read_the_pages(
    job: str, where: str, tls: bool, token: bool, note: str | None, tmp_path: Path
) -> None:
    cert, key = Authority(tmp_path, "us").issue("agent", "127.0.0.1")
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    options = [f"--http={where}"]
    options += [f"--http-cert={cert}", f"--http-key={key}"] if tls else []
    options += [f"--http-token-file={secret}"] if token else []
    made = planned(*options, job)
    assert made.config.http_tls == (Tls(cert, key) if tls else None)
    assert made.config.http_token == ("s3cret" if token else None)
    assert "s3cret" not in repr(made)
    notes = [said for said in made.notes if "--http-" in said]
    assert len(notes) == (note is not None) and all(said.endswith(note or "") for said in notes)


def test_hangs_are_judged_as_asked(job: str) -> None:
    assert planned(job).config.patience == Patience()
    assert planned("--hang-after", "off", job).config.patience is None
    assert planned("--hang-after", "20", job).config.patience == Patience(fixed_s=20)


def test_log_options_are_passed_on(job: str, tmp_path: Path) -> None:
    argv = ["--log-dir", str(tmp_path / "new" / "logs"), "-r", "3", "-t0:1", "--local-ranks-filter", "0,2"]
    environ = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}: ", "OMP_NUM_THREADS": "1"}
    logs = planned(*argv, "--duplicate-stdout-filters", "a,,b,c", job, environ=environ).config.logs
    assert logs == LogOptions(
        tmp_path / "new" / "logs", "3", "0:1", frozenset({0, 2}), "${rank}: ", duplicate_stdout=("a,b", "c")
    )
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------- what runs


def test_a_script_is_known_by_its_text(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("a = 1\n")
    first = planned(str(script)).config
    script.write_text("a = 2\n")
    second = planned(str(script)).config
    assert first.command.kind is CommandKind.SCRIPT
    assert first.fingerprint != second.fingerprint


def test_a_module_is_found_without_importing_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "bundle" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "bundle" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "job.py").write_text("")  # inner is a namespace package
    (package / "__main__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    config = planned("-m", "bundle.inner.job", "--", "-x").config
    assert (config.command.kind, config.command.target, config.command.args) == (
        CommandKind.MODULE,
        "bundle.inner.job",
        ("--", "-x"),
    )
    assert planned("-m", "bundle.inner").config.command.target == "bundle.inner"
    assert "no module named" in refused("-m", "bundle.nothing")
    assert "without a __main__" in refused("-m", "bundle")


def test_a_program_is_looked_for_on_the_path() -> None:
    assert planned("--no-python", "sh", "-c", "true").config.command.kind is CommandKind.PROGRAM


def test_run_path_wins_over_no_python_as_with_torchrun(job: str) -> None:
    assert planned("--run-path", "--no-python", job).config.command.kind is CommandKind.SCRIPT


def test_a_syntax_error_is_shown_where_it_is(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import os\n\nprint('a'\nx = 1\n")
    said = refused(str(script))
    assert f"{script}:3" in said and "print('a'" in said


def test_a_warning_about_the_script_is_left_to_the_script(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    script = tmp_path / "job.py"
    script.write_text("x = '\\d'\nx is 3\n")
    planned(str(script))
    assert not recwarn.list


def test_another_interpreters_syntax_is_not_judged(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("syntax of the future\n")
    environ = {"PYTHON_EXEC": program(tmp_path / "python9"), "OMP_NUM_THREADS": "1"}
    assert planned(str(script), environ=environ).config.command.target == str(script)


def test_another_interpreter_must_be_a_program(job: str, tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    for wrong in (str(tmp_path / "nothing"), "python9", str(tmp_path), job, ""):
        assert "PYTHON_EXEC" in refused(job, environ={**environ, "PYTHON_EXEC": wrong})
    assert planned("--no-python", "/bin/sh", environ={**environ, "PYTHON_EXEC": "unused"})
    program(tmp_path / "python9")
    assert planned(job, environ={**environ, "PYTHON_EXEC": "python9"})


def test_binding_needs_its_program(job: str, tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    assert "numactl, which is not on the PATH" in refused("--numa-binding", "node", job, environ=environ)
    program(tmp_path / "numactl")
    assert planned("--numa-binding", "node", job, environ=environ).config.numa_binding == "node"


def test_debugging_sets_what_the_user_has_not_set_and_nothing_is_set_without_it(job: str) -> None:
    config = planned("--debug", job, environ={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}).config
    assert config.debug
    assert config.env == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert planned("--debug", job, environ={}).config.env["TORCH_DISTRIBUTED_DEBUG"] == "INFO"
    plain = planned(job, environ={}).config
    assert not plain.debug and plain.env == {}


def test_several_workers_get_one_thread_each_unless_told_otherwise(job: str) -> None:
    two = ("--slots", "2", job)
    assert planned(*two, environ={}).config.env == {"OMP_NUM_THREADS": "1"}
    assert planned(*two, environ={"OMP_NUM_THREADS": "3"}).config.env == {}
    assert planned(job, environ={}).config.env == {}


# ---------------------------------------------------------------- the real command


def elasticd(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ELASTICD_"))}
    return subprocess.run(
        [sys.executable, "-m", "elasticd.cli.main", *argv],
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "argv",
    [
        ("run",),
        ("run", "--min", "3", "--max", "2", "job.py"),
        ("run", "--min", "0", "job.py"),
        ("run", "nowhere.py"),
        ("run", "--job", "a/b", "nowhere.py"),
        ("run", "--nope", "job.py"),
        ("run", "--min", "a", "job.py"),
        ("run", "--etcd", "", "--job", "j", "--min", "1", "--max", "1", __file__),
        ("ls", "--etcd", ""),
        ("status", "j", "--etcd", ""),
        ("scale", "j", "--min", "a"),
        ("status", "--nope"),
        ("dance",),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(
    argv: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(argv) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("elasticd: ") and len(err.splitlines()) == 1


def test_a_bad_value_in_the_environment_is_traced_to_it(job: str) -> None:
    done = elasticd("run", job, ELASTICD_MIN="few")
    assert done.returncode == 2
    assert done.stderr == (
        "elasticd: --min few is not a whole number (from the environment variable ELASTICD_MIN).\n"
    )


def test_the_command_line_is_parsed_without_importing_torch_or_grpc() -> None:
    code = (
        "import sys\n"
        "from elasticd.cli import job_commands, main, run_command, status_command\n"
        "from elasticd.cli.options import collect\n"
        "assert main._exit_code(['--help']) == 0\n"
        "assert main._exit_code(['run', '--help']) == 0\n"
        "assert main._exit_code(['run', 'nowhere.py']) == 2\n"
        "assert main._exit_code(['ls', '--etcd', 'ftp://x']) == 2\n"
        "heavy = {'torch', 'grpc', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_version_is_printed() -> None:
    from elasticd import __version__

    assert elasticd("--version").stdout == elasticd("version").stdout == f"elasticd {__version__}\n"


def test_what_cannot_be_printed_as_the_disk_is_full_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "elasticd.cli.main", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "elasticd: the output cannot be written: No space left on device.\n"


def helps() -> dict[str, str]:
    """Return the output of each command's --help."""
    from elasticd.cli.main import cli

    with click.Context(cli, info_name="elasticd") as root:
        commands = {name: cli.get_command(root, name) for name in cli.list_commands(root)}
        return {
            name: command.get_help(command.context_class(command, info_name=name, parent=root))
            for name, command in commands.items()
            if command is not None
        }


def test_the_help_of_run_is_short_and_help_all_has_the_rest() -> None:
    basic, all_of_them = (
        {*re.findall(r"^  (?:-\w, )?(--[a-z-]+)", elasticd("run", asked).stdout, re.MULTILINE)}
        for asked in ("--help", "--help-all")
    )
    known = {max(p.opts, key=len) for p in run.params if isinstance(p, click.Option) and not p.hidden}
    assert all_of_them == known | {"--help"}
    assert {"--min", "--max", "--checkpoints", "--help-all"} < basic
    assert len(basic) <= 20


def test_help_names_no_option_and_no_command_that_does_not_exist() -> None:
    from elasticd.cli.main import cli

    options = {o for p in run.params for o in p.opts} | {"--help"}
    commands = set(cli.list_commands(click.Context(cli)))
    for name, text in helps().items():
        own = options
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        if not isinstance(command, click.Group):
            own = options | {o for p in command.params for o in p.opts}
            assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) <= own, name
        assert set(re.findall(r"`elasticd ([a-z]+)", text)) <= commands, name
