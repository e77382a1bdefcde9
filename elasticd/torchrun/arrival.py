"""The members of a new round meet at its store, while the caller watches for lost members."""

from __future__ import annotations

import socket
import threading

from torch.distributed import Store

from elasticd.torchrun.records import RendezvousRound
from elasticd.torchrun.store import arrive, break_up, connect, host, wait_for_all


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
