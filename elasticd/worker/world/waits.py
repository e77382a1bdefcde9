"""Waits for other workers, which end when the world ends.

If a connection is lost while a message is partly received, or not sent yet, Gloo waits on until its timeout,
half an hour. Even a small message may not be sent yet, if the connection was shut down and Gloo has not
noticed. So the training thread does not wait for Gloo. It waits for a future that completes when Gloo's
future does, and fails when the world ends. Waits for a message between two workers, for functional
collectives (which DTensor uses), and for a model's buffers have no future. In these cases another thread
waits, and is abandoned when the world ends.

Gloo also has one timeout for messages and for connections. Where workers are connected when a group is made,
the timeout must be short, since Gloo waits in vain for workers that die meanwhile. So this module waits for
each message with the timeout of the group's collectives. Where two workers are connected later (see
``connecting``), the first message to a worker waits for the connection, in another thread.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from elasticd.worker.world.connecting import is_late

T = TypeVar("T")
_NO_TIMEOUT = timedelta(0)  # torch's default: no timeout is given
_AT_ONCE = timedelta(milliseconds=1)
_METHODS = {name: getattr(dist.ProcessGroup, name) for name in ("send", "recv", "recv_anysource")}
_wait_for_work = dist.Work.wait
_future_of_work = dist.Work.get_future
_pre_forward = DistributedDataParallel._pre_forward
_share_buffers = DistributedDataParallel._distributed_broadcast_coalesced
_FUNCTIONAL = "_c10d_functional"  # torch's library of functional collectives
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

    def came(self) -> bool:
        """Return whether the message has been sent or received, once the world has ended. If not, the message
        is lost: Gloo closes the group's connections. Must not be called after ``wait``."""
        with contextlib.suppress(RuntimeError):
            return _wait_for_work(self._work, _AT_ONCE)
        return False


class FromAnyone(Message):
    """A message to receive from any sender."""

    def __init__(self, work: dist.Work, timeout: timedelta) -> None:
        super().__init__(work, timeout)
        self._ends = _Ends.before

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the message. Raises RuntimeError also when the world has ended, even before this call."""
        if self._ends != _Ends.so_far:
            raise dist.DistNetworkError(f"{ENDED} anyone had sent a message")
        return super().wait(timeout)


class _Ends:
    """The ends of worlds in this process. ``so_far``: their number. ``before``: their number at the start of
    the present world. ``patched``: whether ``Work.wait``, the futures of works, and backward passes of
    DistributedDataParallel end with the world. ``functional``: the same of functional collectives. ``open``:
    what fails at the next end. ``trained``: the models that were called with gradients."""

    news = threading.Lock()
    so_far = before = 0
    patched = False
    functional: torch.library.Library | None = None
    open: ClassVar[set[Future[Any] | _Substitute]] = set()
    trained: ClassVar[weakref.WeakSet[DistributedDataParallel]] = weakref.WeakSet()


class _Substitute:
    """A thread that waits in place of others, one at a time. ``idle``: the threads that nobody needs.
    ``calls``: what to call; None ends the thread. ``answers``: the value and the error of each call. They are
    queues, since a hand-over by torch's futures takes longer."""

    idle: ClassVar[list[_Substitute]] = []

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="elasticd-wait", daemon=True).start()

    def set_exception(self, error: Exception) -> None:
        """Have the caller of the present call raise the error, as a future does."""
        self.answers.put((None, error))

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                self.answers.put((call(), None))
            except Exception as error:  # noqa: BLE001  # the caller raises the error
                self.answers.put((None, error))
            del call  # which refers to the group


def _in_another_thread(call: Callable[[], T]) -> T:
    """Return what the call returns in another thread, or raise what it raises there. Raises RuntimeError also
    when the world ends; the other thread then ends with the call."""
    try:
        substitute = _Substitute.idle.pop()
    except IndexError:
        substitute = _Substitute()
    try:
        if not _open(substitute):
            raise dist.DistNetworkError(_OVER)
        substitute.calls.put(call)
        value, error = substitute.answers.get()
    except BaseException:
        _close(substitute)
        substitute.calls.put(None)
        raise
    if _close(substitute):
        _Substitute.idle.append(substitute)
    else:  # there may be two answers, as the world has ended
        substitute.calls.put(None)
    if error is not None:
        raise error
    return cast("T", value)


def _open(waiting: Future[Any] | _Substitute) -> bool:
    """Have ``waiting`` fail when the present world ends. Return False if the world has ended already."""
    with _Ends.news:
        if _Ends.so_far != _Ends.before:
            return False
        _Ends.open.add(waiting)
        return True


def _close(waiting: Future[Any] | _Substitute) -> bool:
    """Undo ``_open``. Return False if the world has ended since, so that ``waiting`` fails."""
    with _Ends.news:
        try:
            _Ends.open.remove(waiting)
        except KeyError:
            return False
        return True


def end() -> None:
    """End all waits: the world is over. Any thread may call it."""
    with _Ends.news:
        _Ends.so_far += 1
        waiting, _Ends.open = _Ends.open, set()
    for one in waiting:
        _fail(one, dist.DistNetworkError(_OVER))


class _Ended(Future[T]):
    """A future that keeps no exception that was raised. Such an exception has the frames of all who waited,
    and so their models. Python cannot find out that nobody else needs them, as the future is torch's."""

    def set_exception(self, result: Exception) -> None:  # type: ignore[override]
        self._set_unwrap_func(_raise_another)
        self.set_result(result.with_traceback(None))  # type: ignore[arg-type]


def _raise_another(error: Exception) -> NoReturn:
    raise type(error)(*error.args)


