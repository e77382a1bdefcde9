"""The zygote: a worker's Python process that stopped before its script, imported modules, and forks workers.

The zygote has the command line, environment and folder of a worker, and serves from within sitecustomize. In
a forked worker ``serve`` returns, and the interpreter goes on to the script by itself. ``__main__``,
``sys.argv``, ``sys.path[0]``, ``-m``, tracebacks, exit codes and finalisation are thus Python's own.
elasticd_afterfork.py makes the forked worker like a fresh process. elasticd_importing.py imports the modules
that can be shared.

Standard library only; of elasticd only the files in this folder, and elasticd/channel, loaded by path: the
script may find another elasticd, or none. The warden has the other end of the socket, in
elasticd/procs/zygote.py.

Whether a module can be shared shows only after its import, which cannot be undone. So a child of the zygote
imports the next few modules. If all can be shared, the child is the zygote from then on. Otherwise the child
exits, and the zygote goes on without the module that cannot be shared. The root, which is the process that
the warden started, imports nothing, forks the first zygote, and exits after the last.

Some processes, the embryos, are forked before they are asked for (elasticd_embryos.py).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import math
import os
import select
import signal
import socket
import sys
import time

import elasticd_ending
import elasticd_heartbeat  # imported here once for all workers
import elasticd_lookups  # noqa: F401  # likewise
from elasticd_afterfork import (
    PADDING,
    give_arguments,
    give_environment,
    give_identity,
    give_streams,
    seed_random_numbers,
)
from elasticd_embryos import Embryos, fork_apart, kill
from elasticd_importing import children, import_share, threads, without_left_out

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

_CONTROL = 3  # the descriptor of the socket
_UNUSABLE_MAX = 64  # children with modules that cannot be shared; the remaining modules are then left out
_IMPORT_S_MAX = 300.0  # the time limit for the import of one module
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def serve(here: str, withdraw: Callable[[str], None]) -> None:
    """Preload and fork until the socket closes. Return only in forked workers.

    ``here``: the folder of this file. ``withdraw``: takes the folder off the Python path.
    """
    zygote = None
    try:
        zygote = Zygote(here, withdraw)
        zygote.run()
    except BaseException:  # noqa: BLE001  # in any case the script must not run in this process
        os._exit(127 if zygote is not None and zygote.is_worker else 1)
    if not zygote.is_worker:
        os._exit(0)


class Zygote:
    def __init__(self, here: str, withdraw: Callable[[str], None]) -> None:
        self._here = here
        self._withdraw = withdraw
        self._libc = ctypes.CDLL(None)
        self._name = _comm()
        self._warden = os.getppid()
        self._framing, self._words = _channel_modules(here)
        self._channel = self._framing.Channel(
            socket.socket(fileno=_CONTROL), self._words.ZYGOTE_TO_WARDEN, self._words.WARDEN_TO_ZYGOTE
        )
        self.is_worker = False
        self._todo: list[str] = []  # the modules to import, in order
        self._in_order = False
        self._left_out: dict[str, str] = {}
        self._personal: Any = None
        self._unusable = 0
        self._asked = 0
        self._first_env = dict(os.environ)
        del os.environ[PADDING]  # from here on, the environment is the one that all workers share
        self._changed_env: dict[str, str | None] = {}
        self._output = (b"", b"")
        self._embryos = Embryos(self._framing, self._words)

    def run(self) -> None:
        """Serve. Return when the warden has closed the socket, or in a worker."""
        watched = sys.gettrace() or sys.getprofile() or atexit._ncallbacks() or threads() > 1
        if watched:  # for example by coverage from a .pth file, which must start anew in each process
            why = "something else starts with this Python (a .pth file)"
            self._channel.send(self._words.NoZygote(why))
            return
        elasticd_ending.register_exit_function()  # before imported modules register exit functions
        self._libc.prctl(_PR_SET_NAME, b"elasticd-zygote", 0, 0, 0)
        for fd in (1, 2):
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
        if self._is_root():
            return
        while True:
            if not self._asked_before(self._embryos.due):
                if line := self._embryos.fork():
                    self._await_request(line)
                    return
                continue
            forks = []
            for message, fds in self._receive():
                if isinstance(message, self._words.ForkWorker | self._words.ForkStore):
                    forks.append((message, fds))
                    continue
                if forks and self._fork(forks):
                    return
                forks = []
                self._personal, self._in_order = message.personal, message.in_order
                self._left_out.update(message.left_out)
                self._todo = without_left_out(message.modules, self._left_out, in_order=self._in_order)
                self._asked += 1
                self._preload()
            if forks and self._fork(forks):
                return

    def _asked_before(self, deadline: float) -> bool:
        wait_s = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        return bool(select.select([self._channel], [], [], wait_s)[0])

    def _receive(self) -> list[tuple[Any, list[int]]]:
        """Wait for a message. Return all that have arrived: workers that are asked for together are forked
        together."""
        messages = [self._channel.receive()]
        while (heard := self._channel.poll()) is not None:
            messages.append(heard)
        return messages

    # ------------------------------------------------------------ importing

    def _is_root(self) -> bool:
        """Fork the first zygote. Return True in the root, once no zygote is left."""
        ended, lives = os.pipe()  # each zygote has ``lives`` open, and no worker has
        if fork_apart(1) == 0:
            os.close(ended)
            return False
        os.close(lives)
        self._libc.prctl(_PR_SET_NAME, b"elasticd-root", 0, 0, 0)
        self._channel.close()
        os.read(ended, 1)
        return True

    def _preload(self) -> None:
        """Import the modules. Return in the zygote, which may then be another process."""
        self._embryos.drop()  # they lack the new imports
        path = [entry for entry in sys.path if entry == self._here]
        given = os.environ.get("PYTHONPATH")
        self._withdraw(self._here)
        before = dict(os.environ)
        while self._todo and self._unusable < _UNUSABLE_MAX:
            self._import_in_a_child()
        for name in before.keys() | os.environ.keys():
            if before.get(name) != os.environ.get(name):
                self._changed_env[name] = os.environ.get(name)
        sys.path[:0] = path
        if given is not None:
            os.environ["PYTHONPATH"] = given
        self._output = tuple(os.pread(fd, os.fstat(fd).st_size, 0) for fd in (1, 2))  # type: ignore[assignment]
        # The set is made before the fork. If a worker made it, the kernel would copy the pages of the names.
        elasticd_heartbeat.preloaded = frozenset(sys.modules)
        _freeze()
        self._embryos.due = time.monotonic()
        self._channel.send(self._words.Imported(self._asked, len(self._todo)))

    def _import_in_a_child(self) -> None:
        """Let a child import the next modules. The child is the zygote afterwards, unless the imports made it
        unusable."""
        said = [os.fstat(fd).st_size for fd in (1, 2)]
        ours, theirs = self._framing.pair()
        forked = fork_apart(1)
        if forked == 0:
            ours.close()
            self._import_as_child(theirs)
            return
        theirs.close()
        assert isinstance(forked, list)
        (pid,) = forked
        unfit = (
            self._hear_child(ours, pid) if pid else {self._todo[0]: "no process can be forked to import it"}
        )
        ours.close()
        for fd, size in zip((1, 2), said, strict=True):
            os.ftruncate(fd, size)
            os.lseek(fd, size, os.SEEK_SET)
        self._unusable += 1
        self._left_out.update(unfit)
        self._todo = without_left_out(self._todo, self._left_out, in_order=self._in_order)
        self._channel.send(self._words.LeftOut(unfit))

    def _hear_child(self, line: socket.socket, pid: int) -> dict[str, str]:
        """Return the modules that the child had to leave out. Do not return if the child is the new
        zygote."""
        line.send(b"g")
        try:
            end: list[Any] = [os.pidfd_open(pid)]  # readable once the child exits
        except OSError:
            end = []
        words = self._words
        channel = self._framing.Channel(line, words.ZYGOTE_TO_WARDEN, words.CHILD_TO_ZYGOTE)
        unfit, under_way, why = {}, self._todo[0], "it ends the process"
        while not unfit:
            readable = select.select([line, *end], [], [], _IMPORT_S_MAX)[0]
            why = why if readable else f"its import takes more than {_IMPORT_S_MAX:.0f} s"
            try:
                heard = channel.poll()
            except ConnectionError:
                heard = None
            if heard is None:
                unfit = {under_way: why}
            elif isinstance(heard[0], words.Importing):
                under_way = heard[0].module
            elif isinstance(heard[0], words.LeftOut):
                unfit = heard[0].modules
            else:
                os._exit(0)
        kill(pid)
        _close(end)
        return unfit

    def _import_as_child(self, line: socket.socket) -> None:
        """Import modules in a child of the zygote. If all can be shared, return as the new zygote; otherwise
        exit."""
        self._libc.prctl(_PR_SET_NAME, b"elasticd-import", 0, 0, 0)
        line.recv(1)  # the warden is the parent now
        self._die_with_warden()

        words = self._words
        channel = self._framing.Channel(line, words.CHILD_TO_ZYGOTE, words.ZYGOTE_TO_WARDEN)

        def begins(module: str) -> None:
            channel.send(words.Importing(module))

        done, unfit = import_share(self._todo, self._left_out, self._personal, begins)
        if unfit:
            for pid in children():
                kill(pid)
            channel.send(words.LeftOut(unfit))
            os._exit(0)
        del self._todo[:done]
        channel.send(words.Succeeded())
        line.recv(1)  # the old zygote has exited
        line.close()
        self._libc.prctl(_PR_SET_NAME, b"elasticd-zygote", 0, 0, 0)

    def _die_with_warden(self) -> None:
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._warden:  # the warden died before the call above
            os._exit(128 + signal.SIGKILL)

    # ------------------------------------------------------------ forking

    def _fork(self, requests: list[tuple[Any, list[int]]]) -> bool:
        """Make a process for each request, the first workers from the embryos, the others by forks. Return
        True in a worker."""
        requests.sort(key=lambda asked: isinstance(asked[0], self._words.ForkStore))
        workers = [asked for asked in requests if isinstance(asked[0], self._words.ForkWorker)]
        if workers:
            self._embryos.asked_for(len(workers))
        pids = self._embryos.use(workers)
        if pids:
            self._channel.send(self._words.Forked(tuple(pids.items())))
            for request, fds in workers:
                if request.id in pids:
                    _close(fds)
            requests = [asked for asked in requests if asked[0].id not in pids]
        if not requests:
            return False
        forked = fork_apart(len(requests))
        if isinstance(forked, int):
            self._embryos.drop()
            request, fds = requests[forked]
            if isinstance(request, self._words.ForkStore):
                self._serve_stores(fds)
            self._become_worker(request, fds)
            return True
        for _, fds in requests:
            _close(fds)
        ids = [request.id for request, _ in requests]
        self._channel.send(self._words.Forked(tuple(zip(ids, forked, strict=False))))
        return False

    def _await_request(self, line: Any) -> None:
        """Be an embryo, until it is a worker. ``line``: the channel to the zygote."""
        self._libc.prctl(_PR_SET_NAME, b"elasticd-embryo", 0, 0, 0)
        self._channel.close()
        self._channel = line
        try:
            request, fds = self._channel.receive()
            self._channel.send(self._words.Accepted())
        except Exception:  # noqa: BLE001  # the zygote has exited, or drops the embryo
            os._exit(0)
        self._become_worker(request, fds)

    def _become_worker(self, request: Any, fds: list[int]) -> None:
        self.is_worker = True
        link = fds.pop()
        failing = "a worker"
        try:
            for target, fd in enumerate(fds):
                os.dup2(fd, target)
            failing = f"in {request.program.cwd}"
            os.chdir(request.program.cwd)
            failing = "a worker"
            give_environment(request.program.env, self._changed_env, self._first_env)
            give_arguments(request.program.argv)
            give_streams()
            seed_random_numbers()
            give_identity()
            failing = ""
        except BaseException as error:  # noqa: BLE001
            failing = f"cannot run {failing}: {getattr(error, 'strerror', None) or repr(error)}"
        finally:
            os.set_blocking(link, True)
            if os.read(link, 1) != b"g":  # the warden has cancelled the worker
                os._exit(0)
        if failing:
            os.write(link, failing.encode(errors="backslashreplace"))
            os._exit(127)
        os.setsid()
        self._die_with_warden()
        self._libc.prctl(_PR_SET_NAME, self._name, 0, 0, 0)
        for fd, said in enumerate(self._output, 1):  # what the modules printed when they were imported
            _write(fd, said)
        self._channel.socket.detach()  # the descriptor is closed below
        os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)

    def _serve_stores(self, fds: list[int]) -> None:
        """Serve the stores of rounds, and exit."""
        link = fds.pop()
        self._channel.socket.detach()  # a file takes the place of the descriptor
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.set_blocking(link, True)
        if os.read(link, 1) != b"g":  # the warden has cancelled the process
            os._exit(0)
        os.setsid()
        self._die_with_warden()
        self._libc.prctl(_PR_SET_NAME, b"elasticd-store", 0, 0, 0)
        os.closerange(len(fds), max(map(int, os.listdir("/proc/self/fd"))) + 1)
        sys.path.insert(0, self._here)
        import elasticd_store

        elasticd_store.serve(_CONTROL)
        os._exit(0)


def _channel_modules(here: str) -> tuple[Any, Any]:
    """Return the modules ``framing`` and ``warden_messages`` of elasticd/channel. They are not
    left in ``sys.modules``."""
    folder = os.path.join(here, os.pardir, os.pardir, "channel")
    spec = importlib.util.spec_from_file_location(
        "elasticd_channel", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    sys.modules["elasticd_channel"] = importlib.util.module_from_spec(spec)
    framing, words = (
        importlib.import_module(f"elasticd_channel.{name}") for name in ("framing", "warden_messages")
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "elasticd_channel"]:
        del sys.modules[name]
    return framing, words


def _comm() -> bytes:
    """Return this process's name, before it changes."""
    with open("/proc/self/comm", "rb") as file:
        return file.read().rstrip(b"\n")


def _freeze() -> None:
    """Keep the garbage collector from touching memory that is shared with workers.

    ``__main__`` is not frozen: frozen objects are never collected, but the script's objects are collected at
    the end.
    """
    gc.collect()
    main = sys.modules["__main__"]
    for item in (main, main.__dict__):
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(item))
    gc.freeze()
    for item in (main, main.__dict__):
        ctypes.pythonapi.PyObject_GC_Track(ctypes.py_object(item))


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
