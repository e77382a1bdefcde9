"""The checks of ``elasticd doctor``: each examines one thing that a job needs, and yields findings."""

from __future__ import annotations

import json
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import psutil

from elasticd import torchparts
from elasticd.cli.interfaces import host_addresses, host_is_loopback, is_loopback
from elasticd.core.facts import Node
from elasticd.etcd.access import EtcdAccess, hosts_and_ports
from elasticd.etcd.errors import StoreError
from elasticd.etcd.examine import Certificate, Endpoint, Examined
from elasticd.telemetry import describe

PROBE: Final = Path(__file__).with_name("probe.py")
PROBE_S: Final = 180.0  # a first import of torch over a network file system takes minutes
CONNECT_S: Final = 3.0

WRITE_SLOW_S = 0.1  # etcd recommends 10 ms for its disk; ten times as much suggests a shared disk
CLOCK_OFF_S, CLOCK_WRONG_S = 2.0, 30.0
EXPIRES_SOON_S = 14 * 86400.0
SHM_SMALL_BYTES, SHM_TINY_BYTES = 10**9, 16 * 10**6
FILES_FEW, FILES_TOO_FEW = 4096, 512
TASKS_FEW = 512
# The first release of each line without known data loss or security holes.
SAFE_ETCD = {(3, 5): 30, (3, 6): 11}


class Grade(StrEnum):
    FINE = "fine"
    ADVICE = "advice"  # a job can run, and may have problems
    WRONG = "wrong"  # a job cannot run, or soon fails


@dataclass(frozen=True, slots=True)
class Finding:
    """``says``: what was found; ``do``: what to do, empty if fine. ``later``: the fault may pass by itself,
    such as an etcd that has not started yet."""

    grade: Grade
    says: str
    do: str = ""
    later: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """The node that is to run a job. ``examined``: what was found at the etcd of ``access``; None without
    one, as only standalone runs are possible then. ``address``: where other nodes are to reach this one.
    ``environ``: of the workers. ``probed``: the output of ``probe.py``, see ``ask_python``."""

    access: EtcdAccess | None
    examined: Examined | None
    job: str | None
    address: str
    node_ttl_s: float
    environ: Mapping[str, str]
    script: str | None
    probed: Future[Mapping[str, Mapping[str, Any]]]

    def others_may_join(self) -> bool:
        """Whether nodes on other machines may join: an etcd is given that they can reach."""
        return self.access is not None and not all(
            host_is_loopback(host) for host, _ in hosts_and_ports(self.access.endpoints)
        )


def fine(says: str) -> Finding:
    return Finding(Grade.FINE, says)


def advice(says: str, do: str) -> Finding:
    return Finding(Grade.ADVICE, says, do)


def wrong(says: str, do: str, *, later: bool = False) -> Finding:
    return Finding(Grade.WRONG, says, do, later)


# ---------------------------------------------------------------- etcd


def etcd(candidate: Candidate) -> Iterator[Finding]:
    """Whether the endpoints respond, and are fast enough for the leases of nodes."""
    if candidate.examined is None:
        yield _embedded()
        return
    endpoints = candidate.examined.endpoints
    bad = [e for e in endpoints if e.error]
    good = [e for e in endpoints if not e.error]
    if not good:
        worst = next((e for e in bad if not e.unreachable), bad[0])
        do = (
            "start etcd, or correct --etcd"
            if worst.unreachable
            else "correct --etcd and what goes with it (--etcd-cacert, --etcd-cert, --etcd-key, --etcd-user)"
        )
        yield wrong(worst.error, do, later=worst.unreachable)
        return
    for endpoint in bad:
        yield Finding(
            Grade.ADVICE if endpoint.unreachable else Grade.WRONG,
            f"{len(good)} of {len(endpoints)} endpoints answer: {endpoint.error}",
            "repair that endpoint: if one more member is lost, etcd may stop",
        )
    yield _pace(good, candidate.node_ttl_s)
    for version in sorted({e.version for e in good}):
        yield from _version(version)


def _embedded() -> Finding:
    """Judge the etcd that a standalone run starts."""
    from elasticd.etcd.embedded import fault_of, find_etcd, version_of  # late: grpc is slow to import

    try:
        binary = find_etcd()
    except FileNotFoundError as error:
        return advice(f"no standalone run is possible: {error}", "install etcd, or use --etcd")
    if fault := fault_of(version_of(binary)):
        return advice(f"standalone runs use {binary}: {fault}", "put a newer etcd on PATH, or use --etcd")
    return fine(f"standalone runs use {binary}")


