"""A thread of one's own, told what to do through an inbox: what it alone touches needs no lock."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

CALM_S = 0.1  # between two failures of what is due, so that it never spins


class Clerk:
    """Handles one message after another, and between them does what is due. Nothing ends it but ``close``.

    ``handle`` is called with what ``tell`` was; ``act`` after each batch of messages, and when
    ``idle_s`` (seconds until something is due without being told) has passed; ``leave`` at the end.
    All are called on the clerk's thread alone.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[..., None],
        act: Callable[[], None],
        idle_s: Callable[[], float],
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self._handle, self._act, self._idle_s, self._leave = handle, act, idle_s, leave
        self._inbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, *message: Any) -> None:
        """From any thread; returns at once."""
        self._inbox.put(message)

    def close(self) -> None:
        """End the thread; messages not handled yet are dropped. May be called on the thread itself."""
        self._closed = True
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._closed:
            try:
                self._take(self._inbox.get(timeout=self._idle_s()))
                while not self._inbox.empty():
                    self._take(self._inbox.get())
            except queue.Empty:
                pass
            except Exception:  # noqa: BLE001  (nothing may end this thread)
                _log.exception("%s: unexpected; going on", self._thread.name)
            try:
                self._act()
            except Exception:  # noqa: BLE001  (nothing may end this thread)
                _log.exception("%s: unexpected; going on", self._thread.name)
                time.sleep(CALM_S)
        self._leave()

    def _take(self, message: tuple[Any, ...] | None) -> None:
        if message is not None:
            self._handle(*message)
