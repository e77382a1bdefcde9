"""The members of a new round meeting at its store, while somebody else watches who is lost."""

from __future__ import annotations

import socket
import threading

from torch.distributed import Store

from elasticd.torchrun.records import RendezvousRound
from elasticd.torchrun.store import arrive, break_up, connect, host, wait_for_all


class Arrival:
    """Runs on a thread of its own, since the calls of a c10d store can neither be interrupted nor
    told of a node that is lost. ``changed`` is notified when it has
    ended: with the ``store`` or an ``error``."""

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
        except Exception as raised:  # noqa: BLE001  # whatever it is, the waiting node judges it
            error = raised
        with self._changed:
            self.store, self.error = (store, None) if error is None else (None, error)
            self._changed.notify_all()

    def give_up(self) -> None:
        """Somebody will not come: release those who wait here, so that the store can go."""
        if self._rank == 0:
            seat = self._round.seats[0]
            break_up(seat.address, seat.port)
