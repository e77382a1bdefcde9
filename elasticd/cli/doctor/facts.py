"""What can be seen of a machine that is to run workers. Times in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from elasticd.cli.interfaces import Interface


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """Another node of the job, tried from here. ``error``: why it could not be reached, or empty."""

    node: str
    place: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class AddressFacts:
    """The address that others are told. ``shared``: there is an etcd in which others may be met.

    ``error``: why one cannot listen there and connect to it, or empty.
    """

    address: str
    shared: bool
    etcd_is_local: bool
    loopback: bool
    error: str = ""
    peers: tuple[PeerFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class PortFacts:
    """The ports that the kernel gives out by itself, and how many of them TCP has in use now."""

    low: int
    high: int
    used: int


@dataclass(frozen=True, slots=True)
class HttpFacts:
    """Where metrics are to be served. ``error``: why one cannot listen there, or empty; ``agent``: because
    an agent serves there already."""

    place: str
    error: str = ""
    agent: bool = False


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Shared memory. ``error``: why nothing can be written there, or empty."""

    size_bytes: int
    free_bytes: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Open files per process (the soft limit), and tasks in the container (None: no limit)."""

    files: int
    tasks_max: int | None = None
    tasks_now: int = 0


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """``host_addresses``: what the machine's own name resolves to, which gloo goes by unless told an
    interface. ``gloo`` and ``nccl``: the workers' GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or empty."""

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
    """``nodes``: GPUs among the device files. ``error``: why NVIDIA's library says nothing, or empty."""

    nodes: int
    version: str = ""
    gpus: tuple[GpuFacts, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """What a worker's Python says. Versions are empty where torch was built without; ``devices`` is how
    many GPUs it can use, ``gloo`` and ``nccl`` why a group of one could not be formed, or empty.

    ``error``: why torch itself cannot be imported, or empty.
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
    """An import of the script that fails. ``optional``: the script is prepared for that."""

    module: str
    where: str
    error: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class ImportFacts:
    """How many modules the script imports well, and which not; ``error``: why that cannot be told."""

    script: str
    working: int = 0
    missing: tuple[Missing, ...] = ()
    error: str = ""
