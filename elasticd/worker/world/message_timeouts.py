"""Let messages between two workers wait as long as collectives do.

Gloo has one timeout for messages and for connections. It must be short, since Gloo waits in vain for workers
that die while they connect. So this module waits for each message with the timeout of the group's
collectives. Gloo also keeps waiting for a message from any sender after all connections are lost. So a thread
waits for a message from any sender, and is abandoned when the world ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_NO_TIMEOUT = timedelta(0)  # torch's default: no timeout is given
_METHODS = {name: getattr(dist.ProcessGroup, name) for name in ("send", "recv", "recv_anysource")}
receive = _METHODS["recv"]  # with a timeout of the caller's


class Message:
    """A ``dist.Work`` for a message in flight."""

    def __init__(self, work: dist.Work, timeout: timedelta) -> None:
        self._work = work
        self._timeout = timeout

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the message. Raises RuntimeError after the timeout."""
        return self._work.wait(timeout or self._timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class FromAnyone(Message):
    """A message to receive from any sender."""

    def __init__(self, work: dist.Work, timeout: timedelta) -> None:
        super().__init__(work, timeout)
        self._ends = _Ends.before

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
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
    """The ends of worlds in this process. ``so_far``: their number. ``before``: their number at the start of
    the present world."""

    news = threading.Condition()
    so_far = before = 0


def end() -> None:
    """Stop all waits for messages from any sender: the world is over. Any thread may call it."""
    with _Ends.news:
        _Ends.so_far += 1
        _Ends.news.notify_all()


def use_group_timeouts() -> None:
    """From now on, when a world begins, wait for all messages of this process with the groups' timeouts."""
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