def _pace(good: Sequence[Endpoint], node_ttl_s: float) -> Finding:
    slowest = max(good, key=lambda e: max(e.writes_s))
    said = f"writes take {_times(slowest.writes_s)}, reads {_times(slowest.reads_s)}"
    worst_s = max(slowest.writes_s + slowest.reads_s)
    if worst_s > node_ttl_s / 5:
        return wrong(
            f"etcd is too slow for leases of {node_ttl_s:g} s: {said} at {slowest.endpoint}",
            "give etcd its own disk (an SSD) and a fast network, or raise --node-ttl",
        )
    if max(slowest.writes_s) > WRITE_SLOW_S:
        return advice(f"etcd is slow: {said} at {slowest.endpoint}", "give etcd its own disk, an SSD")
    answer = "the endpoint answers" if len(good) == 1 else f"{len(good)} endpoints answer"
    return fine(f"{answer}; {said}")


def _times(durations_s: Sequence[float]) -> str:
    return f"{statistics.median(durations_s) * 1000:.1f} ms (at most {max(durations_s) * 1000:.1f} ms)"


def _version(version: str) -> Iterator[Finding]:
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    line, patch = numbers[:2], numbers[2] if len(numbers) > 2 else 0
    if line in SAFE_ETCD and patch >= SAFE_ETCD[line]:
        return
    if line > max(SAFE_ETCD):
        return
    safe = " or ".join(f"{a}.{b}.{patch}" for (a, b), patch in SAFE_ETCD.items())
    yield advice(
        f"etcd {version or '?'} has known faults that later releases fix",
        f"use {safe} or newer",
    )


def clock(candidate: Candidate) -> Iterator[Finding]:
    """Whether etcd's clock and this machine's agree. Leases do not depend on the clocks; certificates, logs
    and the end of a quarantine do."""
    endpoints = candidate.examined.endpoints if candidate.examined is not None else ()
    known = [(_apart(*e.ahead_s), e) for e in endpoints if e.ahead_s is not None]
    if not known:
        return
    apart, endpoint = max(known, key=lambda pair: abs(pair[0]))
    if abs(apart) < CLOCK_OFF_S:
        yield fine(f"agrees with etcd's to {max(1.0, abs(apart)):.0f} s")
        return
    which = "behind" if apart > 0 else "ahead of"
    says = f"this machine's clock is {abs(apart):.0f} s {which} that of etcd at {endpoint.endpoint}"
    do = "synchronize both clocks by NTP (chrony, systemd-timesyncd)"
    yield Finding(Grade.WRONG if abs(apart) >= CLOCK_WRONG_S else Grade.ADVICE, says, do)


def _apart(low: float, high: float) -> float:
    """Return the least difference of two clocks, if one is ahead by between ``low`` and ``high``."""
    return max(low, 0.0) + min(high, 0.0)


def certificates(candidate: Candidate) -> Iterator[Finding]:
    """Whether certificates are valid for long enough. The check of etcd judges host and signer."""
    found = candidate.examined
    if found is None:
        return
    all_there_are = [*found.certificates, *(e.certificate for e in found.endpoints if e.certificate)]
    now = time.time()
    bad = [finding for c in all_there_are for finding in _time_of(c, now)]
    if found.open_key:
        says = f"anybody on this machine can read the key {found.open_key}"
        bad.append(advice(says, f"chmod o= {found.open_key}"))
    yield from bad
    if all_there_are and not bad:
        first = min(all_there_are, key=lambda c: c.not_after)
        yield fine(f"all are valid; the first to expire, {first.of}, has {_days(first.not_after - now)} left")


def _time_of(certificate: Certificate, now: float) -> Iterator[Finding]:
    of, left_s = certificate.of, certificate.not_after - now
    if left_s <= 0:
        yield wrong(f"{of} expired {_days(-left_s)} ago", "renew the certificate")
    elif certificate.not_before > now:
        says = f"{of} is not valid for another {_days(certificate.not_before - now)}"
        yield wrong(says, "see whether this machine's clock is right")
    elif left_s < EXPIRES_SOON_S:
        yield advice(f"{of} expires in {_days(left_s)}", "renew the certificate before then")


