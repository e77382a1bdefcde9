"""Waits for other workers, which end when the world ends.

Gloo does not end a wait if the connection is lost when a part of the message has come: the wait lasts until
its timeout, which is half an hour. So the training thread does not wait for Gloo: it waits for a future that
completes when Gloo's does, and fails when the world ends. For messages from any sender, which have no future,
a thread waits, and is abandoned.

Gloo also has one timeout for messages and for connections. It must be short, since Gloo waits in vain for
workers that die while they connect. So this module waits for each message with the timeout of the group's
collectives.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")
_NO_TIMEOUT = timedelta(0)  # torch's default: no timeout is given
_METHODS = {name: getattr(dist.ProcessGroup, name) for name in ("send", "recv", "recv_anysource")}
_wait_for_work = dist.Work.wait
ENDED = "the world ended before"  # the messages of all errors of this module begin so
_OVER = f"{ENDED} all workers had answered"


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
            raise dist.DistNetworkError(f"{ENDED} anyone had sent a message")
        if isinstance(came[0], RuntimeError):
            raise came[0]
        return came[0]


class _Ends:
    """The ends of worlds in this process. ``so_far``: their number. ``before``: their number at the start of
    the present world. ``patched``: whether ``Work.wait`` ends with the world. ``open``: the futures that fail
    at the next end."""

    news = threading.Condition()
    so_far = before = 0
    patched = False
    open: ClassVar[set[Future[Any]]] = set()


def end() -> None:
    """End all waits: the world is over. Any thread may call it."""
    with _Ends.news:
        _Ends.so_far += 1
        futures, _Ends.open = _Ends.open, set()
        _Ends.news.notify_all()
    for future in futures:
        _fail(future, dist.DistNetworkError(_OVER))


def until_end(of: Future[T]) -> Future[T]:
    """Return a future that completes as the given one does, and fails when the present world ends."""
    future: Future[T] = Future()
    with _Ends.news:
        is_over = _Ends.so_far != _Ends.before
        if not is_over:
            _Ends.open.add(future)
    if is_over:
        _fail(future, dist.DistNetworkError(_OVER))
        return future

    def complete(of: Future[T]) -> None:
        with _Ends.news:
            if future not in _Ends.open:  # the world has ended
                return
            _Ends.open.remove(future)
        try:
            future.set_result(of.value())
        except RuntimeError as error:
            _fail(future, error)

    of.add_done_callback(complete)
    return future


def _fail(future: Future[T], error: Exception) -> None:
    future.set_exception(error)  # type: ignore[arg-type]  # torch annotates the type of a result


def use_group_timeouts() -> None:
    """From now on, when a world begins, wait for all messages of this process with the groups' timeouts."""
    with _Ends.news:
        _Ends.before = _Ends.so_far
    for name, method in _METHODS.items():
        setattr(dist.ProcessGroup, name, _patient(method))
    if not _Ends.patched:  # elasticd_waits wraps it in turn
        _Ends.patched = True
        dist.Work.wait = _wait_until_end  # type: ignore[assignment, method-assign]


def _wait_until_end(work: dist.Work, timeout: timedelta = _NO_TIMEOUT) -> bool:
    """Wait as ``Work.wait`` does, until the world ends. Raises RuntimeError then."""
    if not timeout and not torch.cuda.is_available() and not work.is_completed():
        try:
            future = until_end(work.get_future())
        except RuntimeError:  # a message between two workers has no future
            return _wait_for_work(work, timeout)
        try:
            future.wait()
        except RuntimeError:
            if not work.is_completed():
                raise
    return _wait_for_work(work, timeout)


def add_up_until_end(model: DistributedDataParallel, size: int) -> None:
    """Have the model's backward passes end with the world, unless the model has a hook already: torch allows
    one. ``size``: the number of workers. The gradients are the same, to the bit, as without this."""
    if size > 1 and not torch.cuda.is_available():
        group = None if model.process_group is dist.group.WORLD else model.process_group
        with contextlib.suppress(RuntimeError):
            model.register_comm_hook((1.0 / size, group), _add_up)


def _add_up(how: tuple[float, dist.ProcessGroup | None], bucket: dist.GradBucket) -> Future[torch.Tensor]:
    share, group = how  # not the model: a hook with the model would outlive the world
    work = dist.all_reduce(bucket.buffer().mul_(share), group=group, async_op=True)
    assert work is not None
    return until_end(work.get_future()).then(lambda done: done.value()[0])


_add_up.__annotations__.clear()  # torch would compare the texts with classes


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
