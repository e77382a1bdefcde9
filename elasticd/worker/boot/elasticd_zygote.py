"""The zygote: a worker's Python that stopped before its script, imported modules, and forks workers.

It is started with the very command line, environment and folder of a worker, and serves from within
sitecustomize. In a forked worker ``serve`` returns, and the interpreter goes on to the script by
itself: ``__main__``, ``sys.argv``, ``sys.path[0]``, ``-m``, tracebacks, exit codes and finalisation
are python's own. What is left to do here is what the fork copied and a fresh process would not have.

Standard library only, and self-contained but for elasticd/procs/channel.py, which is loaded by path.
The other end of the socket is elasticd/procs/zygote.py, in the warden.

As forking this much memory takes a while, one process is forked ahead: the embryo, which costs no
memory of its own but what it writes to, next to nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.util
import io
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType
    from typing import Any, NoReturn
else:
    Any = object

_CONTROL, _STATE = 3, 4  # descriptors; the second outlives an exec of this process by itself
_PADDING = "ELASTICD_ZYGOTE"
_TRIES_MAX = 8
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PID = struct.Struct("=i")
_EMBRYO_AGAIN_S = 1.0  # until the next is made, when the job recovers and needs its cores


def serve(here: str) -> None:
    """Preload and fork until the socket closes. Returns in forked workers, and nowhere else.

    ``here``: the folder of this file, which sitecustomize takes off the Python path afterwards.
    """
    me = os.getpid()
    try:
        Zygote(here).run()
    except BaseException:  # noqa: BLE001  # whatever it is, the script must not run in this process
        if os.getpid() == me:
            os._exit(1)
        os._exit(127)
    if os.getpid() == me:
        os._exit(0)


class _LeftOut(BaseException):
    """Somebody imports what must not be imported here. Not an Exception: it is not to be handled."""


class _Guard:
    """Refuses to find the modules that are left out, first of all finders."""

    def __init__(self, left_out: Iterable[str]) -> None:
        self._left_out = frozenset(left_out)
        self.met = ""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self._left_out:
            self.met = name
            raise _LeftOut(name)


class _Environ(os._Environ):  # type: ignore[type-arg]
    """``os.environ`` while modules are imported: notices who asks for what differs between workers."""

    def __getitem__(self, name: Any) -> Any:
        _asked(name)
        return super().__getitem__(name)


_personal: tuple[frozenset[str], tuple[str, ...]] = (frozenset(), ())  # names, beginnings of names
_readers: dict[str, str] = {}


def _asked(name: Any) -> None:
    if isinstance(name, str) and (name in _personal[0] or name.startswith(_personal[1])):
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__") in ("os", "collections.abc"):
            frame = frame.f_back
        if frame is not None:
            _readers[str(frame.f_globals.get("__name__"))] = name


class Zygote:
    def __init__(self, here: str) -> None:
        self._here = here
        self._libc = ctypes.CDLL(None)
        self._name = _read("/proc/self/comm").strip()
        self._warden = os.getppid()
        self._channel = _channel_class(here)(socket.socket(fileno=_CONTROL))
        self._state: dict[str, Any] = {"modules": [], "left_out": {}, "tries": 0, "asked": 0}
        self._first_env = dict(os.environ)
        del os.environ[_PADDING]  # from here on it is what its workers have in common
        self._changed_env: dict[str, str | None] = {}
        self._fds: set[str] = set()
        self._said = (b"", b"")
        self._embryo: tuple[int, Any] | None = None
        self._embryo_at = math.inf  # when to make one

    def run(self) -> None:
        """Serve. Returns when the other end is gone, or in a worker."""
        watched = sys.gettrace() or sys.getprofile() or atexit._ncallbacks() or _threads() > 1
        if watched:  # coverage and the like, from a .pth file: one for each process
            self._tell({"is": "unfit", "why": "something else starts with this Python (a .pth file)"})
            return
        _prepare_the_end()  # before modules ask for more at exit
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
        global _personal  # noqa: PLW0603  # os.environ has room for nothing of ours
        self._drop_embryo()  # it would lack what is imported now
        personal = self._state["personal"]
        _personal = frozenset(personal["names"]), tuple(personal["prefixes"])
        path = [entry for entry in sys.path if entry == self._here]
        given = os.environ.get("PYTHONPATH")
        self._withdraw()
        before = dict(os.environ)
        guard = _Guard(self._state["left_out"])
        environ_class = type(os.environ)
        os.environ.__class__ = _Environ
        sys.meta_path.insert(0, guard)
        self._fds = set(os.listdir("/proc/self/fd"))
        try:
            self._import_all(guard)
        finally:
            sys.meta_path.remove(guard)
            os.environ.__class__ = environ_class
        for name in before.keys() | os.environ.keys():
            if before.get(name) != os.environ.get(name):
                self._changed_env[name] = os.environ.get(name)
        sys.path[:0] = path
        if given is not None:
            os.environ["PYTHONPATH"] = given
        self._said = tuple(os.pread(fd, os.fstat(fd).st_size, 0) for fd in (1, 2))  # type: ignore[assignment]
        _freeze()
        self._state["tries"] = 0
        self._embryo_at = time.monotonic()
        self._tell({"is": "ready", "asked": self._state["asked"]})

    def _withdraw(self) -> None:
        sys.path[:] = [entry for entry in sys.path if entry != self._here]
        sys.path_importer_cache.pop(self._here, None)
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        rest = os.pathsep.join(entry for entry in given if entry != self._here)
        if rest:
            os.environ["PYTHONPATH"] = rest
        else:
            os.environ.pop("PYTHONPATH", None)

    def _import_all(self, guard: _Guard) -> None:
        """Packages before what is in them: ``sys.modules`` has them in the order they were done, but
        people import from the outside in, which matters where modules import each other."""
        for name in sorted(self._state["modules"], key=lambda name: name.count(".")):
            if name not in sys.modules and not any(_is_within(name, o) for o in self._state["left_out"]):
                self._import(name, guard)

    def _import(self, name: str, guard: _Guard) -> None:
        _readers.clear()
        guard.met = ""
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001  # SystemExit, too
            why = f"it imports {guard.met}" if guard.met else f"it cannot be imported: {error!r}"
            self._start_again({_failed(name): why})
        if guard.met:
            self._start_again({name: f"it imports {guard.met}"})
        if _readers:
            reads = {reader: f"it reads {variable} when imported" for reader, variable in _readers.items()}
            self._start_again({name: next(iter(reads.values())), **reads})
        if _threads() > 1:
            _fork_for_nothing()  # thread pools that know of forks, such as OpenBLAS's, end with one
            if _threads() > 1:
                self._start_again({name: "it starts threads"})
        if set(os.listdir("/proc/self/fd")) != self._fds:
            self._start_again({name: "it keeps files open"})
        if " rw-s " in _read("/proc/self/maps"):
            self._start_again({name: "it has memory that it would share with other workers"})
        if _children():
            self._start_again({name: "it starts processes"})
        cuda = sys.modules.get("torch.cuda")
        if cuda is not None and getattr(cuda, "is_initialized", bool)():
            self._start_again({name: "it initialises CUDA"})

    def _start_again(self, left_out: dict[str, str]) -> NoReturn:
        """What was imported cannot be taken back, so this process becomes a new one, without it."""
        self._state["left_out"].update(left_out)
        self._state["tries"] += 1
        self._tell({"is": "left_out", "names": left_out})
        for pid in _children():
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
            _give_environment(request["env"], self._changed_env, self._first_env)
            _give_arguments(request["argv"])
            _give_streams()
            _give_chance()
            _give_identity()
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
        self._libc.prctl(_PR_SET_NAME, self._name.encode(), 0, 0, 0)
        for fd, said in enumerate(self._said, 1):  # what the modules print when they are imported
            _write(fd, said)
        self._channel.forget()
        os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)


# ---------------------------------------------------------------- what a fresh process would have


def _give_environment(given: dict[str, str], changed: dict[str, str | None], old: dict[str, str]) -> None:
    """``given``, and on top what modules changed when they were imported."""
    env = {name: value for name, value in given.items() if changed.get(name, "") is not None}
    env |= {
        name: value
        for name, value in changed.items()
        # A module that only fills in what is missing would leave alone what this worker was given.
        if value is not None and (name not in given or given[name] == old.get(name))
    }
    os.environ.clear()
    for name, value in env.items():
        os.environb[_bytes(name)] = _bytes(value)
    try:
        _show_environment({name: value for name, value in env.items() if old.get(name) != value})
    except OSError:
        pass


def _show_environment(env: dict[str, str]) -> None:
    """Put these into the room kept for it, for those who look from outside at /proc/pid/environ."""
    fields = _read("/proc/self/stat").rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        there = memory.read(end - start)
        at = there.find(_PADDING.encode() + b"=")
        if at < 0:
            return
        room = len(there) - at
        data = b""
        for name, value in sorted(env.items(), key=lambda item: item[0] != "ELASTICD_PAGE"):
            entry = _bytes(name) + b"=" + _bytes(value) + b"\0"
            if len(data) + len(entry) <= room:
                data += entry
        memory.seek(start + at)
        memory.write(data.ljust(room, b"\0"))


def _give_arguments(argv: list[str]) -> None:
    """The script's own may differ between workers; all before them do not."""
    argv = [os.fsdecode(_bytes(argument)) for argument in argv]
    own = len(sys.argv) - 1
    sys.orig_argv[:] = [sys.orig_argv[0], *argv[1:]]
    sys.argv[1:] = argv[len(argv) - own :] if own else []


