"""Messages between two workers wait for as long as collectives do.

Gloo waits for them as long as it was given to connect, which must be short: it waits in vain for whoever
dies meanwhile. So each is waited for with the timeout of its group, which is that of its collectives.

And for one from whomever, gloo waits on though all connections are lost. So that is done in a thread, which
is left behind where the world ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_UNSAID = timedelta(0)  # as torch has it
_METHODS = {name: getattr(dist.ProcessGroup, name) for name in ("send", "recv", "recv_anysource")}


class Message:
    """A ``dist.Work`` under way."""

    def __init__(self, work: dist.Work, timeout: timedelta) -> None:
        self._work = work
        self._timeout = timeout

    def wait(self, timeout: timedelta = _UNSAID) -> bool:
        """Raises RuntimeError when it has not come by then."""
        return self._work.wait(timeout or self._timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class FromAnyone(Message):
    """One to receive, from whoever sends it."""

    def __init__(self, work: dist.Work, timeout: timedelta) -> None:
        super().__init__(work, timeout)
        self._ends = _Ends.before

    def wait(self, timeout: timedelta = _UNSAID) -> bool:
        """Raises RuntimeError also when the world has ended, be it before this was asked for."""
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
    """Of the worlds that this process was in; ``before``: as the present one began."""

    news = threading.Condition()
    so_far = before = 0


def end() -> None:
    """The world is over: nobody waits for a message from anyone in it. From any thread."""
    with _Ends.news:
        _Ends.so_far += 1
        _Ends.news.notify_all()


def give_time() -> None:
    """To all of this process's messages from now on, which are those of a world that begins."""
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
