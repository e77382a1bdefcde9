"""Judges the facts: findings, each with a sentence and advice. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elasticd import torchparts
from elasticd.cli.doctor.facts import (
    AddressFacts,
    DriverFacts,
    HttpFacts,
    ImportFacts,
    LimitFacts,
    MemoryFacts,
    NetworkFacts,
    PortFacts,
    TorchFacts,
)
from elasticd.cli.interfaces import Interface
from elasticd.etcd.examine import Certificate, Endpoint, Examined

MIB, GIB = 2**20, 2**30
SHM = "/dev/shm"  # noqa: S108  # the folder that is judged

WRITE_SLOW_S = 0.1  # etcd recommends 10 ms for its disk; ten times as much suggests a shared disk
CLOCK_OFF_S, CLOCK_WRONG_S = 2.0, 30.0
EXPIRES_SOON_S = 14 * 86400.0
SHM_SMALL_BYTES, SHM_TINY_BYTES = GIB, 16 * MIB
FILES_FEW, FILES_TOO_FEW = 4096, 512
TASKS_FEW = 512
PORTS_FEW, PORTS_TOO_FEW = 1000, 64
SAFE_ETCD = {(3, 5): 30, (3, 6): 11}  # the first release per line without known data loss or security hole


class Grade(StrEnum):
    FINE = "fine"
    ADVICE = "advice"  # a job can run, and may have problems
    WRONG = "wrong"  # a job cannot run, or soon fails


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``says``: what was found; ``do``: what to do, empty if fine. ``later``: the
    fault may pass by itself, such as an etcd that has not started yet."""

    check: str
    grade: Grade
    says: str
    do: str = ""
    later: bool = False


def _fine(check: str, says: str) -> Finding:
    return Finding(check, Grade.FINE, says)


def _advice(check: str, says: str, do: str) -> Finding:
    return Finding(check, Grade.ADVICE, says, do)


def _wrong(check: str, says: str, do: str, *, later: bool = False) -> Finding:
    return Finding(check, Grade.WRONG, says, do, later)


# ---------------------------------------------------------------- etcd


def etcd(facts: Examined, node_ttl_s: float) -> Iterator[Finding]:
    """Judge whether the endpoints respond, and are fast enough for leases of ``node_ttl_s``."""
    bad = [e for e in facts.endpoints if e.error]
    good = [e for e in facts.endpoints if not e.error]
    if not good:
        mine = [e for e in bad if not e.unreachable]
        worst = (mine or bad)[0]
        do = (
            "start etcd, or correct --etcd"
            if worst.unreachable
            else "correct --etcd and what goes with it (--etcd-cacert, --etcd-cert, --etcd-key, --etcd-user)"
        )
        yield _wrong("etcd", worst.error, do, later=worst.unreachable)
        return
    for endpoint in bad:
        grade = _advice if endpoint.unreachable else _wrong
        yield grade(
            "etcd",
            f"{len(good)} of {len(facts.endpoints)} endpoints answer: {endpoint.error}",
            "mend it, or the loss of one more member may stop etcd",
        )
    yield _pace(good, node_ttl_s)
    for version in sorted({e.version for e in good}):
        yield from _version(version)


def _pace(good: Sequence[Endpoint], node_ttl_s: float) -> Finding:
    slowest = max(good, key=lambda e: percentile(e.writes_s, 99))
    write_s, read_s = percentile(slowest.writes_s, 99), percentile(slowest.reads_s, 99)
    said = (
        f"writes take {_ms(percentile(slowest.writes_s, 50))} (99 %: {_ms(write_s)}), "
        f"reads {_ms(percentile(slowest.reads_s, 50))} (99 %: {_ms(read_s)})"
    )
    if max(write_s, read_s) > node_ttl_s / 5:
        return _wrong(
            "etcd",
            f"etcd is too slow for leases of {node_ttl_s:g} s: {said} at {slowest.endpoint}",
            "give it a disk of its own (an SSD) and a near network, or lengthen --node-ttl",
        )
    if write_s > WRITE_SLOW_S:
        return _advice(
            "etcd", f"etcd is slow: {said} at {slowest.endpoint}", "give it a disk of its own, an SSD"
        )
    answer = "the endpoint answers" if len(good) == 1 else f"{len(good)} endpoints answer"
    return _fine("etcd", f"{answer}; {said}")


