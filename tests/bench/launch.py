"""The ways to launch the measured job: elasticd, torchrun as it comes and tuned, and by hand."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

JOB = Path(__file__).with_name("job.py")
JOB_IN_PLACE = Path(__file__).with_name("job_in_place.py")
ROOT = str(Path(__file__).parents[2])
BIN = Path(sys.executable).parent

# Without it torchrun does not come back from a killed worker at all: restarted workers read the
# last attempt's keys (pytorch 2.13). Every comparison sets it, to torchrun's advantage.
TORCHRUN_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(slots=True)
class Launched:
    """Agents that were started, in order."""

    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

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


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def spawn(
    argv: Sequence[str | Path], steps: Path, log: Path, env: Mapping[str, str] = {}
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


def elasticd_alone(workers: int, steps: Path, log: Path) -> Launched:
    argv = [BIN / "elasticd", "run", "--min", workers, "--max", workers, "--max-restarts", 1000, JOB]
    return Launched([spawn([str(a) for a in argv], steps, log)])


def elasticd_in_place(workers: int, spares: int, steps: Path, log: Path) -> Launched:
    argv = [BIN / "elasticd", "run", "--min", 1, "--max", workers, "--slots", workers, "--spares", spares]
    argv += ["--max-restarts", 1000, "--plain", JOB_IN_PLACE]
    return Launched([spawn([str(a) for a in argv], steps, log, {"PYTHONPATH": ROOT})])


def torchrun_alone(workers: int, steps: Path, log: Path, *, monitor_s: float = 0.1) -> Launched:
    argv = [BIN / "torchrun", "--standalone", "--nproc-per-node", workers, "--max-restarts", 1000]
    argv += ["--monitor-interval", monitor_s, JOB]
    return Launched([spawn([str(a) for a in argv], steps, log, TORCHRUN_ENV)])


def elasticd_nodes(nodes: int, least: int, etcd: str, job: str, steps: Path, log: Path) -> Launched:
    launched = Launched()
    for n in range(nodes):
        argv = [BIN / "elasticd", "run", "--etcd", etcd, "--job", job, "--node", f"n{n}", "--slots", 1]
        argv += ["--min", least, "--max", nodes, "--settle", 5, JOB]
        launched.agents.append(spawn([str(a) for a in argv], steps, log))
    return launched


def torchrun_nodes(nodes: int, least: int, job: str, steps: Path, log: Path, conf: str = "") -> Launched:
    """Agent 0 hosts the store. ``conf``: --rdzv-conf."""
    port = free_port()
    launched = Launched()
    for n in range(nodes):
        argv = [BIN / "torchrun", "--nnodes", f"{least}:{nodes}", "--nproc-per-node", 1]
        argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", job]
        argv += ["--max-restarts", 1000, "--local-addr", "127.0.0.1"]
        argv += ["--rdzv-conf", ",".join(filter(None, [f"is_host={int(n == 0)}", conf])), JOB]
        launched.agents.append(spawn([str(a) for a in argv], steps, log, TORCHRUN_ENV))
    return launched


def by_hand(workers: int, steps: Path, log: Path, env: Mapping[str, str]) -> Launched:
    """The same processes without any launcher: nothing but their environment."""
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
