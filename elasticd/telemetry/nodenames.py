"""Short names of nodes, for places with little room. Pure."""

from __future__ import annotations

from collections.abc import Set

LENGTH = 20  # the wanted length, in characters


def short_names(nodes: Set[str]) -> dict[str, str]:
    """Return a short name for each node. Leave out the domains, and the middles of long names, as long as all
    short names differ."""
    hosts = {node: node.partition(".")[0] for node in nodes}
    if len(set(hosts.values())) < len(nodes) or any(host.isdigit() for host in hosts.values()):
        hosts = {node: node for node in nodes}
    for most in range(LENGTH, max(map(len, hosts.values()), default=0)):
        short = {node: shortened(host, most) for node, host in hosts.items()}
        if len(set(short.values())) == len(nodes):
            return short
    return hosts


def shortened(name: str, most: int) -> str:
    """Return the name, without its middle if it is longer than ``most`` characters."""
    if len(name) <= most:
        return name
    head = (most - 1) // 2
    return f"{name[:head]}…{name[len(name) - (most - 1 - head) :]}"
