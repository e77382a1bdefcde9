"""The c10d store of one round: hosted by the agent of its first member, fresh each time."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import Store, TCPStore

_ARRIVED = "elasticd/arrived"
_VERDICT = "elasticd/verdict"
_COMPLETE = b"complete"
_BROKEN = b"broken"


def listen(address: str) -> socket.socket:
    """A socket on a free port of this address and of no other, already listening, so that those
    who come before the store is made wait in its queue. Raises OSError."""
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
    """The store itself, listening on ``listener``, which it takes over."""
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
    """A client of the store that another node hosts. Raises torch's DistError, a RuntimeError."""
    return TCPStore(
        address,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def arrive(store: Store, world_size: int) -> None:
    """Say that this node has reached the store."""
    if store.add(_ARRIVED, 1) == world_size:
        store.set(_VERDICT, _COMPLETE.decode())


def wait_for_all(store: Store, timeout_s: float) -> None:
    """Return when all have arrived. Raises RuntimeError (torch's DistError is one) if it takes too
    long, the store goes away, or the round is broken up."""
    store.wait([_VERDICT], timedelta(seconds=timeout_s))
    if store.get(_VERDICT) != _COMPLETE:
        raise RuntimeError("the round was broken up")


def break_up(address: str, port: int) -> None:
    """Release those who wait for all. Its own connection: theirs are busy waiting."""
    try:
        connect(address, port, 5.0).set(_VERDICT, _BROKEN.decode())
    except RuntimeError:
        pass  # it is gone already, and they know
