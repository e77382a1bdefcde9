"""Ports of loopback for servers that a test or a bench starts later, or starts again."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CHOICE = random.SystemRandom()  # a test's seed must not give two processes the same port


def free_port() -> int:
    """Return a port of loopback that nothing uses. The port lies outside the kernel's own range, so that no
    connection takes it before the server does."""
    first, last = map(int, _KERNELS.read_text().split())
    outside = range(10_000, first) or range(last + 1, 2**16) or [0]  # 0: the kernel chooses
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", _CHOICE.choice(outside)))
            except OSError:
                continue
            port: int = probe.getsockname()[1]
            return port
