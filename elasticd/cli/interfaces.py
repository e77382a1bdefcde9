"""The network interfaces of this machine, and the interface that its workers should use."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from elasticd.core.environment import over_interface

_UP, _LOOPBACK = 0x1, 0x8  # IFF_*


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    up: bool
    loopback: bool
    addresses: tuple[str, ...] = ()


def interfaces() -> tuple[Interface, ...]:
    """Return all interfaces with all their addresses, in the kernel's order."""
    flags: dict[str, int] = {}
    addresses: dict[str, list[str]] = {}
    for name, own_flags, address in _entries():
        flags[name] = own_flags
        addresses.setdefault(name, []).extend([address] if address else [])
    return tuple(
        Interface(name, bool(own & _UP), bool(own & _LOOPBACK), tuple(addresses[name]))
        for name, own in flags.items()
    )


def interface_of(address: str) -> str:
    """Return the name of the interface with this address; empty for a host name, and for loopback, which no
    other machine can reach."""
    try:
        wanted = ipaddress.ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return ""
    found = (i.name for i in interfaces() if not i.loopback and str(wanted) in i.addresses)
    return "" if wanted.is_loopback else next(found, "")


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


def network_environment(address: str, environ: Mapping[str, str], *, asked: bool) -> dict[str, str]:
    """Return the variables that workers of a node with this address need besides ``environ``. ``asked``: the
    user gave the address."""
    interface = interface_of(address)
    if not interface:
        return {}
    # ``host_addresses`` is called last: without a name server, it takes seconds.
    named = asked or "GLOO_SOCKET_IFNAME" in environ or not all(map(is_loopback, host_addresses()))
    return over_interface(interface, environ, asked=asked, host_is_named=named)


# ---------------------------------------------------------------- getifaddrs(3)


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
    ("netmask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)


def _entries() -> Iterator[tuple[str, int, str]]:
    """Yield name, flags and address, once per address. The address is empty if it is not an IP address."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs")
    try:
        entry = first
        while entry:
            it = entry.contents
            yield it.name.decode(errors="replace"), it.flags, _ip(it.address)
            entry = it.next
    finally:
        libc.freeifaddrs(first)


def _ip(address: ctypes._Pointer[_SockAddr]) -> str:
    if not address:
        return ""
    match address.contents.family:
        case socket.AF_INET:  # after a port of 2 bytes
            return str(ipaddress.IPv4Address(bytes(address.contents.data[2:6])))
        case socket.AF_INET6:  # after a port of 2 bytes and flow information of 4
            return str(ipaddress.IPv6Address(bytes(address.contents.data[6:22])))
    return ""
