"""The c10d store of one round: a new store for each round, hosted by the agent of the first member. The
members meet at the store, while the caller watches for lost members."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

from torch.distributed import Store, TCPStore

from elasticd.torchrun.rendezvous_records import RendezvousRound

_ARRIVED = "elasticd/arrived"
_VERDICT = "elasticd/verdict"
_COMPLETE = b"complete"
_BROKEN = b"broken"


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of this address only. Members that connect before the store
    exists wait in its queue. Raises OSError."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, 0), family=family, backlog=4096)


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
        pass  # the store has ended, which releases the members too


class Arrival:
    """Joins the round's store in a thread: a call of a c10d store can neither be interrupted nor told that a
    node is lost. ``changed`` is notified when the thread ends, with a ``store`` or an ``error``."""

    def __init__(
        self,
        round_: RendezvousRound,
        rank: int,
        listener: socket.socket,
        timeout_s: float,
        changed: threading.Condition,
    ) -> None:
        self.store: Store | None = None
        self.error: Exception | None = None
        self._round = round_
        self._rank = rank
        self._listener = listener
        self._timeout_s = timeout_s
        self._changed = changed
        threading.Thread(target=self._run, name=f"round-{round_.number}-arrival", daemon=True).start()

    @property
    def ended(self) -> bool:
        return self.store is not None or self.error is not None

    def _run(self) -> None:
        seat = self._round.seats[0]
        store, error = None, None
        try:
            if self._rank == 0:
                store = host(self._listener, seat.address, self._timeout_s)
            else:
                store = connect(seat.address, seat.port, self._timeout_s)
            arrive(store, len(self._round.seats))
            wait_for_all(store, self._timeout_s)
        except Exception as raised:  # noqa: BLE001  # the waiting node decides what the error means
            error = raised
        with self._changed:
            self.store, self.error = (store, None) if error is None else (None, error)
            self._changed.notify_all()

    def give_up(self) -> None:
        """Release the members that wait at the store, because one member will not come."""
        if self._rank == 0:
            seat = self._round.seats[0]
            break_up(seat.address, seat.port)
