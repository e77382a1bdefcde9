"""Facts about a machine that is to run workers. Times in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from elasticd.cli.interfaces import Interface


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """The result of a connection to another node of the job. ``error``: why it failed, or empty."""

    node: str
    place: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class AddressFacts:
    """The address that other nodes use to reach this node. ``shared``: an etcd is given, so other nodes may
    join.

    ``error``: why a test could not listen there and connect, or empty.
    """

    address: str
    shared: bool
    etcd_is_local: bool
    loopback: bool
    error: str = ""
    peers: tuple[PeerFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class PortFacts:
    """The kernel's range of ephemeral ports, and how many of them TCP uses now."""

    low: int
    high: int
    used: int


@dataclass(frozen=True, slots=True)
class HttpFacts:
    """Where metrics are to be served. ``error``: why a test could not listen there, or empty; ``agent``:
    whether an agent already serves there."""

    place: str
    error: str = ""
    agent: bool = False


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Shared memory. ``error``: why it cannot be written, or empty."""

    size_bytes: int
    free_bytes: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """The soft limit of open files per process, and the tasks in the container (None: no limit)."""

    files: int
    tasks_max: int | None = None
    tasks_now: int = 0


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """The interfaces, and how workers choose one. ``host_addresses``: the addresses of the machine's host
    name, which gloo uses unless an interface is set. ``gloo``, ``nccl``: the workers' GLOO_SOCKET_IFNAME and
    NCCL_SOCKET_IFNAME, or empty."""

    interfaces: tuple[Interface, ...]
    host: str
    host_addresses: tuple[str, ...]
    gloo: str = ""
    nccl: str = ""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """NVIDIA's driver and its GPUs. ``nodes``: GPUs among the device files. ``error``: why NVIDIA's library
    does not work, or empty."""

    nodes: int
    version: str = ""
    gpus: tuple[GpuFacts, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """What the workers' Python reports. A version is empty if torch was built without that part. ``devices``:
    how many GPUs torch can use. ``gloo``, ``nccl``: why a group of one could not be formed, or empty.

    ``error``: why torch cannot be imported, or empty.
    """

    python: str
    version: str = ""
    cuda: str = ""
    hip: str = ""
    nccl_version: str = ""
    devices: int = 0
    device_error: str = ""
    gloo: str = ""
    nccl: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Missing:
    """An import of the script that fails. ``optional``: the script handles the failure."""

    module: str
    where: str
    error: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class ImportFacts:
    """How many imports of the script work, and which fail. ``error``: why the script could not be
    examined."""

    script: str
    working: int = 0
    missing: tuple[Missing, ...] = ()
    error: str = ""
