"""The zygote: a worker's Python that stopped before its script, imported modules, and forks workers.

It is started with the very command line, environment and folder of a worker, and serves from within
sitecustomize. In a forked worker ``serve`` returns, and the interpreter goes on to the script by
itself: ``__main__``, ``sys.argv``, ``sys.path[0]``, ``-m``, tracebacks, exit codes and finalisation
are python's own. What is left to do is what the fork copied and a fresh process would not have: see
elasticd_likeness.py; and what can be imported for all, elasticd_importing.py.

Standard library only, and of ours what lies beside it and elasticd/procs/channel.py, loaded by path.
The other end of the socket is elasticd/procs/zygote.py, in the warden.

As forking this much memory takes a while, one process is forked ahead: the embryo, which costs no
memory of its own but what it writes to, next to nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import time

import elasticd_ending
import elasticd_heartbeat  # once for all workers, as is all that it needs
from elasticd_importing import children, import_all, threads
from elasticd_likeness import (
    PADDING,
    give_arguments,
    give_chance,
    give_environment,
    give_identity,
    give_streams,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, NoReturn

_CONTROL, _STATE = 3, 4  # descriptors; the second outlives an exec of this process by itself
_TRIES_MAX = 8
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PID = struct.Struct("=i")
_EMBRYO_AGAIN_S = 1.0  # until the next is made, when the job recovers and needs its cores


def serve(here: str, withdraw: Callable[[str], None]) -> None:
    """Preload and fork until the socket closes. Returns in forked workers, and nowhere else.

    ``here``: the folder of this file. ``withdraw``: takes it off the Python path.
    """
    me = os.getpid()
    try:
        Zygote(here, withdraw).run()
    except BaseException:  # noqa: BLE001  # whatever it is, the script must not run in this process
        if os.getpid() == me:
            os._exit(1)
        os._exit(127)
    if os.getpid() == me:
        os._exit(0)


class Zygote:
    def __init__(self, here: str, withdraw: Callable[[str], None]) -> None:
        self._here = here
        self._withdraw = withdraw
        self._libc = ctypes.CDLL(None)
        self._name = _comm()
        self._warden = os.getppid()
        self._channel = _channel_class(here)(socket.socket(fileno=_CONTROL))
        self._state: dict[str, Any] = {"modules": [], "left_out": {}, "tries": 0, "asked": 0}
        self._first_env = dict(os.environ)
        del os.environ[PADDING]  # from here on it is what its workers have in common
        self._changed_env: dict[str, str | None] = {}
        self._said = (b"", b"")
        self._embryo: tuple[int, Any] | None = None
        self._embryo_at = math.inf  # when to make one

    def run(self) -> None:
        """Serve. Returns when the other end is gone, or in a worker."""
        watched = sys.gettrace() or sys.getprofile() or atexit._ncallbacks() or threads() > 1
        if watched:  # coverage and the like, from a .pth file: one for each process
            self._tell({"is": "unfit", "why": "something else starts with this Python (a .pth file)"})
            return
        elasticd_ending.be_last()  # before modules ask for more at exit
        self._libc.prctl(_PR_SET_NAME, b"elasticd-zygote", 0, 0, 0)
        for fd in (1, 2):
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
        if self._resume():
            self._preload()
        while True:
            if self._embryo is None and not self._asked_before(self._embryo_at):
                if self._conceive():
                    return
                continue
            forks = []
            for message, fds in self._receive():
                if message["do"] == "fork":
                    forks.append((message, fds))
                    continue
                if forks and self._fork(forks):
                    return
                forks = []
                self._state["modules"] += message["modules"]
                self._state["personal"] = message["personal"]
                self._state["left_out"].update(message["left_out"])
                self._state["asked"] += 1
                self._preload()
            if forks and self._fork(forks):
                return

    def _asked_before(self, deadline: float) -> bool:
        wait_s = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        return bool(select.select([self._channel], [], [], wait_s)[0])

    def _receive(self) -> list[tuple[Any, list[int]]]:
        """At least one message, and no half of another: an exec would lose it."""
        messages: list[tuple[Any, list[int]]] = []
        while not messages or self._channel.unfinished:
            select.select([self._channel], [], [])
            messages += self._channel.receive()
        return messages

    def _tell(self, message: dict[str, Any]) -> None:
        self._channel.send(message)
        while self._channel.pending:
            select.select([], [self._channel], [])
            self._channel.flush()

    # ------------------------------------------------------------ importing

    def _resume(self) -> bool:
        """Whether this process took its own place in order to start again without some modules."""
        try:
            if not os.readlink(f"/proc/self/fd/{_STATE}").startswith("/memfd:elasticd-zygote"):
                return False
        except OSError:
            return False
        self._state = json.loads(os.pread(_STATE, os.fstat(_STATE).st_size, 0))
        os.close(_STATE)
        return True

    def _preload(self) -> None:
        self._drop_embryo()  # it would lack what is imported now
        path = [entry for entry in sys.path if entry == self._here]
        given = os.environ.get("PYTHONPATH")
        self._withdraw(self._here)
        before = dict(os.environ)
        unfit = import_all(self._state["modules"], self._state["left_out"], self._state["personal"])
        if unfit:
            self._start_again(unfit)
        for name in before.keys() | os.environ.keys():
            if before.get(name) != os.environ.get(name):
                self._changed_env[name] = os.environ.get(name)
        sys.path[:0] = path
        if given is not None:
            os.environ["PYTHONPATH"] = given
        self._said = tuple(os.pread(fd, os.fstat(fd).st_size, 0) for fd in (1, 2))  # type: ignore[assignment]
        # Made here, as each worker that looked at all names would get copies of the pages they lie in.
        elasticd_heartbeat.preloaded = frozenset(sys.modules)
        _freeze()
        self._state["tries"] = 0
        self._embryo_at = time.monotonic()
        self._tell({"is": "ready", "asked": self._state["asked"]})

    def _start_again(self, left_out: dict[str, str]) -> NoReturn:
        """What was imported cannot be taken back, so this process becomes a new one, without it."""
        self._state["left_out"].update(left_out)
        self._state["tries"] += 1
        self._tell({"is": "left_out", "names": left_out})
        for pid in children():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if self._state["tries"] > _TRIES_MAX:
            os._exit(0)
        fd = os.memfd_create("elasticd-zygote", 0)
        os.write(fd, json.dumps(self._state).encode())
        for other in map(int, os.listdir("/proc/self/fd")):
            if other > _CONTROL and other != fd:
                try:
                    os.set_inheritable(other, False)
                except OSError:
                    pass  # the listing itself
        if fd != _STATE:
            os.dup2(fd, _STATE)
            os.close(fd)
        os.execve(sys.executable, sys.orig_argv, self._first_env)

    # ------------------------------------------------------------ forking

    def _fork(self, requests: list[tuple[Any, list[int]]]) -> bool:
        """A worker for each request: the embryo, if there is one, and others forked now; true in one."""
        if self._embryo is not None:
            request, fds = requests[0]
            pid = self._use_embryo(request, fds)
            if pid:
                self._tell({"is": "forked", "pids": {request["id"]: pid}})
                _close(fds)
                requests = requests[1:]
        if not requests:
            return False
        forked = self._fork_apart(len(requests))
        if isinstance(forked, int):
            self._become_worker(*requests[forked])
            return True
        for _, fds in requests:
            _close(fds)
        ids = [request["id"] for request, _ in requests]
        self._tell({"is": "forked", "pids": dict(zip(ids, forked, strict=False))})
        return False

    def _fork_apart(self, count: int) -> int | list[int]:
        """Fork so many processes, by one in between that ends, so that they fall to the warden. In each,
        its number; here their pids, 0 for what could not be forked."""
        pids, tell = os.pipe()
        between = os.fork()
        if between == 0:
            for number in range(count):
                try:
                    pid = os.fork()
                except OSError:
                    pid = 0
                else:
                    if pid == 0:
                        _close((pids, tell))  # its end is waited for
                        return number
                os.write(tell, _PID.pack(pid))
            os._exit(0)
        os.close(tell)
        with open(pids, "rb") as file:
            data = file.read()
        os.waitpid(between, 0)  # from now on, the warden is their parent
        return [pid for (pid,) in _PID.iter_unpack(data)]

    # ------------------------------------------------------------ the embryo

    def _conceive(self) -> bool:
        """Fork a process that waits to hear which worker it is; true in it, once it is that."""
        self._embryo_at = time.monotonic() + _EMBRYO_AGAIN_S
        ours, theirs = socket.socketpair()
        try:
            forked = self._fork_apart(1)
        except OSError:
            forked = [0]
        if isinstance(forked, int):
            ours.close()
            self._libc.prctl(_PR_SET_NAME, b"elasticd-embryo", 0, 0, 0)
            self._channel.close()
            self._channel = type(self._channel)(theirs)
            try:
                ((request, fds),) = self._receive()
                self._tell({"is": "there"})
            except Exception:  # noqa: BLE001  # the zygote is gone, or has no use for it
                os._exit(0)
            self._become_worker(request, fds)
            return True
        theirs.close()
        if forked == [0]:
            ours.close()
        else:
            self._embryo = forked[0], type(self._channel)(ours)
        return False

    def _use_embryo(self, request: Any, fds: list[int]) -> int:
        """Have it be this worker; its pid, 0 if it has died."""
        assert self._embryo is not None
        pid, line = self._embryo
        try:
            line.send(request, [os.dup(fd) for fd in fds])
            while line.pending:
                select.select([], [line], [])
                line.flush()
            answer = None
            while not answer:
                select.select([line], [], [])
                answer = line.receive()
        except Exception:  # noqa: BLE001  # of the channel: the other end is gone
            pid = 0
        self._drop_embryo()
        return pid

    def _drop_embryo(self) -> None:
        """It ends, unless it has become a worker."""
        if self._embryo is not None:
            self._embryo[1].close()
            self._embryo = None
            self._embryo_at = time.monotonic() + _EMBRYO_AGAIN_S

    def _become_worker(self, request: Any, fds: list[int]) -> None:
        link = fds.pop()
        failing = "a worker"
        try:
            for target, fd in enumerate(fds):
                os.dup2(fd, target)
            failing = f"in {request['cwd']}"
            os.chdir(request["cwd"])
            failing = "a worker"
            give_environment(request["env"], self._changed_env, self._first_env)
            give_arguments(request["argv"])
            give_streams()
            give_chance()
            give_identity()
            failing = ""
        except BaseException as error:  # noqa: BLE001
            failing = f"cannot run {failing}: {getattr(error, 'strerror', None) or repr(error)}"
        finally:
            os.set_blocking(link, True)
            if os.read(link, 1) != b"g":  # nobody wants it any more
                os._exit(0)
        if failing:
            os.write(link, failing.encode(errors="backslashreplace"))
            os._exit(127)
        os.setsid()
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._warden:  # it died before the line above
            os._exit(128 + signal.SIGKILL)
        self._libc.prctl(_PR_SET_NAME, self._name, 0, 0, 0)
        for fd, said in enumerate(self._said, 1):  # what the modules print when they are imported
            _write(fd, said)
        self._channel.forget()
        os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)


def _channel_class(here: str) -> Any:
    path = os.path.join(here, os.pardir, os.pardir, "procs", "channel.py")
    spec = importlib.util.spec_from_file_location("elasticd_channel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Channel


def _comm() -> bytes:
    """What this process is called, before it is called otherwise."""
    with open("/proc/self/comm", "rb") as file:
        return file.read().rstrip(b"\n")


def _freeze() -> None:
    """Keep the collector from touching what is shared with the workers. But not ``__main__``: what
    is frozen is never collected, and the script's objects are, at the end."""
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
