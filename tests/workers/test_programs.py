"""Each program of ``workers/`` reaches its quality whatever happens to its workers."""

from __future__ import annotations

import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.harness import PATIENCE_S, Agent, Cluster
from tests.workers.programs import (
    FAULTS,
    KEPT,
    PROGRAMS,
    TEXT,
    WORKERS,
    Program,
    applies,
    end,
    let_go,
    start,
    weights,
)

pytestmark = pytest.mark.timeout(600)

CHECKPOINTS = ("pipeline", "tensor_parallel", "train_gpt_fsdp")  # the programs with --checkpoints
SNAPSHOTS = ("ddp", "data_parallel", "parameter_server", "train_gpt")  # the programs with --snapshot-dir
NO_FOLDER = "the folder /dev/null/x cannot be made: Not a directory"


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.unit == 1], ids=str)
def test_a_program_reaches_its_quality_although_a_worker_is_killed(
    program: Program, clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    cluster = clusters(shared_etcd)
    (agent,) = start(cluster, program, "kill")
    end(program, agent)
    require_one_kill(program, agent)
    assert not program.says or program.says in agent.out
    if program.audited:
        said = cluster.command("audit", cluster.job, etcd=False)
        assert said.code == 0 and said.out.endswith("proved: each draw was used once\n"), said


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.unit > 1], ids=str)
def test_a_unit_goes_on_when_a_worker_of_the_other_is_killed_and_the_lost_unit_is_back(
    program: Program, clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    cluster = clusters(shared_etcd)
    (agent,) = start(cluster, program, "kill", "wait")
    cluster.until_said(agent, "round.closing", times=2)  # because the lost unit is whole again
    let_go(cluster, program, 1)  # on a busy machine the training would have ended before
    end(program, agent)
    require_one_kill(program, agent)
    sizes = [event["world_size"] for event in agent.find("round.formed")]
    assert sizes == [program.workers, program.workers - program.unit, program.workers]
    committed = re.search(r"1 units of \d+ workers, (\d+) of", "\n".join(agent.out))
    assert committed and int(committed[1]) >= program.after - 1, "the other unit goes on from its last commit"


def require_one_kill(program: Program, agent: Agent) -> None:
    charged = [(e["code"], e["rank"]) for e in agent.find("failure.charged")]
    assert charged == [(-signal.SIGKILL, program.rank)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "worker killed"])
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_program_reaches_its_quality_through_each_fault(
    program: Program, fault: str, clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    if not applies(fault, program):
        pytest.skip("it has one worker")
    FAULTS[fault](clusters(shared_etcd), program)


@pytest.mark.slow
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.unit > 1], ids=str)
def test_the_only_unit_goes_on_from_its_checkpoint(
    program: Program, clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    alone = replace(program, workers=program.unit, arguments=f"{program.arguments} {KEPT}")
    (agent,) = start(clusters(shared_etcd), alone, "kill")
    end(alone, agent)
    resumed = int(re.findall(r"1 units of 2 workers, (\d+) of", "\n".join(agent.out))[-1])
    assert 0 < resumed <= program.after


@pytest.mark.slow
def test_diloco_in_fragments_sends_less_at_once_and_survives_a_kill(
    clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    whole = next(program for program in PROGRAMS if program.name == "local_sgd")
    said = "goes on after 25 of 25 steps of its own"
    parts = replace(whole, arguments=f"{whole.arguments} --fragments=2", says=said)
    at_once = []
    for program in (whole, parts):
        (agent,) = start(clusters(shared_etcd), program, "kill")
        end(program, agent)
        require_one_kill(program, agent)
        assert program.says in agent.out
        at_once += [int(kilobytes) for kilobytes in re.findall(r"([0-9]+) kB at once", "\n".join(agent.out))]
    assert at_once == [104, 66]


@pytest.mark.slow
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.same_bits], ids=str)
def test_a_worker_that_is_killed_changes_no_bit_of_the_weights(
    program: Program, clusters: Callable[[str | None], Cluster], shared_etcd: str
) -> None:
    (killed,) = start(clusters(shared_etcd), program, "kill")
    (undisturbed,) = start(clusters(shared_etcd), program)
    end(program, killed)
    end(program, undisturbed)
    assert weights(killed) == weights(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_program_runs_under_plain_torchrun(
    program: Program, tmp_path: Path, clusters: Callable[[str | None], Cluster]
) -> None:
    environment = {k: v for k, v in clusters(None).environment().items() if not k.startswith("E2E_")}
    torchrun = [str(Path(sys.executable).with_name("torchrun")), f"--log-dir={tmp_path}/logs", "--standalone"]
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={program.workers}", *program.argv(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    program.require_quality(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("program", "arguments", "workers", "sentence"),
    [
        ("imbalanced", ["--class-weights=1,2"], "1", "'1,2' is not 10 weights"),
        ("imbalanced", ["--class-weights=1,1,1,1,1,1,1,1,1,-1"], "1", "give a number that is 0 or more"),
        ("data_parallel", [], "2", "give it one worker, or use ddp.py"),
        ("accumulation", ["--global-batch=2"], "3", "give at least one image for each worker"),
        ("layers_on_devices", ["--devices=7"], "1", "the model has only 6 layers"),
        ("local_sgd", ["--fragments=4"], "1", "4 fragments: the model has fewer layers with weights"),
        ("local_sgd", ["--fragments=3"], "1", "--inner-steps 100 is no multiple of --fragments 3"),
        ("pipeline", ["--unit=7"], "7", "the model has only 6 layers"),
        ("pipeline", ["--unit=2"], "3", "give `elasticd run --unit 2`, or torchrun a multiple of 2 workers"),
        ("pipeline", ["--unit=2", "--global-batch=7"], "4", "too small for 4 pieces for 2 units"),
        ("tensor_parallel", ["--unit=2"], "3", "the workers may make no whole units of 2"),
        ("tensor_parallel", ["--unit=3"], "3", "no equal parts for a unit of 3 workers"),
        ("tensor_parallel", ["--global-batch=1"], "2", "too small for 2 units"),
        ("imbalanced", ["--global-batch=1"], "1", "global_batch is 1, too few for 8 virtual ranks"),
        ("layers_on_devices", ["--global-batch=1"], "2", "global_batch is 1, too few for 2 virtual ranks"),
        ("train_gpt_in_place", [f"--data={TEXT}", "--virtual-ranks=25"], "1", "too few for 25 virtual ranks"),
        ("train_gpt_in_place", ["--data=/nowhere"], "1", "cannot read /nowhere"),
        ("train_gpt_fsdp_in_place", ["--data=/nowhere"], "1", "cannot read /nowhere"),
        ("train_gpt_fsdp", [], "1", "no folder for checkpoints"),
        ("ddp", ["--lr=much"], "1", "invalid rate value: 'much'"),
        ("pipeline", ["--lr=nan"], "1", "nan is no learning rate"),
        ("train_gpt_in_place", ["--lr=-1"], "1", "-1 is no learning rate"),
        ("imbalanced", [f"--seed={1 << 63}"], "1", "is no number from 0 to 2^63 - 1"),
        *((name, ["--checkpoints=/dev/null/x"], "2", NO_FOLDER) for name in CHECKPOINTS),
        *((name, ["--snapshot-dir=/dev/null/x"], "1", NO_FOLDER) for name in SNAPSHOTS),
    ],
)
def test_each_worker_answers_bad_input_with_one_sentence(
    program: str,
    arguments: list[str],
    workers: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", workers)
    # each worker prints it, since the others may be stopped
    monkeypatch.setenv("LOCAL_RANK", str(int(workers) - 1))
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
    monkeypatch.syspath_prepend(str(WORKERS))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(WORKERS / f"{program}.py"), run_name="__main__")
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{program}") and sentence in said


@pytest.mark.parametrize("program", SNAPSHOTS)
def test_a_program_that_cannot_make_its_default_folder_fails_before_it_trains(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ELASTICD_JOB_NAME", "job")
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/x")
    monkeypatch.setattr(sys, "argv", [f"{program}.py"])
    monkeypatch.syspath_prepend(str(WORKERS))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(WORKERS / f"{program}.py"), run_name="__main__")
    assert ended.value.code == 2
    assert f"the folder /dev/null/x/elasticd/{program}/job cannot be made" in capsys.readouterr().err


def test_a_unit_of_a_program_divides_that_of_elasticd_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ELASTICD_WORLD_MAX", "8")
    monkeypatch.setenv("ELASTICD_UNIT", "1")  # so a world may have three workers
    monkeypatch.setattr(sys, "argv", ["pipeline.py", "--unit=2"])
    monkeypatch.syspath_prepend(str(WORKERS))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(WORKERS / "pipeline.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "give `elasticd run --unit 2`" in capsys.readouterr().err
