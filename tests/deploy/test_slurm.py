"""The batch script for Slurm runs for real, with stand-ins for Slurm's own commands."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd.cluster import EtcdOnPorts

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "train.sbatch"
PATIENCE_S = 90

# Starts its command as srun does on two nodes, and ends with the greatest of their exit codes.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in n1 n2; do SLURMD_NODENAME=$node "$@" & pids+=($!); echo $! >> "$STAGE/agents"; done
code=0
for pid in "${pids[@]}"; do wait "$pid"; c=$?; ((c > code)) && code=$c; done
exit $code
"""
SCANCEL = '#!/bin/bash\necho "$@" >> "$STAGE/scancel"\nkill -TERM $(cat "$STAGE/agents")\n'
SCONTROL = '#!/bin/bash\necho "$@" >> "$STAGE/scontrol"\n'


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[dict[str, str]]:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        path = commands / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    server = EtcdOnPorts()
    server.start()
    yield {
        **{k: v for k, v in os.environ.items() if not k.startswith(("ELASTICD_", "PET_", "SLURM"))},
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "STAGE": str(tmp_path),
        "ELASTICD_ETCD": server.access.url,
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "ELASTICD_MIN": "2",
        "ELASTICD_HTTP": "off",
    }
    server.stop()


def batch(stage: dict[str, str], source: str) -> subprocess.Popen[str]:
    job = Path(stage["STAGE"]) / "job.py"
    job.write_text(source)
    return subprocess.Popen(
        ["bash", str(SCRIPT), str(job)],
        env=stage,
        cwd=stage["STAGE"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def requeued(stage: dict[str, str]) -> bool:
    path = Path(stage["STAGE"]) / "scontrol"
    return path.exists() and path.read_text() == "requeue 77\n"


def test_bash_and_slurm_understand_the_script() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0
    lines = SCRIPT.read_text().splitlines()
    last_option = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[:last_option]), (
        "Slurm stops reading at the first command"
    )


def test_a_job_that_loses_a_node_and_finishes_ends_with_0(stage: dict[str, str]) -> None:
    folder = Path(stage["STAGE"])
    source = (
        "import os, signal\n"
        "print('world', os.environ['WORLD_SIZE'], flush=True)\n"
        "if os.environ['WORLD_SIZE'] == '2': signal.pause()\n"
    )
    (folder / "policy.toml").write_text("settle_s = 5\n")
    options = {"MIN": "1", "NODE_TTL": "2", "POLICY": str(folder / "policy.toml")}
    done = batch({**stage, **{f"ELASTICD_{name}": value for name, value in options.items()}}, source)
    assert done.stdout is not None
    assert [done.stdout.readline() for _ in range(2)] == ["world 2\n"] * 2
    os.kill(int((folder / "agents").read_text().split()[0]), signal.SIGKILL)
    out, _ = done.communicate(timeout=PATIENCE_S)
    assert out == "world 1\n"
    assert done.returncode == 0, "though one node's code is 137"
    assert not requeued(stage)


def test_when_its_time_is_up_it_drains_all_nodes_and_is_queued_again(stage: dict[str, str]) -> None:
    done = batch(stage, "import signal; print('there', flush=True); signal.pause()\n")
    assert done.stdout is not None
    for _ in range(2):
        assert done.stdout.readline() == "there\n"
    done.send_signal(signal.SIGTERM)  # --signal=B:TERM sends the signal to the script alone
    done.communicate(timeout=PATIENCE_S)
    assert done.returncode == 143
    assert (Path(stage["STAGE"]) / "scancel").read_text() == "--signal=TERM 77\n"
    assert requeued(stage)


def test_a_job_that_cannot_start_is_not_queued_again(stage: dict[str, str]) -> None:
    message = Path(stage["STAGE"]) / "message"
    done = batch({**stage, "ELASTICD_TERMINATION_LOG": str(message)}, "raise (\n")
    done.communicate(timeout=PATIENCE_S)
    assert done.returncode == 2
    assert not requeued(stage)
    assert "the script has a syntax error" in message.read_text(), "which says why"


def test_without_an_etcd_it_says_what_is_missing(stage: dict[str, str]) -> None:
    env = {k: v for k, v in stage.items() if k != "ELASTICD_ETCD"}
    done = subprocess.run(["bash", SCRIPT, "job.py"], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0 and "name the etcd that the nodes meet in" in done.stderr
