"""The process group of one round: joined together, left together at a commit, or aborted at once.

Gloo has no abort: its collectives wait as long as their connections live. So a world knows the connections of
its group and shuts them down. Each end sees this as the death of the other.

All other agreements between the workers of a round use the round's store, which the agent hosts. The store
costs nothing while idle, and keeps an agreement when a worker dies. A worker alone has a store of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from elasticd.channel.worker_messages import Enter
from elasticd.checkpoint.client import levels
from elasticd.worker.world import connecting, destroying, resolver, waits
from elasticd.worker.world.destroying import sockets

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FORMING_S_MAX = 10.0  # the time for the workers, which are all ready, to connect to each other
FORMING_S_MAX_EACH = 0.1  # additional time for each worker
STORE_S_MAX = 15.0  # the time to reach the store
ANSWER_S_MAX = 2.0  # the time for the store's answer when a wait is ended, since the network may be down
_LEFT = "left"
# Marks of a failed collective in the messages of errors. A hook of DistributedDataParallel that fails with a
# DistError makes torch raise a RuntimeError with its text.
_OF_THE_GROUP = ("gloo/", "NCCL", "monitoredBarrier", waits.ENDED)
_FOREVER = timedelta(days=30)  # the agent ends the wait, not a clock
# What keeps torch's threads for NCCL from ending or holding up a process that outlives a lost peer.
NCCL_ENVIRONMENT: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # After an error, the watchdog would sleep for a minute, so that all ranks can write the flight recorder.
    # The agent has the recorder written if workers hang.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
_make_group = c10d._new_process_group_helper  # torch makes all process groups with this function


def rank() -> int:
    """Return this worker's rank in the present world. A change of world may change it."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of workers in the present world."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


