"""Notifies systemd, or another service manager, of the agent's state (sd_notify).

The protocol is one datagram of text. Packages for the protocol do no more than this module, or need
libsystemd.

The agent's own loop feeds the watchdog, so the manager restarts an agent that is stuck.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, MutableMapping

from elasticd.core.agent.agent_state import AgentState
from elasticd.core.facts import Phase

IDLE_S = 3600.0


class Manager:
    """The service manager that started this process; no manager if ``address`` is empty."""

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        if self._socket is not None:
            self._socket.setblocking(False)  # a manager that does not read must not stop the loop

    @classmethod
    def of(cls, environ: MutableMapping[str, str], pid: int) -> Manager:
        """Return the manager that the environment names. The variables are removed from the environment,
        since workers must not notify the manager."""
        address = environ.pop("NOTIFY_SOCKET", "")
        micros = environ.pop("WATCHDOG_USEC", "")
        meant_for = environ.pop("WATCHDOG_PID", "")
        watched = micros.isdecimal() and int(micros) > 0 and meant_for in ("", str(pid))
        return cls(address, int(micros) / 1e6 if watched else None)

    @property
    def listens(self) -> bool:
        return self._socket is not None

    def tell(self, *assignments: str) -> bool:
        """Send the assignments. Return whether the manager took them; errors are ignored."""
        if self._socket is None:
            return False
        try:
            self._socket.sendto("\n".join(assignments).encode(), self._address)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Service:
    """``routine(now)`` notifies the manager of changes, and returns the latest time of the next call.

    ``state`` returns the agent's state. The agent is ready once it is registered in etcd.
    """

    def __init__(self, manager: Manager, state: Callable[[], AgentState]) -> None:
        self._manager = manager
        self._state = state
        self._ready = self._stopping = False
        self._status = ""
        self._alive_at = 0.0

    def routine(self, now: float) -> float:
        if not self._manager.listens:
            return now + IDLE_S
        news: list[str] = []
        state = self._state()
        if state.registered and not self._ready:
            self._ready = True
            news.append("READY=1")
        if (state.departure is not None or state.exiting is not None) and not self._stopping:
            self._stopping = True
            news.append("STOPPING=1")
        status = describe(state)
        if status != self._status:
            self._status = status
            news.append(f"STATUS={status}")
        alive_every_s = (self._manager.watchdog_s or 2.0) / 4
        if self._manager.watchdog_s is not None and now - self._alive_at >= alive_every_s:
            self._alive_at = now
            news.append("WATCHDOG=1")
        if news:
            self._manager.tell(*news)
        return now + min(1.0, alive_every_s)

    def ends(self, why: str) -> None:
        """Notify the manager that the loop is over and the agent cleans up."""
        self._manager.tell("STOPPING=1", f"STATUS=ends: {why}")


def describe(state: AgentState) -> str:
    """Return the agent's state in one line, for ``systemctl status``."""
    if state.exiting is not None:
        return f"ends: {state.exiting.why}"
    if state.departure is not None:
        return "drains: its workers may save, then it leaves"
    if state.etcd.silent is not None:
        return f"waits for {state.config.store_name}, which does not answer; its workers go on"
    if not state.registered:
        return f"joins the job in {state.config.store_name}"
    round = state.round
    if round is None:
        return "registered; no round yet"
    if state.crew is None or round.phase is not Phase.LIVE:
        return f"registered, without workers; round {round.number} is {round.phase}"
    ranks = len(state.crew.member.slots)
    return f"round {round.number} is live: {ranks} of {round.world_size} workers run on this node"
