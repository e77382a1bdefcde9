"""The c10d store of one round: a new store for each round, hosted by the agent of the first member."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import Store, TCPStore

_ARRIVED = "elasticd/arrived"
_VERDICT = "elasticd/verdict"
_COMPLETE = b"complete"
_BROKEN = b"broken"


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of this address only. Members that connect before the store
    exists wait in its queue. Raises OSError."""
    family, kind, proto, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.bind(where)
        listener.listen(4096)
    except BaseException:
        listener.close()
        raise
    return listener


def host(listener: socket.socket, address: str, timeout_s: float) -> Store:
    """Return the store, which takes over ``listener``."""
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )


def connect(address: str, port: int, timeout_s: float) -> Store:
    """Return a client of the store that another node hosts. Raises torch's DistError, a RuntimeError."""
    return TCPStore(
        address,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def arrive(store: Store, world_size: int) -> None:
    """Count this node as arrived at the store."""
    if store.add(_ARRIVED, 1) == world_size:
        store.set(_VERDICT, _COMPLETE.decode())


def wait_for_all(store: Store, timeout_s: float) -> None:
    """Wait until all members have arrived. Raises RuntimeError (torch's DistError is one) on a timeout, if
    the store goes away, or if the round is broken up."""
    store.wait([_VERDICT], timedelta(seconds=timeout_s))
    if store.get(_VERDICT) != _COMPLETE:
        raise RuntimeError("the round was broken up")


def break_up(address: str, port: int) -> None:
    """Release the members that wait for all. A new connection is used because the others are blocked."""
    try:
        connect(address, port, 5.0).set(_VERDICT, _BROKEN.decode())
    except RuntimeError:
        pass  # the store is gone, which releases the members too
