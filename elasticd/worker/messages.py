"""Messages between two workers wait for as long as collectives do.

Gloo waits for them as long as it was given to connect, which must be short: it waits in vain for whoever
dies meanwhile. So each is waited for with the timeout of its group, which is that of its collectives.
"""

from __future__ import annotations

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


def give_time() -> None:
    """To all of this process's world group from now on. Doing so again does nothing."""
    for name, method in _METHODS.items():
        setattr(dist.ProcessGroup, name, _patient(method))


def _patient(method: Callable[..., dist.Work]) -> Callable[..., dist.Work | Message]:
    def patient(
        group: dist.ProcessGroup, tensors: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> dist.Work | Message:
        work = method(group, tensors, *args, **kwargs)
        if group is not dist.group.WORLD or not tensors[0].is_cpu:
            return work
        return Message(work, group._get_backend(torch.device("cpu")).options._timeout)

    return patient