def embedded(binary: str, fault: str, missing: str) -> Finding:
    """Judge the etcd that a standalone run starts. ``missing``: why there is none."""
    if missing:
        return _advice("etcd", f"no standalone run is possible: {missing}", "install etcd, or use --etcd")
    if fault:
        return _advice(
            "etcd", f"standalone runs use {binary}: {fault}", "put a newer etcd on PATH, or use --etcd"
        )
    return _fine("etcd", f"standalone runs use {binary}")


def _version(version: str) -> Iterator[Finding]:
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    line, patch = numbers[:2], numbers[2] if len(numbers) > 2 else 0
    if line in SAFE_ETCD and patch >= SAFE_ETCD[line]:
        return
    if line > max(SAFE_ETCD):
        return
    safe = " or ".join(f"{a}.{b}.{patch}" for (a, b), patch in SAFE_ETCD.items())
    yield _advice(
        "etcd",
        f"etcd {version or '?'} has known faults that were mended since",
        f"use {safe} or newer where jobs matter",
    )


def clock(facts: Examined) -> Iterator[Finding]:
    """Judge whether etcd's clock and this machine's agree. Leases do not depend on the clocks; certificates,
    logs and the end of a quarantine do."""
    known = [(e, e.ahead_s) for e in facts.endpoints if e.ahead_s is not None]
    if not known:
        return
    endpoint, (low, high) = max(known, key=lambda pair: (_apart(*pair[1]), max(map(abs, pair[1]))))
    apart = _apart(low, high)
    if apart < CLOCK_OFF_S:
        yield _fine("clock", f"agrees with etcd's to {max(abs(low), abs(high)):.1f} s")
        return
    which = "behind" if low > 0 else "ahead of"
    says = f"this machine's clock is {apart:.0f} s {which} that of etcd at {endpoint.endpoint}"
    do = "have both set by NTP (chrony, systemd-timesyncd)"
    yield _wrong("clock", says, do) if apart >= CLOCK_WRONG_S else _advice("clock", says, do)


def _apart(low: float, high: float) -> float:
    """Return the least difference of two clocks, if one is ahead by between ``low`` and ``high``."""
    return low if low > 0 else -high if high < 0 else 0.0


def certificates(facts: Examined, now: float) -> Iterator[Finding]:
    """Judge the validity period of certificates. ``etcd`` judges host and signer, by connecting."""
    all_there_are = [*facts.certificates, *(e.certificate for e in facts.endpoints if e.certificate)]
    bad = [finding for c in all_there_are for finding in _time_of(c, now)]
    yield from bad
    if facts.open_key:
        bad.append(
            _advice(
                "certificates",
                f"anybody on this machine can read the key {facts.open_key}",
                f"chmod o= {facts.open_key}",
            )
        )
        yield bad[-1]
    if all_there_are and not bad:
        first = min(all_there_are, key=lambda c: c.not_after)
        yield _fine(
            "certificates",
            f"in order; the first to expire, {first.of}, has {_days(first.not_after - now)} left",
        )


def _time_of(certificate: Certificate, now: float) -> Iterator[Finding]:
    of, left_s = certificate.of, certificate.not_after - now
    if left_s <= 0:
        yield _wrong("certificates", f"{of} expired {_days(-left_s)} ago", "have a new one made")
    elif certificate.not_before > now:
        yield _wrong(
            "certificates",
            f"{of} is not valid for another {_days(certificate.not_before - now)}",
            "see whether this machine's clock is right",
        )
    elif left_s < EXPIRES_SOON_S:
        yield _advice("certificates", f"{of} expires in {_days(left_s)}", "have a new one made before")


# ---------------------------------------------------------------- address, ports, network


def address(facts: AddressFacts) -> Iterator[Finding]:
    """Judge whether other nodes can reach this node at its address."""
    if facts.error:
        yield _wrong(
            "address",
            f"one cannot listen on {facts.address} and connect to it: {facts.error}",
            "give --address an address of this machine that its firewall lets through",
        )
    elif facts.shared and facts.loopback and not facts.etcd_is_local:
        yield _wrong(
            "address",
            f"other nodes would be told to reach this one at {facts.address}, which is each machine itself",
            "give --address the address that others know it by (in Kubernetes: status.podIP)",
        )
    else:
        where = "others reach this node at" if facts.shared else "workers of this machine meet at"
        yield _fine("address", f"{where} {facts.address}")
    for peer in facts.peers:
        if peer.error:
            yield _wrong(
                "address",
                f"node {peer.node} of the job cannot be reached at {peer.place} from here: {peer.error}",
                "let TCP through between the nodes, on all ports above 1023",
            )
    if facts.peers and not any(peer.error for peer in facts.peers):
        yield _fine("address", f"reaches the job's other nodes: {', '.join(p.node for p in facts.peers)}")


