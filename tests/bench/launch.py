"""Launches the measured job: under elasticd, under torchrun with its defaults and tuned, and by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.ports import free_port

JOB = Path(__file__).with_name("job.py")
JOB_IN_PLACE = Path(__file__).with_name("job_in_place.py")
ROOT = str(Path(__file__).parents[2])
BIN = Path(sys.executable).parent

# Without this variable torchrun does not recover from a killed worker at all: restarted workers read the keys
# of the last attempt (PyTorch 2.13). Every comparison sets the variable, to torchrun's advantage.
TORCHRUN_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(slots=True)
class Launched:
    """The agents that were started, in order. ``starts``: by number, the functions that start later
    agents."""

    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    starts: Callable[[int], subprocess.Popen[bytes]] | None = None

    def start(self, number: int) -> subprocess.Popen[bytes]:
        assert self.starts is not None
        agent = self.starts(number)
        self.agents.append(agent)
        return agent

    def stop(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        for agent in self.agents:
            try:
                agent.wait(15)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


def spawn(
    argv: Sequence[object], steps: Path, log: Path, env: Mapping[str, str] = {}
) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(
            [str(a) for a in argv],
            env={**os.environ, "OMP_NUM_THREADS": "1", "BENCH_STEPS": str(steps), **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def elasticd_alone(
    workers: int, steps: Path, log: Path, *, job: Sequence[object] = (JOB,), env: Mapping[str, str] = {}
) -> Launched:
    argv = [BIN / "elasticd", "run", "--min", workers, "--max", workers, "--max-restarts", 1000]
    argv += ["--plain", "--log-format", "json", *job]
    return Launched([spawn(argv, steps, log, env)])


def elasticd_in_place(
    workers: int,
    steps: Path,
    log: Path,
    *,
    spares: int,
    job: Path = JOB_IN_PLACE,
    env: Mapping[str, str] = {},
) -> Launched:
    argv = [BIN / "elasticd", "run", "--min", 1, "--max", workers, "--slots", workers, "--spares", spares]
    argv += ["--max-restarts", 1000, "--plain", "--log-format", "json", job]
    return Launched([spawn([str(a) for a in argv], steps, log, {"PYTHONPATH": ROOT, **env})])


def _torchrun(log: Path) -> list[object]:
    """Return torchrun's command. It names a folder for logs: otherwise torchrun leaves one in the
    temporary folder."""
    return [BIN / "torchrun", "--log-dir", log.with_name("torchrun-logs")]


def torchrun_alone(
    workers: int,
    steps: Path,
    log: Path,
    *,
    monitor_s: float = 0.1,
    job: Sequence[object] = (JOB,),
    env: Mapping[str, str] = {},
) -> Launched:
    argv = [*_torchrun(log), "--standalone", "--nproc-per-node", workers, "--max-restarts", 1000]
    argv += ["--monitor-interval", monitor_s, *job]
    return Launched([spawn(argv, steps, log, {**TORCHRUN_ENV, **env})])


def elasticd_nodes(nodes: int, least: int, etcd: str, job: str, steps: Path, log: Path) -> Launched:
    launched = Launched()
    policy = log.with_name("policy.toml")
    policy.write_text("settle_s = 5\n")
    for n in range(nodes):
        argv = [BIN / "elasticd", "run", "--etcd", etcd, "--job", job, "--node", f"n{n}", "--slots", 1]
        argv += ["--min", least, "--max", nodes, "--policy", policy, JOB]
        launched.agents.append(spawn([str(a) for a in argv], steps, log))
    return launched


def elasticd_grown(slots: Sequence[int], etcd: str, job: str, steps: Path, log: Path) -> Launched:
    """Launch nodes with so many slots each, whose workers keep their process. Each node starts on request."""

    def node(number: int) -> subprocess.Popen[bytes]:
        argv = [BIN / "elasticd", "run", "--etcd", etcd, "--job", job, "--node", f"n{number}"]
        argv += ["--slots", slots[number], "--min", 1, "--max", sum(slots), "--max-restarts", 1000]
        return spawn([*argv, "--plain", JOB_IN_PLACE], steps, log, {"PYTHONPATH": ROOT})

    return Launched(starts=node)


def torchrun_grown(slots: Sequence[int], steps: Path, log: Path) -> Launched:
    """Launch the same nodes with torchrun. Its last call is shortened, which favours torchrun."""
    port, job = free_port(), uuid.uuid4().hex[:6]

    def node(number: int) -> subprocess.Popen[bytes]:
        argv = [*_torchrun(log), "--nnodes", f"1:{len(slots)}", "--nproc-per-node", slots[number]]
        argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", job]
        argv += ["--rdzv-conf", f"is_host={int(number == 0)},last_call_timeout=1", "--max-restarts", 1000]
        return spawn([*argv, "--local-addr", "127.0.0.1", JOB], steps, log, TORCHRUN_ENV)

    return Launched(starts=node)


def torchrun_nodes(nodes: int, least: int, job: str, steps: Path, log: Path, conf: str = "") -> Launched:
    """Launch torchrun's agents; agent 0 hosts the store. ``conf``: --rdzv-conf."""
    port = free_port()
    launched = Launched()
    for n in range(nodes):
        argv = [*_torchrun(log), "--nnodes", f"{least}:{nodes}", "--nproc-per-node", 1]
        argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", job]
        argv += ["--max-restarts", 1000, "--local-addr", "127.0.0.1"]
        argv += ["--rdzv-conf", ",".join(filter(None, [f"is_host={int(n == 0)}", conf])), JOB]
        launched.agents.append(spawn([str(a) for a in argv], steps, log, TORCHRUN_ENV))
    return launched


def by_hand(workers: int, steps: Path, log: Path, env: Mapping[str, str]) -> Launched:
    """Start the same processes without a launcher, with their environment only."""
    port = free_port()
    launched = Launched()
    for rank in range(workers):
        mine = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **env,
        }
        launched.agents.append(spawn([sys.executable, "-u", str(JOB)], steps, log, mine))
    return launched
