"""What this machine has to offer: its GPUs, its cores, its names and addresses."""

from __future__ import annotations

import ctypes
import hashlib
import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

NODES_MAX = 100  # of one job on one machine, before agents that were given no name share one


class Machine(Protocol):
    """Asked only for what is needed, as some answers take time."""

    def gpus(self) -> int:
        """GPUs that workers would see; 0 without any."""

    def cores(self) -> int:
        """Cores that this process may use, by affinity and by cgroup quota."""

    def affinity_cores(self) -> int:
        """Cores by affinity alone, as torchrun counts them."""

    def torch_devices(self, kind: str) -> int | None:
        """Devices of another kind ("xpu", or a backend's own name); None if torch knows none such."""


class ThisMachine:
    """The machine this runs on."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ

    def gpus(self) -> int:
        """From CUDA_VISIBLE_DEVICES and NVIDIA's management library, without importing torch (1.5 s
        and a CUDA context's worth of memory); AMD's are counted by torch."""
        if Path("/dev/kfd").exists():
            return self.torch_devices("cuda") or 0
        return visible(self._environ.get("CUDA_VISIBLE_DEVICES"), _nvml_count())

    def cores(self) -> int:
        quota = _cgroup_cores()
        return self.affinity_cores() if quota is None else max(1, min(self.affinity_cores(), quota))

    def affinity_cores(self) -> int:
        return len(os.sched_getaffinity(0))

    def torch_devices(self, kind: str) -> int | None:
        import torch

        if kind not in ("cuda", "xpu", torch._C._get_privateuse1_backend_name()):
            return None
        module = getattr(torch, kind, None)
        return int(module.device_count()) if module is not None and module.is_available() else 0


def visible(cuda_visible_devices: str | None, present: int) -> int:
    """How many of ``present`` GPUs CUDA shows under this CUDA_VISIBLE_DEVICES (None: not set).

    As CUDA does, the list ends at its first entry that names no device.
    """
    if cuda_visible_devices is None:
        return present
    count = 0
    for entry in cuda_visible_devices.split(","):
        name = entry.strip()
        named = bool(re.match(r"(GPU|MIG)-", name)) and present > 0
        if not named and not (name.isdecimal() and int(name) < present):
            break
        count += 1
    return count


def _nvml_count() -> int:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()


def _cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The CPU quota of a container in whole cores, rounded up; None without one."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):
        return None


def nowhere() -> str:
    """What is wrong where the folder that this process works in is gone; else empty."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the folder that this was started in is gone: go to one that is there."
    return ""


def default_node_name() -> str:
    """The host's name, without what could not stand in a key."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-.") or "node"


@contextmanager
def name_of_its_own(name: str, job: str) -> Iterator[str]:
    """``name``, or where another agent on this machine goes by it in this job, ``name-2`` and so on. Taken
    until the end; a process that dies gives it back at once."""
    with ExitStack() as held:
        for number in range(1, NODES_MAX):
            tried = name if number == 1 else f"{name}-{number}"
            mark = held.enter_context(socket.socket(socket.AF_UNIX))
            try:  # an abstract address, which leaves no file: one for each name and network namespace
                mark.bind(b"\0elasticd-node-" + hashlib.sha256(f"{job}/{tried}".encode()).digest())
            except OSError:
                continue
            name = tried
            break
        yield name


def routed_address(endpoints: Sequence[tuple[str, int]]) -> str | None:
    """The local address from which packets to etcd leave; rather one that is not loopback.

    No packet is sent. None if no endpoint's name resolves or routes.
    """
    found: str | None = None
    for host, port in endpoints:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, address in infos:
            with socket.socket(family, kind, protocol) as probe:
                try:
                    probe.connect(address)
                except OSError:
                    continue
                mine = str(probe.getsockname()[0])
            if not ipaddress.ip_address(mine.partition("%")[0]).is_loopback:
                return mine
            found = found or mine
    return found


def is_ours(address: str) -> bool:
    """Whether one could listen there. Names are believed, as they may resolve later."""
    try:
        ip = ipaddress.ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return True
    with socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET) as probe:
        try:
            probe.bind((address.strip("[]"), 0))
        except OSError:
            return False
    return True