def ports(facts: PortFacts) -> Iterator[Finding]:
    """Judge the free ports: each round's store, and each connection between workers, takes a port that the
    kernel chooses."""
    free = facts.high - facts.low + 1 - facts.used
    says = f"{free} ports of {facts.low} to {facts.high} are free"
    do = "widen net.ipv4.ip_local_port_range, or end what holds them (see `ss -s`)"
    if free < PORTS_TOO_FEW:
        yield _wrong("ports", f"only {says}", do)
    elif free < PORTS_FEW:
        yield _advice("ports", f"only {says}", do)
    else:
        yield _fine("ports", says)


def http(facts: HttpFacts) -> Iterator[Finding]:
    """Judge whether metrics can be served at --http. A job runs without them."""
    if not facts.error:
        yield _fine("http", f"metrics can be served at {facts.place}")
    elif facts.agent:
        yield _fine("http", f"an agent serves metrics at {facts.place}")
    else:
        yield _advice(
            "http",
            f"metrics cannot be served at {facts.place}: {facts.error}",
            "give --http another address or port",
        )


def network(facts: NetworkFacts, own: AddressFacts) -> Iterator[Finding]:
    """Judge whether gloo and NCCL will choose an interface that other nodes can reach."""
    findings = [
        *_named_interfaces("GLOO_SOCKET_IFNAME", facts.gloo, facts.interfaces),
        *_named_interfaces("NCCL_SOCKET_IFNAME", facts.nccl, facts.interfaces),
    ]
    several = own.shared and not own.etcd_is_local
    if several and not facts.gloo:
        resolved = facts.host_addresses
        if not resolved or all(a == "::1" or a.startswith("127.") for a in resolved):
            said = f"resolves to {', '.join(resolved)}" if resolved else "does not resolve"
            findings.append(
                _wrong(
                    "network",
                    f"gloo would use loopback, as this machine's name {facts.host} {said}",
                    "give --address an address of this machine, or correct its name in /etc/hosts",
                )
            )
    if several and not any(i.up and not i.loopback for i in facts.interfaces):
        findings.append(_wrong("network", "no interface but loopback is up", "connect this machine"))
    yield from findings
    if not findings:
        up = [i.name for i in facts.interfaces if i.up]
        chosen = (facts.gloo and f"; gloo uses {facts.gloo}") or ""
        yield _fine("network", f"interfaces {', '.join(up)}{chosen}")


def _named_interfaces(variable: str, told: str, there: Sequence[Interface]) -> Iterator[Finding]:
    """Check the names in a variable. NCCL's notation: prefixes of names, whole names after ``=``, exclusion
    after ``^``. Gloo's is a list of names."""
    if not told or told.startswith("^"):
        return
    exact = told.startswith("=") or variable.startswith("GLOO")
    for name in told.lstrip("=").split(","):
        meant = [i for i in there if (i.name == name if exact else i.name.startswith(name))]
        have = ", ".join(i.name for i in there)
        if not meant:
            yield _wrong(
                "network",
                f"{variable} names {name}, and there is no such interface",
                f"name one of {have}, or unset it",
            )
        elif not any(i.up for i in meant):
            yield _wrong("network", f"{variable} names {name}, which is down", f"ip link set {name} up")


# ---------------------------------------------------------------- memory and limits


def shared_memory(facts: MemoryFacts) -> Iterator[Finding]:
    """Judge shared memory, which DataLoader workers use for batches, and NCCL and gloo for data."""
    do = f"make it larger: docker run --shm-size=8g; in Kubernetes an emptyDir of medium Memory at {SHM}"
    says = f"{_size(facts.free_bytes)} of {_size(facts.size_bytes)} are free in {SHM}"
    if facts.error:
        yield _wrong("shared memory", f"{SHM} cannot be used: {facts.error}", do)
    elif facts.free_bytes < SHM_TINY_BYTES:
        yield _wrong("shared memory", f"only {says}", do)
    elif facts.size_bytes < SHM_SMALL_BYTES:
        yield _advice("shared memory", f"{says}, which DataLoader workers soon fill", do)
    else:
        yield _fine("shared memory", says)


