"""A network of pods on one machine: a namespace with a bridge, to which each pod's namespace is connected.
Nothing has a name outside, so the network ends with the processes in the namespaces."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

TOOLS = ("ip", "unshare", "nsenter", "setpriv", "openssl")
NEW_NETWORK = 0x40000000
UNDER_US = (
    "setpriv",
    "--pdeathsig",
    "KILL",
)  # processes that are started with this end with the test, however it ends
_libc = ctypes.CDLL(None, use_errno=True)


def why_not(folder: Path) -> str:
    """Return why this machine cannot have pods; empty if it can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)} (packages iproute2, util-linux and openssl)"
    script = (
        f"mount -t tmpfs none {folder} && mkdir {folder}/u {folder}/w {folder}/m && "
        f"mount -t overlay overlay -o lowerdir=/,upperdir={folder}/u,workdir={folder}/w {folder}/m && "
        "ip link add one0 type veth peer name two0 && ip link add pods type bridge"
    )
    namespaces = ["unshare", "--net", "--mount", "--pid", "--fork", "--uts", "--ipc"]
    tried = subprocess.run([*namespaces, "sh", "-c", script], capture_output=True, text=True, timeout=30)
    return f"may make no namespaces here: {tried.stderr.strip()[-200:]}" if tried.returncode else ""


class Network:
    """Use it from one thread only. Pods have addresses in 10.244.0.0/16, and the node has 10.244.0.1."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            [*UNDER_US, "unshare", "--net", "sh", "-c", "echo made; exec sleep infinity"],
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None and self._holder.stdout.readline() == b"made\n"
        self._space = os.open(f"/proc/{self._holder.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._given = 1
        _ip(
            self._holder.pid, "link set lo up", "link add pods type bridge", "addr add 10.244.0.1/16 dev pods"
        )
        _ip(self._holder.pid, "link set pods up")

    def next_address(self) -> str:
        """Return an address that was never used: a pod that comes back gets another one."""
        self._given += 1
        return f"10.244.{self._given // 250}.{self._given % 250 + 1}"

    def plug(self, pid: int, address: str) -> None:
        """Connect the namespace of this process to the bridge, with this address."""
        cable = _cable(address)
        _ip(self._holder.pid, f"link add {cable} type veth peer name eth0 netns {pid}")
        _ip(self._holder.pid, f"link set {cable} master pods up")
        _ip(pid, "link set lo up", f"addr add {address}/16 dev eth0", "link set eth0 up")

    def cut(self, pid: int) -> None:
        """Lose all packets that this pod sends to other pods. The kubelet of its own node still reaches the
        pod, as in a cluster when the network between nodes fails."""
        _ip(
            pid,
            "neigh replace 10.244.255.254 lladdr 02:00:00:00:00:01 dev eth0 nud permanent",  # nobody's
            "route add 10.244.0.1/32 dev eth0",
            "route replace 10.244.0.0/17 via 10.244.255.254 dev eth0 onlink",
        )

    def heal(self, pid: int) -> None:
        _ip(pid, "route del 10.244.0.0/17", "route del 10.244.0.1/32")

    def lose(self, pid: int, *addresses: str) -> None:
        """Lose the packets that this pod sends to these pods. Packets in the other direction arrive."""
        _ip(
            pid,
            "neigh replace 10.244.255.254 lladdr 02:00:00:00:00:01 dev eth0 nud permanent",
            *(f"route replace {address}/32 via 10.244.255.254 dev eth0 onlink" for address in addresses),
        )

    def find(self, pid: int, *addresses: str) -> None:
        """End ``lose``: all packets arrive again."""
        _ip(pid, *(f"route del {address}/32" for address in addresses))

    def unplug(self, address: str) -> None:
        """Let no packets pass, in either direction."""
        _ip(self._holder.pid, f"link set {_cable(address)} down")

    def plug_in(self, address: str) -> None:
        _ip(self._holder.pid, f"link set {_cable(address)} up")

    def slow(self, address: str, kbit_s: int) -> None:
        """Limit the rate of what is sent to this pod. A packet that would wait for a second is lost."""
        limit = f"rate {kbit_s}kbit burst 4kb latency 1000ms"
        _tc(self._holder.pid, "add", _cable(address), "root", "tbf", *limit.split())

    def fast(self, address: str) -> None:
        _tc(self._holder.pid, "del", _cable(address), "root")

    def enter(self) -> None:
        """Move the calling thread, and everything that it starts later, into the namespace of the node."""
        _enter(self._space)

    def socket(self) -> socket.socket:
        """Return a TCP socket of the node, which reaches all pods, as the kubelet does."""
        with self._inside():
            return socket.socket()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Within this block, only the calling thread is in that namespace."""
        own = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(self._space)
            try:
                yield
            finally:
                _enter(own)
        finally:
            os.close(own)

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()
        os.close(self._space)


def _enter(space: int) -> None:
    if _libc.setns(space, NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _cable(address: str) -> str:
    *_, high, low = address.split(".")
    return f"pod{high}-{low}"


def _tc(pid: int, do: str, cable: str, *words: str) -> None:
    command = ["nsenter", "-t", str(pid), "-n", "tc", "qdisc", do, "dev", cable, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def _ip(pid: int, *commands: str) -> None:
    command = ["nsenter", "-t", str(pid), "-n", "ip", "-batch", "-"]
    done = subprocess.run(command, input="\n".join(commands), capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{commands}: {done.stderr}"