def _give_streams() -> None:
    """The same objects, which modules may hold, on files that may be of another kind."""
    streams: tuple[tuple[Any, int, str], ...] = (
        (sys.stdin, 0, "rb"),
        (sys.stdout, 1, "wb"),
        (sys.stderr, 2, "wb"),
    )
    for stream, fd, mode in streams:
        buffer, how = stream.buffer, {"encoding": stream.encoding, "errors": stream.errors}
        raw: Any = io.FileIO(fd, mode, closefd=False)
        raw.name = stream.name
        if isinstance(buffer, io.RawIOBase):
            buffer = raw
        else:
            buffer.__init__(raw)
        stream.__init__(
            buffer,
            **how,
            newline="\n",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )


def _give_chance() -> None:
    """Random numbers that no other worker draws. The module random sees to itself."""
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _give_identity() -> None:
    """What the standard library remembers of the process it was imported in."""
    threading: Any = sys.modules.get("threading")
    if threading is not None:
        threading.main_thread()._set_native_id()
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        current = process.current_process()
        current._config["authkey"] = process.AuthenticationString(os.urandom(32))
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:
        for finalizer in util._finalizer_registry.values():
            finalizer._pid = os.getpid()
    logging: Any = sys.modules.get("logging")
    if logging is not None:
        logging._startTime = time.time() if sys.version_info < (3, 13) else time.time_ns()


# ---------------------------------------------------------------- small things


def _channel_class(here: str) -> Any:
    path = os.path.join(here, os.pardir, os.pardir, "procs", "channel.py")
    spec = importlib.util.spec_from_file_location("elasticd_channel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Channel


def _prepare_the_end() -> None:
    import elasticd_ending

    elasticd_ending.be_last()


def _failed(name: str) -> str:
    """The outermost package that could not be imported on the way to this module."""
    parts = name.split(".")
    outer = (".".join(parts[:n]) for n in range(1, len(parts)))
    return next((package for package in outer if package not in sys.modules), name)


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _children() -> list[int]:
    try:
        return [int(pid) for pid in _read(f"/proc/self/task/{os.getpid()}/children").split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return []


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


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


def _fork_for_nothing() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _bytes(text: str) -> bytes:
    """As the agent spelled it for the warden."""
    return text.encode("utf-8", "surrogateescape")
