"""Where the other nodes reach this one, if nobody said so."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from elasticd.etcd.access import hosts_and_ports


def own_address(endpoints: Iterable[str]) -> str:
    """The address from which this machine talks to etcd: on the cluster's network, and right also
    where host names do not resolve (yet). Raises ValueError if no endpoint has a route."""
    problem: OSError | None = None
    places = hosts_and_ports(endpoints)
    if not places:  # etcd is a socket file of this machine, so all nodes are on this machine
        return "127.0.0.1"
    for host, port in places:
        try:
            for family, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(where)  # sends nothing: only asks for the route
                    return str(probe.getsockname()[0])
        except OSError as error:
            problem = error
    raise ValueError(
        f"this node's address cannot be told from its route to etcd ({problem}); give it with --local-addr"
    )
