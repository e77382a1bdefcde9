"""The network interfaces of this machine, and the interface that its workers should use."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

import psutil


def interface_of(address: str) -> str:
    """Return the name of the interface with this address; empty for a host name, and for loopback, which no
    other machine can reach."""
    try:
        wanted = ipaddress.ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return ""
    interfaces = {a.address.partition("%")[0]: n for n, own in psutil.net_if_addrs().items() for a in own}
    return "" if wanted.is_loopback else interfaces.get(str(wanted), "")


def host_addresses() -> tuple[str, ...]:
    """Return the addresses of this machine's own host name; empty if it does not resolve."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(sorted({str(info[4][0]) for info in found}))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def host_is_loopback(host: str) -> bool:
    """Whether all addresses of this host, a name or an address, are loopback."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found) and all(map(is_loopback, found))


def loopback_of(host: str) -> str:
    """Return the loopback address of a host that has no other addresses here; empty if there is none. Debian
    gives the machine's own name 127.0.1.1 in /etc/hosts, where other machines have another address."""
    if not host_is_loopback(host):
        return ""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def network_environment(address: str, environ: Mapping[str, str], *, asked: bool) -> dict[str, str]:
    """Return the variables that workers of a node with this address need besides ``environ``. ``asked``: the
    user gave the address."""
    interface = interface_of(address)
    if not interface:
        return {}
    # ``host_addresses`` is called last: without a name server, it takes seconds.
    named = asked or "GLOO_SOCKET_IFNAME" in environ or not all(map(is_loopback, host_addresses()))
    return over_interface(interface, environ, asked=asked, host_is_named=named)


def over_interface(
    name: str, inherited: Mapping[str, str], *, asked: bool, host_is_named: bool
) -> dict[str, str]:
    """Return the variables that bind gloo and NCCL to this network interface, except those that are already
    set.

    By default gloo uses the address of the host's name. With ``host_is_named`` other nodes can reach that
    address; otherwise it is loopback, and gloo would never connect. NCCL uses the fastest interface. So if
    the user ``asked`` for this interface's address, both are bound. Otherwise only gloo is bound, and only if
    the host is not named.
    """
    told = {}
    if asked or not host_is_named:
        told["GLOO_SOCKET_IFNAME"] = name
    if asked:
        # NCCL reads "=" as exactly this name, and otherwise as a prefix.
        told["NCCL_SOCKET_IFNAME"] = f"={name}"
    return {variable: value for variable, value in told.items() if variable not in inherited}
