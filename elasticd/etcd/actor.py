"""A thread with an inbox. State that only this thread touches needs no lock."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

CALM_S = 0.1  # the pause after a failure of ``act``, so that the thread never spins


class Actor:
    """Handles messages one by one, and does due work between them. Only ``close`` ends the thread.

    ``handle`` gets each message of ``tell``. ``act`` is called after each batch of messages, and after
    ``idle_s()`` seconds without a message. ``leave`` is called at the end. All are called in the actor's
    thread.
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
        """Queue a message, from any thread. Returns at once."""
        self._inbox.put(message)

    def close(self) -> None:
        """End the thread, and drop the messages that are not handled yet. May be called in the thread
        itself."""
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
                _log.exception("%s: unexpected error; continuing", self._thread.name)
            try:
                self._act()
            except Exception:  # noqa: BLE001  (nothing may end this thread)
                _log.exception("%s: unexpected error; continuing", self._thread.name)
                time.sleep(CALM_S)
        self._leave()

    def _take(self, message: tuple[Any, ...] | None) -> None:
        if message is not None:
            self._handle(*message)