@functools.cache
def device() -> torch.device:
    """Return this worker's device for the life of its process: a GPU if there is one, else the CPU.

    The device stays the same, although LOCAL_RANK may change with the world.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    mine = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(mine)
    return mine


def mesh(unit: int | None = None) -> DeviceMesh:
    """Return the present world as a mesh with the dimensions ``replicate`` and ``unit``.

    The shape is (world size / unit, unit). Rank r is at (r // unit, r % unit): ``mesh()["unit"]`` has the
    workers that hold one model together, ``mesh()["replicate"]`` the workers that hold the same part of a
    model.

    ``unit``: the number of workers in a unit; by default that of ``elasticd run --unit``, else 1. All ranks
    call the function, once in each world, after the process group is made. Raises ValueError if the world is
    no multiple of the unit.
    """
    from torch.distributed.device_mesh import init_device_mesh

    unit = unit_size(unit)
    return init_device_mesh(device().type, (world_size() // unit, unit), mesh_dim_names=("replicate", "unit"))


def asked_unit(unit: int | None = None) -> int:
    """Return ``unit``, or else that of ``elasticd run --unit``, else 1. Raises ValueError below 1."""
    if unit is None:
        unit = int(os.environ.get("ELASTICD_UNIT", "1"))
    if unit < 1:
        raise ValueError(f"unit is {unit}: give a number that is 1 or more")
    return unit


def unit_size(unit: int | None = None) -> int:
    """Return the number of workers in a unit of the present world: ``unit``, or else that of ``elasticd run
    --unit``, else 1. Raises ValueError if the world is no multiple of the unit."""
    size, unit = world_size(), asked_unit(unit)
    if size % unit:
        raise ValueError(
            f"a world of {size} workers has no whole units of {unit}; give `elasticd run --unit {unit}`"
        )
    return unit


class WorldChanged(BaseException):
    """The worker's world is over, and the run function must end. The library then calls the run function
    again in the next world. It is not an Exception, so that ``except Exception`` does not catch it."""


class World:
    """One round, as this worker sees it.

    Another thread calls ``abort`` and ``ask_to_leave``; the training thread calls the rest. ``broken``: why a
    sum of this step may be wrong.
    """

    def __init__(self, enter: Enter) -> None:
        self.number = enter.round
        self.rank = int(enter.env["RANK"])
        self.size = int(enter.env["WORLD_SIZE"])
        self.over = False
        self.broken: BaseException | None = None
        self.sums_begun = self.sums = 0  # backward passes since the last commit: begun, and completed
        self._address = enter.env["MASTER_ADDR"], int(enter.env["MASTER_PORT"])
        self._own_store = _store_of_one() if self.size == 1 else None
        self._lock = threading.Lock()
        self._told = threading.Condition(self._lock)
        self._telling = False
        self._commit = 0
        self._last_commit: int | None = None
        self._leaving = False
        self._leaves_early = False
        self._going = False
        self._awaited = ""
        self._formed = False
        self._connections: set[tuple[int, str]] = set()
        self._listeners: set[tuple[int, str]] = set()  # of groups whose workers are connected late
        # While the group connects: sockets that do not belong to the group.
        self._others: set[tuple[int, str]] | None = None

    # ------------------------------------------------------------ joining

    def form(self, commit: int, timeout: timedelta) -> None:
        """Join the other workers. Raises WorldChanged if the world ends before it began.

        ``commit``: the number of this worker's last commit. ``timeout``: of the group's collectives.
        """
        self._commit = commit
        _spare_children()
        _present[:] = [self]
        with self.or_over():
            late = connecting.is_late(self.size)
            with self._connecting():
                self._store = self._connect()
                # A client makes one call at a time, and gloo makes calls when workers are connected later.
                of_group = self._connect() if late else self._store
            # Gloo waits in vain for a worker that dies while it connects. So connect only when all are ready.
            if self._store.add("here", 1) == self.size:
                self._store.compare_set("all", "", "here")
            if self._await("all") != "here" or self.over:  # the world may have ended too late for the store
                raise WorldChanged
            self._know_groups()
            waits.use_group_timeouts()
            _survive_the_communicator()
            with _one_prefix_of_errors():
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                    store=dist.PrefixStore("group", of_group),
                    rank=self.rank,
                    world_size=self.size,
                    # A late connection waits for the other worker to come to a collective, or for the end
                    # of the world.
                    timeout=timeout
                    if late
                    else timedelta(seconds=FORMING_S_MAX + FORMING_S_MAX_EACH * self.size),
                )
            group = dist.group.WORLD
            assert group is not None
            for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                group._get_backend(torch.device(kind))._set_default_timeout(timeout)
        with self._lock:
            self._formed = True
            leaves_early = self._leaves_early
        if leaves_early:
            self.ask_to_leave(self._going)

    # ------------------------------------------------------------ training

    def check(self) -> None:
        """Raise WorldChanged if the world is over or broken, even if the script has swallowed an earlier
        WorldChanged."""
        if self.broken is not None:
            raise WorldChanged from self.broken
        if self.over or (self._last_commit is not None and self._commit >= self._last_commit):
            raise WorldChanged

    def require_all_sums(self) -> None:
        """Raise WorldChanged unless all sums of this step have arrived. If none of State's
        DistributedDataParallel wrappers made the sums, ask the other workers by a collective."""
        if self.broken is not None:
            raise WorldChanged from self.broken
        if self.size > 1 and (self.sums == 0 or self.sums != self.sums_begun):
            with self.or_over():
                dist.all_reduce(torch.zeros(1, device="cpu"))
        self.sums_begun = self.sums = 0

    def ends_with_commit(self, number: int) -> bool:
        """Whether the world ends with this commit. ``number``: the commit's number, which grows with each
        commit and is the same in all workers."""
        with self._lock:
            self._commit = number
            if self.over or not self._leaving:
                return self.over
        if self._last_commit is None:
            try:
                self._last_commit = int(self._await("last step"))
            except (RuntimeError, ValueError):  # the store is lost, or a worker has left already
                return True
        return self.over or number >= self._last_commit

    @property
    def is_going(self) -> bool:
        """Whether the next world is without this worker."""
        return self._going

    @property
    def ends_as_planned(self) -> bool:
        """Whether the world has just ended with a commit that all workers have made."""
        return not self.over and self._last_commit is not None and self._commit >= self._last_commit

    def nobody_stays(self) -> bool:
        """Whether the world has just ended in a planned way, and none of its workers will be in a later one.
        All ranks call it together. Raises WorldChanged if the world ends otherwise meanwhile."""
        if not self.ends_as_planned:
            return False
        staying = torch.tensor(float(not self._going), device="cpu")
        if self.size > 1:
            with self.or_over():
                dist.all_reduce(staying)
        return not staying

    def end(self) -> bool:
        """Wait until the run functions of all workers have returned, or the world ends. Return whether they
        have returned; the answer is the same on all workers."""

        def say_so() -> None:
            if self._store.add("returned", 1) == self.size:
                self._store.compare_set("outcome", "", "done")

        try:
            return self._await("outcome", say_so) == "done"
        except RuntimeError:
            return False

    # ------------------------------------------------------------ values for other workers

    def set_value(self, key: str, value: str) -> None:
        """Set a value that other workers wait for. Raises WorldChanged."""
        with self.or_over():
            self._store.compare_set(key, "", f"={value}")

    def wait_for_value(self, key: str) -> str:
        """Wait for a value that another worker sets. Raises WorldChanged.

        core.thread_activity finds this function in stacks by its name.
        """
        try:
            value = self._await(key)
        except RuntimeError as error:  # the store is lost
            self.broken = self.broken or error
            raise WorldChanged from error
        if self.over or value == _LEFT:
            raise WorldChanged
        return value.removeprefix("=")

    def forget_values(self, keys: Sequence[str], readers: int) -> None:
        """Remove values that this worker has read, once ``readers`` workers have called this with the same
        keys: others may lag by many steps. Raises WorldChanged."""
        read = f"heard {keys[-1]}"
        with self.or_over():
            if self._store.add(read, 1) == readers:
                for key in (*keys, read):
                    self._store.delete_key(key)

    # ------------------------------------------------------------ leaving

    def ask_to_leave(self, going: bool) -> None:
        """Leave at the first commit that no worker has passed yet.

        Each worker writes the number of its last commit to the store, and waits at its next commit until all
        have written. Workers that still join do so first, so that new workers get the state.
        ``going``: the next world is without this worker.
        """
        with self._lock:
            self._leaves_early = not self._formed
            self._going = going
            if self._leaves_early or self._leaving:
                return
            self._leaving = True
            # A client makes one call at a time. So the client of the training thread serves only if that
            # thread does not wait with it, and lets that thread wait only once this is done.
            self._telling = not self._awaited
            commit = str(self._commit)

        def write_commit() -> None:
            try:
                store = self._client_that_answers(f"step of {self.rank}", commit)
                if store.add("told", 1) == self.size:
                    commits = store.multi_get([f"step of {rank}" for rank in range(self.size)])
                    store.compare_set("last step", "", str(max(map(int, commits)) + 1))
            finally:
                with self._told:
                    self._telling = False
                    self._told.notify_all()

        _use_store_in_thread(write_commit)

    def abort(self) -> None:
        """End the world now: every wait for other workers raises."""
        with self._lock:
            if self.over:
                return
            self.over = True
            awaited = self._awaited
            self._told.notify_all()
        if awaited:
            # This ends the wait in all workers, unless the awaited value came first.
            told = _use_store_in_thread(lambda: self._connect().compare_set(awaited, "", _LEFT))
            with contextlib.suppress(queue.Empty):
                if told.get(timeout=ANSWER_S_MAX):
                    return
        self._cut()

    def close(self) -> None:
        """Cut the connections, so that other workers do not wait for this one. The dead group remains until
        ``forget``."""
        with self._lock:
            self.over = True
            self._told.notify_all()
        self._cut()

    def forget(self) -> None:
        """Destroy the groups. Nothing of them stays in memory unless the script holds references."""
        c10d._new_process_group_helper = _make_group
        _present.clear()
        groups = [*c10d._world.pg_map]
        # The first does not wait for gloo's threads, the second not for NCCL's watchdog.
        ways = [inspect.unwrap(dist.destroy_process_group), c10d._abort_process_group]
        for destroy in reversed(ways) if torch.cuda.is_available() else ways:
            if dist.is_initialized():
                with contextlib.suppress(RuntimeError):  # the group was broken already
                    destroy()
        # torch names groups by this counter. A failed attempt leaves the counter raised, while newcomers
        # count from 0.
        c10d._world.group_count = 0
        if destroying.is_held(groups):
            gc.collect()  # for example a cycle of an exception and a frame
        destroying.begin(groups, self._connections)

    @contextlib.contextmanager
    def or_over(self) -> Iterator[None]:
        """Raise WorldChanged if the block fails because the world is over or a collective has failed. A lack
        of memory or threads is this worker's own error."""
        try:
            yield
        except RuntimeError as error:
            if not (self.over or is_of_the_group(error)):
                raise
            self.broken = self.broken or error
            raise WorldChanged from error
        if self.over:
            raise WorldChanged

    # ------------------------------------------------------------

    def _connect(self) -> dist.Store:
        if self._own_store is not None:
            return self._own_store
        host, port = self._address
        with resolver.unasked(host):
            return dist.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=STORE_S_MAX)
            )

    def _client_that_answers(self, key: str, value: str) -> dist.Store:
        """Set the value with the client of the training thread, or else with a new client, and return the
        client. A new client costs a connection. It is needed if the training thread waits, here or within
        torch, as while the script makes a group."""
        if self._telling:
            answered = _use_store_in_thread(lambda: self._store.set(key, value))
            with contextlib.suppress(queue.Empty):
                if answered.get(timeout=ANSWER_S_MAX):
                    return self._store
        store = self._connect()
        store.set(key, value)
        return store

    def _await(self, key: str, before: Callable[[], None] = lambda: None) -> str:
        """Wait for a value that is the same for all workers. The value is set once: by a worker that knows
        it, or by the first worker that must leave, to ``_LEFT``. If the world ends meanwhile, it may have
        been set before, so only the store knows.

        ``before``: called first, unless the world is over already. The value may depend on that call.
        """
        with self._lock:
            if self.over:
                return _LEFT
            self._awaited = key
        try:
            with self._told:
                self._told.wait_for(lambda: self.over or not self._telling)
            before()
            self._store.wait([key], _FOREVER)
            return self._store.get(key).decode()
        finally:
            with self._lock:
                self._awaited = ""

    @contextlib.contextmanager
    def _connecting(self) -> Iterator[None]:
        """Note the connections that are made in the block as connections of this world. Not noted are sockets
        that another thread of the script makes in Python."""
        self._others = others = set(sockets())
        try:
            with _noting_pythons_own(others):
                yield
        finally:
            with self._lock:
                self._connections |= set(sockets()) - self._others
                self._others = None

    def _know_groups(self) -> None:
        """Note the connections of all groups of the world, also of those that the script makes."""

        def make(*args: Any, **kwargs: Any) -> Any:
            size = args[0]
            with self._lock:
                before = {*self._connections}
            with self._connecting(), levels.unchecked(), connecting.as_suits(size):
                made = _make_group(*args, **kwargs)
            if connecting.is_late(size):
                with self._lock:
                    self._listeners.update(connecting.listening(self._connections - before))
            return made

        c10d._new_process_group_helper = make

    def _cut(self) -> None:
        waits.end()
        with self._lock:
            now = set(sockets())
            if self._others is not None:
                self._connections |= now - self._others
            late = self._connected_late()
            self._connections |= late
            for descriptor, _ in (now & self._connections) | late:
                _shut(descriptor)
        if torch.cuda.is_available():  # aborting communicators may take a while
            _abort_communicators()

    def _connected_late(self) -> set[tuple[int, str]]:
        """Return the connections that gloo has made since the groups were made."""
        return {one for _, watched in destroying.loops_of(self._listeners) for one in watched}

    def connections(self) -> set[tuple[int, str]]:
        """Return the connections of all groups of the world: descriptors and ids, as from
        ``destroying.sockets``."""
        return self._connections | self._connected_late()


