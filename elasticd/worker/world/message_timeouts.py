"""Let messages between two workers wait as long as collectives do.

Gloo waits for a message as long as for a connection. That time must be short, since Gloo waits in vain for
workers that die while they connect. So each message is waited for with the timeout of its group's
collectives. Gloo also keeps waiting for a message from any sender after all connections are lost. So a thread
waits for such a message, and is abandoned when the world ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_UNSAID = timedelta(0)  # torch's value for no timeout
_METHODS = {name: getattr(dist.ProcessGroup, name) for name in ("send", "recv", "recv_anysource")}


class Message:
    """A ``dist.Work`` for a message in flight."""

    def __init__(self, work: dist.Work, timeout: timedelta) -> None:
        self._work = work
        self._timeout = timeout

    def wait(self, timeout: timedelta = _UNSAID) -> bool:
        """Wait for the message. Raises RuntimeError after the timeout."""
        return self._work.wait(timeout or self._timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class FromAnyone(Message):
    """A message to receive from any sender."""

    def __init__(self, work: dist.Work, timeout: timedelta) -> None:
        super().__init__(work, timeout)
        self._ends = _Ends.before

    def wait(self, timeout: timedelta = _UNSAID) -> bool:
        """Wait for the message. Raises RuntimeError also when the world has ended, even before this call."""
        came: list[bool | RuntimeError] = []

        def take() -> None:
            try:
                outcome: bool | RuntimeError = super(FromAnyone, self).wait(timeout)
            except RuntimeError as error:
                outcome = error
            with _Ends.news:
                came.append(outcome)
                _Ends.news.notify_all()

        if self._ends == _Ends.so_far:
            threading.Thread(target=take, name="elasticd-message", daemon=True).start()
        with _Ends.news:
            _Ends.news.wait_for(lambda: came or _Ends.so_far != self._ends)
        if not came:
            raise dist.DistNetworkError("the world ended before anyone had sent a message")
        if isinstance(came[0], RuntimeError):
            raise came[0]
        return came[0]


class _Ends:
    """The number of worlds that ended in this process; ``before``: at the start of the present world."""

    news = threading.Condition()
    so_far = before = 0


def end() -> None:
    """Stop all waits for messages from any sender: the world is over. Any thread may call it."""
    with _Ends.news:
        _Ends.so_far += 1
        _Ends.news.notify_all()


def give_time() -> None:
    """Give the groups' timeouts to all messages of this process from now on, when a world begins."""
    with _Ends.news:
        _Ends.before = _Ends.so_far
    for name, method in _METHODS.items():
        setattr(dist.ProcessGroup, name, _patient(method))


def _patient(method: Callable[..., dist.Work]) -> Callable[..., dist.Work | Message]:
    from_anyone = method is _METHODS["recv_anysource"]

    def patient(
        group: dist.ProcessGroup, tensors: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> dist.Work | Message:
        work = method(group, tensors, *args, **kwargs)
        if not tensors[0].is_cpu or not (from_anyone or group is dist.group.WORLD):
            return work
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        return FromAnyone(work, timeout) if from_anyone else Message(work, timeout)

    return patient
