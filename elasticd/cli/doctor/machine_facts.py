"""Facts about this machine from the kernel and NVIDIA's library. Leaves nothing behind."""

from __future__ import annotations

import ctypes
import http.client
import os
import re
import resource
import socket
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from elasticd.cli.doctor.facts import (
    AddressFacts,
    DriverFacts,
    GpuFacts,
    HttpFacts,
    LimitFacts,
    MemoryFacts,
    NetworkFacts,
    PeerFacts,
    PortFacts,
)
from elasticd.cli.interfaces import host_addresses, host_is_loopback, interfaces

_CONNECT_S = 3.0


# ---------------------------------------------------------------- address and ports


def look_at_address(
    address: str, endpoints: Sequence[tuple[str, int]], peers: Sequence[tuple[str, str]]
) -> AddressFacts:
    """Test the address. ``endpoints``: hosts and ports of etcd. ``peers``: other nodes of the job, with the
    ``host:port`` where each listens."""
    tried = []
    for node, place in peers:
        host, _, port = place.rpartition(":")
        tried.append(PeerFacts(node, place, _connect(host.strip("[]"), int(port))))
    return AddressFacts(
        address=address,
        shared=bool(endpoints),
        etcd_is_local=bool(endpoints) and all(host_is_loopback(host) for host, _ in endpoints),
        loopback=host_is_loopback(address),
        error=_listen_and_connect(address),
        peers=tuple(tried),
    )


def _listen_and_connect(address: str) -> str:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as server:
            server.bind(place)
            server.listen(1)
            return _connect(address, server.getsockname()[1])
    except OSError as error:
        return error.strerror or str(error)


def _connect(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def look_at_http(host: str, port: int) -> HttpFacts:
    """Test whether metrics can be served there; if not, whether an agent already serves there."""
    place = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
            server.listen(1)
    except OSError as error:
        return HttpFacts(place, error.strerror or str(error), _is_healthy(host, port))
    return HttpFacts(place)


def _is_healthy(host: str, port: int) -> bool:
    unverified = ssl.create_default_context()  # no secret is sent or received
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    plain = http.client.HTTPConnection(host, port, timeout=_CONNECT_S)
    secure = http.client.HTTPSConnection(host, port, timeout=_CONNECT_S, context=unverified)
    return any(map(_says_it_is_well, (plain, secure)))


def _says_it_is_well(connection: http.client.HTTPConnection) -> bool:
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def look_at_ports() -> PortFacts:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())  # not in psutil
    used = {connection.laddr.port for connection in psutil.net_connections("tcp") if connection.laddr}
    return PortFacts(low, high, sum(low <= port <= high for port in used))


# ---------------------------------------------------------------- memory and limits


def look_at_shared_memory(folder: Path = Path("/dev/shm")) -> MemoryFacts:  # noqa: S108  # what is asked about
    try:
        found = os.statvfs(folder)
        size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    except OSError as error:
        return MemoryFacts(0, 0, error.strerror or str(error))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        return MemoryFacts(size, free, error.strerror or str(error))
    return MemoryFacts(size, free)


def look_at_limits(cgroup: Path = Path("/sys/fs/cgroup")) -> LimitFacts:
    files = _unlimited(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    most: int | None = None
    now = 0
    for folder in (cgroup, cgroup / "pids"):  # version 2, and 1
        try:
            told = (folder / "pids.max").read_text().strip()
            now = int((folder / "pids.current").read_text())
        except (OSError, ValueError):
            continue
        most = None if told == "max" else int(told)
        break
    return LimitFacts(files, most, now)


def _unlimited(number: int) -> int:
    return 2**63 - 1 if number == resource.RLIM_INFINITY else number


# ---------------------------------------------------------------- network


def look_at_network(environ: Mapping[str, str]) -> NetworkFacts:
    """Return the network facts. ``environ``: of the workers."""
    return NetworkFacts(
        interfaces=interfaces(),
        host=socket.gethostname(),
        host_addresses=host_addresses(),
        gloo=environ.get("GLOO_SOCKET_IFNAME", ""),
        nccl=environ.get("NCCL_SOCKET_IFNAME", ""),
    )


# ---------------------------------------------------------------- GPUs


def look_at_driver(devices: Path = Path("/dev")) -> DriverFacts:
    """Ask NVIDIA's management library, without a CUDA context."""
    nodes = sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return DriverFacts(nodes, error="its library libnvidia-ml.so.1 is not here")
    nvml.nvmlErrorString.restype = ctypes.c_char_p
    if failed := nvml.nvmlInit_v2():
        return DriverFacts(nodes, error=nvml.nvmlErrorString(failed).decode())
    try:
        text = ctypes.create_string_buffer(96)
        nvml.nvmlSystemGetDriverVersion(text, 96)
        version = text.value.decode()
        count = ctypes.c_uint(0)
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return DriverFacts(nodes, version, tuple(_gpu(nvml, index) for index in range(count.value)))
    finally:
        nvml.nvmlShutdown()


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _gpu(nvml: ctypes.CDLL, index: int) -> GpuFacts:
    handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _Memory()
    if failed := nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
        return GpuFacts(f"GPU {index}: {nvml.nvmlErrorString(failed).decode()}", 0)
    nvml.nvmlDeviceGetName(handle, name, 96)
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return GpuFacts(name.value.decode(errors="replace"), memory.total)