def until_end(of: Future[T]) -> Future[T]:
    """Return a future that completes as the given one does, and fails when the present world ends."""
    future: Future[T] = _Ended()
    if not _open(future):
        _fail(future, dist.DistNetworkError(_OVER))
        return future

    def complete(of: Future[T]) -> None:
        if not _close(future):
            return
        try:
            future.set_result(of.value())
        except RuntimeError as error:
            _fail(future, error)

    of.add_done_callback(complete)
    return future


def _fail(waiting: Future[Any] | _Substitute, error: Exception) -> None:
    waiting.set_exception(error)


def use_group_timeouts() -> None:
    """From now on, when a world begins, wait for all messages of this process with the groups' timeouts."""
    with _Ends.news:
        _Ends.before = _Ends.so_far
    for name, method in _METHODS.items():
        setattr(dist.ProcessGroup, name, _patient(method))
    if not _Ends.patched:  # elasticd_waits wraps it in turn
        _Ends.patched = True
        dist.Work.wait = _wait_until_end  # type: ignore[assignment, method-assign]
        dist.Work.get_future = _future_until_end  # type: ignore[assignment, method-assign]
        DistributedDataParallel._pre_forward = _pre_forward_until_end  # type: ignore[assignment, method-assign]
        DistributedDataParallel._distributed_broadcast_coalesced = _share_buffers_until_end  # type: ignore[assignment, method-assign]
    if _Ends.functional is None and not torch.cuda.is_available():
        library = torch.library.Library(_FUNCTIONAL, "IMPL")  # type: ignore[no-untyped-call]
        library.impl("wait_tensor", _wait_for_tensor_until_end, "CPU")  # type: ignore[no-untyped-call]
        _Ends.functional = library


def _wait_until_end(work: dist.Work, timeout: timedelta = _NO_TIMEOUT) -> bool:
    """Wait as ``Work.wait`` does, until the world ends. Raises RuntimeError then."""
    if torch.cuda.is_available() or work.is_completed():
        return _wait_for_work(work, timeout)
    try:
        future = None if timeout else _future_of_work(work)
    except RuntimeError:  # a message between two workers has no future
        future = None
    if future is None:
        return _in_another_thread(lambda: _wait_for_work(work, timeout))
    try:
        until_end(future).wait()
    except RuntimeError:
        if not work.is_completed():
            raise
    return _wait_for_work(work, timeout)


def _future_until_end(work: dist.Work) -> Future[Any]:
    """Return the future of the work, which fails when the world ends. Hooks of the script use it."""
    future = _future_of_work(work)
    return future if torch.cuda.is_available() or work.is_completed() else until_end(future)


def _wait_for_tensor_until_end(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the functional collectives of a tensor, until the world ends. Raises RuntimeError then."""
    wait = torch.ops._c10d_functional.wait_tensor.default
    torchs_own = torch._C.DispatchKey.CompositeExplicitAutograd
    _in_another_thread(lambda: wait._op_dk(torchs_own, tensor))
    return tensor


@torch._disable_dynamo  # Dynamo would compile this function, in more pieces than torch's own
def _pre_forward_until_end(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    """Have the model's backward passes end with the world. This is set up before the first forward pass with
    gradients, and no sooner, since the script may register its own hook until then."""
    if torch.is_grad_enabled() and model not in _Ends.trained:
        _Ends.trained.add(model)
        _add_up_until_end(model)
    return _pre_forward(model, *args, **kwargs)  # type: ignore[no-untyped-call]


def _share_buffers_until_end(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    """Have all workers take one worker's buffers, until the world ends. Raises RuntimeError then."""
    if torch.cuda.is_available():
        _share_buffers(model, *args, **kwargs)  # type: ignore[no-untyped-call]
        return

    def share() -> None:
        with torch.no_grad():  # of each thread
            _share_buffers(model, *args, **kwargs)  # type: ignore[no-untyped-call]

    _in_another_thread(share)


def _add_up_until_end(model: DistributedDataParallel) -> None:
    """Have the model's backward passes end with the world, unless the model has a hook already: torch allows
    one. The gradients are the same, to the bit, as without this."""
    size = dist.get_world_size(model.process_group)
    if size > 1 and not torch.cuda.is_available():
        group = None if model.process_group is dist.group.WORLD else model.process_group
        with contextlib.suppress(RuntimeError):
            model.register_comm_hook((1.0 / size, group), _add_up)


def _add_up(how: tuple[float, dist.ProcessGroup | None], bucket: dist.GradBucket) -> Future[torch.Tensor]:
    share, group = how  # not the model: a hook with the model would outlive the world
    if _Ends.so_far != _Ends.before:  # so the rest of the backward pass is of no use
        raise dist.DistNetworkError(_OVER)
    work = dist.all_reduce(bucket.buffer().mul_(share), group=group, async_op=True)
    assert work is not None
    summed: Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed


_add_up.__annotations__.clear()  # torch would compare the texts with classes


def _patient(method: Callable[..., dist.Work]) -> Callable[..., dist.Work | Message]:
    from_anyone = method is _METHODS["recv_anysource"]

    def patient(
        group: dist.ProcessGroup, tensors: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> dist.Work | Message:
        if tensors[0].is_cpu and is_late(group.size()):  # the call may wait for a connection
            work = _in_another_thread(lambda: method(group, tensors, *args, **kwargs))
        else:
            work = method(group, tensors, *args, **kwargs)
        if not tensors[0].is_cpu or not (from_anyone or group is dist.group.WORLD):
            return work
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        return FromAnyone(work, timeout) if from_anyone else Message(work, timeout)

    return patient