def limits(facts: LimitFacts) -> Iterator[Finding]:
    """Judge the limits of open files (sockets between workers, DataLoader workers) and of tasks (all
    threads)."""
    soft = facts.files
    says = f"a process may have {soft} files open" if soft < 2**62 else "files may be opened without limit"
    do = "raise it: ulimit -n 65536; in systemd LimitNOFILE=65536; docker run --ulimit nofile=65536"
    if soft < FILES_TOO_FEW:
        yield _wrong("open files", f"{says}, fewer than one worker with DataLoader workers needs", do)
    elif soft < FILES_FEW:
        yield _advice("open files", f"{says}, which many DataLoader workers exceed", do)
    else:
        yield _fine("open files", says)
    if facts.tasks_max is not None and facts.tasks_max - facts.tasks_now < TASKS_FEW:
        left = facts.tasks_max - facts.tasks_now
        yield _advice(
            "tasks",
            f"only {left} more processes and threads may be started here (of {facts.tasks_max})",
            "raise it: docker run --pids-limit; in systemd TasksMax=; in Kubernetes the node's podPidsLimit",
        )


# ---------------------------------------------------------------- GPUs, torch, imports


def gpus(driver: DriverFacts, torch: TorchFacts) -> Iterator[Finding]:
    """Judge whether workers can use the GPUs of the machine."""
    there = max(len(driver.gpus), driver.nodes)
    if torch.hip:
        if torch.device_error:
            yield _wrong("GPUs", f"torch {torch.version} cannot use them: {torch.device_error}", _DRIVER)
        else:
            yield _fine("GPUs", f"{torch.devices} that torch {torch.version} (ROCm {torch.hip}) can use")
    elif driver.nodes and not driver.gpus:
        yield _wrong(
            "GPUs",
            f"{driver.nodes} are in /dev, but NVIDIA's driver does not answer: {driver.error}",
            "in a container ask for them (docker run --gpus all, nvidia.com/gpu); else install the driver",
        )
    elif (not there and torch.cuda and torch.device_error) or not there:
        yield _fine("GPUs", "there are none: workers train on the CPU")
    elif torch.version and not torch.cuda:
        yield _wrong(
            "GPUs",
            f"there are {there}, but torch {torch.version} was built without CUDA",
            "install a torch built for CUDA",
        )
    elif torch.device_error:
        yield _wrong(
            "GPUs",
            f"torch {torch.version} (CUDA {torch.cuda}) cannot use them with driver {driver.version}: "
            f"{torch.device_error}",
            _DRIVER,
        )
    else:
        kinds = ", ".join(sorted({f"{g.name} with {_size(g.memory_bytes)}" for g in driver.gpus}))
        yield _fine("GPUs", f"{torch.devices} ({kinds}), driver {driver.version}, CUDA {torch.cuda}")


_DRIVER = "see `nvidia-smi` and `dmesg`; a driver older than torch's CUDA needs an upgrade"


def torch(facts: TorchFacts) -> Iterator[Finding]:
    """Judge whether workers can import torch and form groups."""
    if facts.error:
        yield _wrong(
            "torch", f"{facts.python} cannot import it: {facts.error}", "install torch for that Python"
        )
        return
    if unfit := torchparts.judged(facts.version):
        yield _wrong("torch", unfit, f"pip install 'torch>={torchparts.oldest()}'")
        return
    for backend, failed in (("gloo", facts.gloo), ("NCCL", facts.nccl)):
        if failed:
            yield _wrong(
                "torch",
                f"a {backend} group cannot be formed here: {failed}",
                f"see {backend.upper()}_SOCKET_IFNAME, and whether this machine's name resolves",
            )
    if not (facts.gloo or facts.nccl):
        with_nccl = f" and NCCL {facts.nccl_version}" if facts.nccl_version else ""
        yield _fine("torch", f"torch {facts.version} forms groups with gloo{with_nccl}")


def imports(facts: ImportFacts) -> Iterator[Finding]:
    """Judge whether the script's imports work."""
    if facts.error:
        yield _wrong("imports", f"{facts.script} cannot be looked at: {facts.error}", "correct it")
        return
    needed = [m for m in facts.missing if not m.optional]
    for missing in needed:
        yield _wrong(
            "imports",
            f"{missing.where} imports {missing.module}, which fails: {missing.error}",
            "install it where the workers' Python finds it (PYTHON_EXEC, PYTHONPATH)",
        )
    if not needed:
        spare = ", ".join(sorted(m.module for m in facts.missing))
        without = f"; not there, but not always needed: {spare}" if spare else ""
        yield _fine("imports", f"{facts.working} imports of {facts.script} work{without}")


# ---------------------------------------------------------------- numbers, in words


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _days(seconds: float) -> str:
    days = int(seconds // 86400)
    if days:
        return f"{days} day{'s' * (days != 1)}"
    hours = int(seconds // 3600)
    return f"{hours} h" if hours else f"{int(seconds // 60)} min"


def _size(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"
