"""What this agent tells the others of workers that stand still, through etcd, and what the leader says of
them."""

from __future__ import annotations

from elasticd.core.facts import Hang, Stall
from elasticd.core.hang import Verdict
from elasticd.core.ports import Delete, Put, Seen, StillThere, Store, Write
from elasticd.daemon.driver import Driver


class Stalls:
    """One agent's side of it."""

    def __init__(self, driver: Driver, store: Store) -> None:
        self._driver = driver
        self._store = store
        self._told = False
        self._found: Hang | None = None
        store.watch("hang", self._hang_seen)

    def tell(self, stall: Stall) -> None:
        """How this node's workers stand still."""
        self._told = True
        self._write(Put(f"stalls/{stall.node}", stall, leased=True))

    def untell(self) -> None:
        """They make steps again: what was concluded has passed, and says nothing of the next time."""
        if self._found is not None and not self._found.asks:
            self._found = None
        if self._told:
            self._told = False
            self._write(Delete(f"stalls/{self._driver.state.me.node}"))

    def _write(self, write: Write) -> None:
        """A lost one is made up for by the next look."""
        state = self._driver.state
        if state.own is not None and state.own.fact is not None and not state.silent:
            guard = StillThere(state.me.key, state.own.created)
            self._store.transact((guard,), (write,), lambda answer: None)

    def verdict_for(self, round_number: int) -> Verdict | None:
        """The leader's, on this very round."""
        found = self._found
        known = found is not None and found.round == round_number and not found.asks
        return found.verdict if found is not None and known else None

    def question(self, round_number: int) -> Hang | None:
        """The leader's to all nodes of this round, what their workers do."""
        found = self._found
        return found if found is not None and found.round == round_number and found.asks else None

    def _hang_seen(self, seen: Seen) -> None:
        for entry in seen.entries:
            if entry.key == "hang":
                self._found = entry.fact if isinstance(entry.fact, Hang) else None
