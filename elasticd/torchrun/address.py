"""The address where other nodes reach this node, if the user gave none."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from elasticd.etcd.access import hosts_and_ports


def own_address(endpoints: Iterable[str]) -> str:
    """Return the address from which this machine reaches etcd: it is on the cluster's network, and does not
    depend on host names. Raises ValueError if no endpoint has a route."""
    problem: OSError | None = None
    places = hosts_and_ports(endpoints)
    if not places:  # etcd is a Unix socket, so all nodes are on this machine
        return "127.0.0.1"
    for host, port in places:
        try:
            for family, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(where)  # sends nothing, and only selects the route
                    return str(probe.getsockname()[0])
        except OSError as error:
            problem = error
    raise ValueError(
        f"this node's address cannot be told from its route to etcd ({problem}); give it with --local-addr"
    )