def _days(seconds: float) -> str:
    return describe.count(int(seconds // 86400), "day") if seconds >= 86400 else describe.span(seconds)


# ---------------------------------------------------------------- network


def address(candidate: Candidate) -> Iterator[Finding]:
    """Whether other nodes can reach this node at its address, as far as this can be seen from here."""
    own = candidate.address
    if why := _listen_and_connect(own):
        yield wrong(
            f"a process cannot listen on {own} and connect to it: {why}",
            "give --address an address of this machine that the firewall does not block",
        )
    elif candidate.others_may_join() and host_is_loopback(own):
        yield wrong(
            f"other nodes cannot reach this node at {own}, a loopback address",
            "give --address the address at which other nodes reach this node (in Kubernetes: status.podIP)",
        )
    else:
        where = "workers of this machine meet" if candidate.access is None else "other nodes reach this node"
        yield fine(f"{where} at {own}")


def _listen_and_connect(own: str) -> str:
    try:
        family = socket.getaddrinfo(own, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((own, 0), family=family) as server:
            return connect(own, server.getsockname()[1])
    except OSError as error:
        return error.strerror or str(error)


def connect(host: str, port: int) -> str:
    """Return the error of a connection to this address; empty if it succeeds."""
    try:
        socket.create_connection((host.strip("[]"), port), timeout=CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def other_nodes(candidate: Candidate) -> Iterator[Finding]:
    """Whether the job's other nodes can be reached."""
    tried = [n for n in _nodes(candidate) if n.address != candidate.address]
    errors = {node: why for node in tried if (why := connect(node.address, node.store_port))}
    for node, why in errors.items():
        yield wrong(
            f"node {node.name} of the job cannot be reached at {node.address}:{node.store_port}: {why}",
            "allow TCP between the nodes on all ports above 1023",
        )
    if tried and not errors:
        yield fine(f"the job's other nodes can be reached: {', '.join(node.name for node in tried)}")


def _nodes(candidate: Candidate) -> list[Node]:
    if candidate.access is None or candidate.job is None:
        return []
    from elasticd.etcd.blocking_client import Client  # late: grpc is slow to import

    try:
        with Client(candidate.access) as client:
            listing, _ = client.list(candidate.job, "nodes/")
    except StoreError:
        return []  # the check of etcd reports the error
    return [entry.fact for entry in listing.entries if isinstance(entry.fact, Node)]


def network(candidate: Candidate) -> Iterator[Finding]:
    """Whether gloo will choose an interface that other nodes can reach. The check of torch forms groups, and
    so finds that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no interface."""
    up = [name for name, interface in psutil.net_if_stats().items() if interface.isup]
    gloo = candidate.environ.get("GLOO_SOCKET_IFNAME", "")
    bad = []
    if candidate.others_may_join() and not gloo and all(map(is_loopback, resolved := host_addresses())):
        said = f"resolves to {', '.join(resolved)}" if resolved else "does not resolve"
        bad.append(
            wrong(
                f"gloo would use loopback, as this machine's name {socket.gethostname()} {said}",
                "give --address an address of this machine, or correct its name in /etc/hosts",
            )
        )
    if candidate.others_may_join() and not set(up) - {"lo"}:
        bad.append(wrong("no interface but loopback is up", "connect this machine to a network"))
    yield from bad or [fine(f"interfaces {', '.join(up)}{f'; gloo uses {gloo}' if gloo else ''}")]


# ---------------------------------------------------------------- memory and limits


def shared_memory(_: Candidate, folder: str = "/dev/shm") -> Iterator[Finding]:  # noqa: S108  # what is checked
    """Whether shared memory suffices. DataLoader workers use it for batches, NCCL and gloo for data."""
    do = f"enlarge {folder}: docker run --shm-size=8g; in Kubernetes an emptyDir of medium Memory at {folder}"
    try:
        found = psutil.disk_usage(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        yield wrong(f"{folder} cannot be used: {error.strerror}", do)
        return
    says = f"{describe.size(found.free)} of {describe.size(found.total)} are free in {folder}"
    if found.free < SHM_TINY_BYTES:
        yield wrong(f"only {says}", do)
    elif found.total < SHM_SMALL_BYTES:
        yield advice(f"{says}, which DataLoader workers soon fill", do)
    else:
        yield fine(says)


def open_files(_: Candidate) -> Iterator[Finding]:
    """Whether a process may open enough files: sockets between workers, DataLoader workers."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    says = f"a process may have {soft} files open"
    do = "raise the limit: ulimit -n 65536; in systemd LimitNOFILE=65536; docker run --ulimit nofile=65536"
    if soft == resource.RLIM_INFINITY:
        yield fine("files may be opened without limit")
    elif soft < FILES_TOO_FEW:
        yield wrong(f"{says}, fewer than one worker with DataLoader workers needs", do)
    elif soft < FILES_FEW:
        yield advice(f"{says}, which many DataLoader workers exceed", do)
    else:
        yield fine(says)


def tasks(_: Candidate, cgroup: Path = Path("/sys/fs/cgroup")) -> Iterator[Finding]:
    """Whether this container may start enough processes and threads."""
    for folder in (cgroup, cgroup / "pids"):  # cgroup version 2, then 1
        try:
            most = int((folder / "pids.max").read_text())
            left = most - int((folder / "pids.current").read_text())
        except (OSError, ValueError):  # cgroups have the other version, or the limit is "max"
            continue
        if left < TASKS_FEW:
            yield advice(
                f"only {left} more processes and threads may be started here (of {most})",
                "raise the limit: docker run --pids-limit; systemd's TasksMax=; Kubernetes' podPidsLimit",
            )


# ---------------------------------------------------------------- the workers' Python


def ask_python(
    script: str | None, *, module: bool, environ: Mapping[str, str]
) -> Mapping[str, Mapping[str, Any]]:
    """Run ``probe.py`` with the workers' Python, and return its two answers: "torch" and "imports".
    ``environ``: of the workers."""
    python = environ.get("PYTHON_EXEC") or sys.executable
    words = [] if script is None else ["-m", script] if module else [script]
    said = []
    try:
        done = subprocess.run(
            [python, str(PROBE), *words],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_S,
        )
    except subprocess.TimeoutExpired:
        failed = f"it took more than {PROBE_S:g} s"
    except OSError as error:
        failed = f"{python} cannot be run: {error.strerror}"
    else:
        last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        failed = f"{python} ended with code {done.returncode}: {last[0]}"
        said = [json.loads(line) for line in done.stdout.splitlines()]
    missing = {"error": failed}
    return dict(zip(("torch", "imports"), [*said, missing, missing], strict=False))


def gpus(candidate: Candidate, devices: Path = Path("/dev")) -> Iterator[Finding]:
    """Whether workers can use the GPUs of the machine."""
    torch = candidate.probed.result()["torch"]
    there = sum(1 for path in devices.iterdir() if re.fullmatch(r"nvidia\d+|kfd", path.name))
    release = f"torch {torch.get('version')}"
    if names := torch.get("gpus"):
        yield fine(f"{len(names)} ({', '.join(sorted(set(names)))}), {torch['build']}")
        if torch["build"].startswith("CUDA") and find_spec("pynvml") is None:
            yield advice("the GPUs have no metrics without nvidia-ml-py", "pip install 'elasticd[gpu]'")
    elif not there:
        yield fine("this machine has none: workers train on the CPU")
    elif error := torch.get("gpu_error"):
        yield wrong(
            f"{release} ({torch['build']}) cannot use the GPUs in {devices}: {error}",
            "see `nvidia-smi` and `dmesg`; a driver older than torch's CUDA needs an upgrade; "
            "a container needs docker run --gpus all, or nvidia.com/gpu",
        )
    elif torch.get("version"):
        yield wrong(
            f"this machine has GPUs, but {release} was built without CUDA", "install a torch built for CUDA"
        )


def torch(candidate: Candidate) -> Iterator[Finding]:
    """Whether workers can import torch and form groups."""
    said = candidate.probed.result()["torch"]
    if error := said.get("error"):
        python = candidate.environ.get("PYTHON_EXEC") or sys.executable
        yield wrong(f"{python} cannot import torch: {error}", "install torch for that Python")
        return
    if too_old := torchparts.too_old(said["version"]):
        yield wrong(too_old, f"pip install 'torch>={torchparts.oldest()}'")
        return
    failed = {backend: why for backend, why in said["groups"].items() if why}
    for backend, why in failed.items():
        yield wrong(
            f"a group of {backend} cannot be formed here: {why}",
            f"see {backend.upper()}_SOCKET_IFNAME, and whether this machine's name resolves",
        )
    if not failed:
        yield fine(f"torch {said['version']} forms groups with {' and '.join(said['groups'])}")


def imports(candidate: Candidate) -> Iterator[Finding]:
    """Whether the imports of the script work."""
    if candidate.script is None:
        return
    said = candidate.probed.result()["imports"]
    if error := said.get("error"):
        yield wrong(
            f"the imports of {candidate.script} cannot be found: {error}", "correct the script or its name"
        )
        return
    for missing in said["missing"]:
        yield wrong(missing, "install it where the workers' Python finds it (PYTHON_EXEC, PYTHONPATH)")
    if not said["missing"]:
        yield fine(f"{said['working']} imports of {candidate.script} work")


CHECKS: Final[Mapping[str, Callable[[Candidate], Iterable[Finding]]]] = {
    "etcd": etcd,
    "certificates": certificates,
    "clock": clock,
    "address": address,
    "other nodes": other_nodes,
    "network": network,
    "shared memory": shared_memory,
    "open files": open_files,
    "tasks": tasks,
    "GPUs": gpus,
    "torch": torch,
    "imports": imports,
}
