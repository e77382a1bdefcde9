"""Make a forked worker like a fresh process: set its own environment, arguments, streams, random seeds and
identity.

Standard library only, and self-contained: the worker's Python need not have other packages.
"""

from __future__ import annotations

import io
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PADDING = "ELASTICD_ZYGOTE"  # a variable that reserves room for the rest of a worker's environment


def give_environment(given: dict[str, str], changed: dict[str, str | None], old: dict[str, str]) -> None:
    """Set the environment to ``given``, with the changes that modules made when they were imported."""
    env = {name: value for name, value in given.items() if changed.get(name, "") is not None}
    env |= {
        name: value
        for name, value in changed.items()
        # A module that only sets missing variables would not change a variable that this worker was given.
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
    """Write these variables into the memory that PADDING reserves, so that /proc/pid/environ shows them."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        content = memory.read(end - start)
        at = content.find(PADDING.encode() + b"=")
        if at < 0:
            return
        room = len(content) - at
        data = b""
        for name, value in sorted(env.items(), key=lambda item: item[0] != "ELASTICD_PAGE"):
            entry = _bytes(name) + b"=" + _bytes(value) + b"\0"
            if len(data) + len(entry) <= room:
                data += entry
        memory.seek(start + at)
        memory.write(data.ljust(room, b"\0"))


def give_arguments(argv: list[str]) -> None:
    """Set the arguments. Only the script's own arguments may differ between workers."""
    argv = [os.fsdecode(_bytes(argument)) for argument in argv]
    own = len(sys.argv) - 1
    sys.orig_argv[:] = [sys.orig_argv[0], *argv[1:]]
    sys.argv[1:] = argv[len(argv) - own :] if own else []


def give_streams() -> None:
    """Reopen the standard streams on the worker's files, which may be pipes or terminals in place of files.
    The stream objects stay the same, since modules may refer to them."""
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


def seed_random_numbers() -> None:
    """Seed random numbers that no other worker draws. Python's ``random`` seeds itself after a fork."""
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def give_identity() -> None:
    """Update the ids and the start time of the process that the standard library keeps in its modules."""
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


def _bytes(text: str) -> bytes:
    """Return the text as the agent encoded it for the warden."""
    return text.encode("utf-8", "surrogateescape")