def rehearse(timeout: timedelta) -> None:
    """Form a world of this worker alone, and leave it. Errors are ignored: the next world meets them again.

    A process forms its first world far more slowly than a later one, and the workers that it joins would wait
    for it. With GPUs this function does nothing: there most of the time is NCCL's, which needs the other
    workers.
    """
    if torch.cuda.is_available():
        return
    hook = sys.excepthook
    world = World(Enter(0, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "", "MASTER_PORT": "0"}))
    try:
        with contextlib.suppress(Exception, WorldChanged):
            world.form(0, timeout)
    finally:
        world.over = True
        world._connections.clear()  # a world of one has none; these are the script's
        world.forget()
        sys.excepthook = hook


def _store_of_one() -> dist.Store:
    """Return a store for a worker without others to agree with. The script's own waits in the store do not
    end with the world, but time out as soon as with a server."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=STORE_S_MAX))
    return store


def or_over(world: World | None) -> contextlib.AbstractContextManager[None]:
    """Return ``world.or_over()``; for a world that cannot change, a block in which nothing happens."""
    return contextlib.nullcontext() if world is None else world.or_over()


def gathered(mine: Sequence[int], world: World | None) -> list[list[int]]:
    """Return the integers of each worker, by rank. All workers of the world call it together. Raises
    WorldChanged."""
    size = world.size if world is not None else world_size()
    if size == 1:
        return [[*mine]]
    sent = torch.tensor(mine, device="cpu")
    received = [torch.zeros_like(sent) for _ in range(size)]
    with or_over(world):
        dist.all_gather(received, sent)
    return [each.tolist() for each in received]


def all_have(number: int, world: World) -> bool:
    """Whether the number is the same in all workers. All workers of the world call it together; none returns
    before all have called. Faster than ``gathered`` in a large world. Raises WorldChanged."""
    if world.size == 1:
        return True
    extremes = torch.tensor([number, -number], device="cpu")
    with world.or_over():
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, negated_least = extremes.tolist()
    return bool(largest == -negated_least)


_present: list[World] = []  # the world of this process, if it has formed


@functools.cache
def _spare_children() -> None:
    """Exclude present objects from garbage collection in forked children, such as a DataLoader's, and give up
    the connections there.

    A forked child has no threads of its parent's groups, so destroying such a group there crashes or hangs.
    If the child kept the connections, other workers would not notice the death of its parent. In a group that
    is connected late, gloo relies on the connections to leave its event loop once the parent has closed them,
    and else calls std::terminate.
    """

    def spare() -> None:
        gc.freeze()
        destroying.let_go(destroying.left_behind().union(*(world.connections() for world in _present)))

    os.register_at_fork(after_in_child=spare)


def is_of_the_group(failure: BaseException | None) -> bool:
    """Whether the failure, or one of its causes, is a failed collective or the end of a world."""
    return any(
        isinstance(error, dist.DistError | WorldChanged)
        or (isinstance(error, RuntimeError) and any(mark in str(error) for mark in _OF_THE_GROUP))
        for error in what_led_to(failure)
    )


def what_led_to(failure: BaseException | None) -> list[BaseException]:
    """Return the failure with its causes, its contexts, and the members of exception groups."""
    found: list[BaseException] = []
    ahead = [failure]
    while ahead:
        error = ahead.pop()
        if error is not None and not any(error is other for other in found):
            found.append(error)
            ahead += [error.__cause__, error.__context__]
            if isinstance(error, BaseExceptionGroup):
                ahead += error.exceptions
    return found


def _use_store_in_thread(use: Callable[[], object]) -> queue.SimpleQueue[bool]:
    """Use the store in a separate thread, since the store may be unreachable. The queue gets whether ``use``
    succeeded. If it failed, the agent decides about the world."""
    outcome: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run() -> None:
        try:
            use()
            outcome.put(True)
        except RuntimeError:
            outcome.put(False)

    threading.Thread(target=run, name="elasticd-store", daemon=True).start()
    return outcome


_hooks: list[Any] = []  # sys.excepthook before torch last made a process group, and after


@contextlib.contextmanager
def _one_prefix_of_errors() -> Iterator[None]:
    """Have the lines of a traceback begin with the present rank alone. Each time that torch makes the process
    group, it wraps ``sys.excepthook`` to add the rank."""
    before = _hooks[0] if _hooks and sys.excepthook is _hooks[1] else sys.excepthook
    sys.excepthook = before
    try:
        yield
    finally:
        _hooks[:] = [before, sys.excepthook]


def _survive_the_communicator() -> None:
    """Keep torch's watchdog from ending the process when an NCCL communicator fails. torchrun wants that end;
    here the process outlives the world."""
    os.environ |= NCCL_ENVIRONMENT


def _abort_communicators() -> None:
    """Abort all communicators at the same time, since each may wait for the others: to free its memory, NCCL
    waits for all kernels on the GPU (https://github.com/pytorch/pytorch/issues/119797).

    Kernels that wait for another GPU end. The CUDA context stays.
    """

    def abort(group: dist.ProcessGroup) -> None:
        with contextlib.suppress(RuntimeError):  # the communicator was broken already
            group.abort()

    aborting = [
        threading.Thread(target=abort, args=(group,), name="elasticd-abort", daemon=True)
        for group in [*c10d._world.pg_names]
    ]
    for thread in aborting:
        thread.start()
    for thread in aborting:
        thread.join()


@contextlib.contextmanager
def _noting_pythons_own(sockets: set[tuple[int, str]]) -> Iterator[None]:
    """Add to ``sockets`` the sockets that Python code makes in the block. torch makes its sockets in C++."""
    make: Any = socket.socket.__init__

    def noting(self: socket.socket, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        with contextlib.suppress(OSError):
            sockets.add((self.fileno(), os.readlink(f"/proc/self/fd/{self.fileno()}")))

    socket.socket.__init__ = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        socket.socket.__init__ = make  # type: ignore[method-assign]


def _shut(descriptor: int) -> None:
    """Shut a connection down. A listening socket stays: if it were shut, gloo would call std::terminate."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and not connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the connection is closed, or was never made
        pass
