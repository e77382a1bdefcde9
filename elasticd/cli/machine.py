"""Facts about this machine: its GPUs, cores, names and addresses."""

from __future__ import annotations

import ctypes
import hashlib
import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

NODES_MAX = 100  # the most agents of one job on one machine that get different default names


class Machine:
    """The machine that this process runs on. Some methods take time."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ

    def gpus(self) -> int:
        """Return the number of GPUs that workers would see.

        They are counted by CUDA_VISIBLE_DEVICES and NVIDIA's management library. An import of torch would
        take 1.5 s and the memory of a CUDA context; only AMD's GPUs are counted by torch.
        """
        if Path("/dev/kfd").exists():
            return self.torch_devices("cuda") or 0
        return visible(self._environ.get("CUDA_VISIBLE_DEVICES"), _nvml_count())

    def cores(self) -> int:
        """Return the number of cores that this process may use, by affinity and by cgroup quota."""
        quota = _cgroup_cores()
        return self.affinity_cores() if quota is None else max(1, min(self.affinity_cores(), quota))

    def affinity_cores(self) -> int:
        """Return the number of cores by affinity alone, as torchrun counts them."""
        return len(os.sched_getaffinity(0))

    def torch_devices(self, kind: str) -> int | None:
        """Return the number of devices of another kind ("xpu", or a backend's own name); None if torch does
        not know the kind."""
        import torch

        if kind not in ("cuda", "xpu", torch._C._get_privateuse1_backend_name()):
            return None
        module = getattr(torch, kind, None)
        return int(module.device_count()) if module is not None and module.is_available() else 0


def visible(cuda_visible_devices: str | None, present: int) -> int:
    """Return the number of GPUs that CUDA shows of ``present`` with this CUDA_VISIBLE_DEVICES (None: unset).

    As in CUDA, the list ends at the first entry that names no device.
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
    """Return the CPU quota of the container in cores, rounded up; None without a quota."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):
        return None


def working_directory_fault() -> str:
    """Return a sentence if the working directory no longer exists; else an empty string."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working directory no longer exists: change to another."
    return ""


def default_node_name() -> str:
    """Return the host name, with characters that cannot be part of a key replaced."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-.") or "node"


@contextmanager
def reserve_node_name(name: str, job: str) -> Iterator[str]:
    """Yield ``name``, or ``name-2`` and so on if another agent of this job on this machine uses the name. The
    name is reserved until the end of the context or of the process."""
    with ExitStack() as held:
        for number in range(1, NODES_MAX):
            tried = name if number == 1 else f"{name}-{number}"
            mark = held.enter_context(socket.socket(socket.AF_UNIX))
            try:  # an abstract address leaves no file, and is unique per network namespace
                mark.bind(b"\0elasticd-node-" + hashlib.sha256(f"{job}/{tried}".encode()).digest())
            except OSError:
                continue
            name = tried
            break
        yield name


def is_local_address(address: str) -> bool:
    """Whether this machine can listen on the address. A host name is accepted, because it may resolve
    later."""
    try:
        ip = ipaddress.ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return True
    try:
        with socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET) as probe:
            probe.bind((address.strip("[]"), 0))
    except OSError:
        return False
    return True
