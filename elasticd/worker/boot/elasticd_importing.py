"""Imports for all workers what they would import themselves, and finds out what cannot be shared: what
starts threads or processes, holds files, memory or a GPU, or asks for what differs between workers.

Standard library only, and self-contained: before the script there is nothing else to import from.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from types import FrameType
    from typing import Any


# Jemalloc's, which pyarrow brings: it lets go of them before a fork, and does without them in the child.
_KNOW_OF_FORKS = frozenset({"jemalloc_bg_thd"})
_SHARE_S = 0.2  # what is imported between two looks back


def outside_in(modules: Iterable[str]) -> list[str]:
    """In the order to import them: packages before what is in them. ``sys.modules`` has them in the order
    they were done, but people import from the outside in, which matters where modules import each other."""
    return sorted(modules, key=lambda name: name.count("."))


def suited(modules: Iterable[str], left_out: Collection[str]) -> list[str]:
    """Those that are neither left out themselves nor within what is."""
    return [name for name in modules if not any(package in left_out for package in _packages(name))]


def import_share(
    modules: Sequence[str],
    left_out: Collection[str],
    personal: dict[str, list[str]],
    begins: Callable[[str], None],
) -> tuple[int, dict[str, str]]:
    """Import the first of these modules, for a fifth of a second. How many were imported; and what must be
    left out, and why: then this process is spoilt, as what was imported cannot be taken back.

    ``personal``: ``names`` and ``prefixes`` of the environment variables that differ between workers.
    ``begins`` is told of each module before it is imported, as the process may not outlive the import.
    """
    readers: dict[str, str] = {}
    guard = _Guard(left_out)
    environ_class = type(os.environ)
    os.environ.__class__ = _noticing(personal, readers)
    sys.meta_path.insert(0, guard)
    files = _files()
    until = time.monotonic() + _SHARE_S
    done = 0
    try:
        for name in modules:
            if name not in sys.modules:
                if time.monotonic() > until:
                    break
                begins(name)
                readers.clear()
                unfit = _import(name, guard) or _read_by(readers, name) or _held(name, files)
                if unfit:
                    return done, unfit
            done += 1
    finally:
        sys.meta_path.remove(guard)
        os.environ.__class__ = environ_class
    return done, {}


def _import(name: str, guard: _Guard) -> dict[str, str]:
    guard.met = ""
    try:
        importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001  # SystemExit, too
        return {
            _failed(name): f"it imports {guard.met}" if guard.met else f"it cannot be imported: {error!r}"
        }
    return {name: f"it imports {guard.met}"} if guard.met else {}


def _read_by(readers: dict[str, str], name: str) -> dict[str, str]:
    """Who asked for what differs between workers, and so did whoever imported them."""
    reads = {reader: f"it reads {variable} when imported" for reader, variable in readers.items()}
    return {name: next(iter(reads.values())), **reads} if reads else {}


def _held(name: str, files: set[str]) -> dict[str, str]:
    """What this module, imported last, holds that a fork would share with others, or lack."""
    if threads() > 1:
        _fork_for_nothing()  # thread pools that know of forks, such as OpenBLAS's, end with one
        if threads() > 1:
            return {name: "it starts threads"}
    if _files() != files:
        return {name: "it keeps files open"}
    if " rw-s " in _read("/proc/self/maps"):
        return {name: "it has memory that it would share with other workers"}
    if children():
        return {name: "it starts processes"}
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and getattr(cuda, "is_initialized", bool)():
        return {name: "it initialises CUDA"}
    return {}


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


def _noticing(personal: dict[str, list[str]], readers: dict[str, str]) -> type[Any]:
    """What ``os.environ`` is while modules are imported: it notes the modules that ask for these."""
    names, prefixes = frozenset(personal["names"]), tuple(personal["prefixes"])

    class Environ(os._Environ):  # type: ignore[type-arg]
        def __getitem__(self, name: Any) -> Any:
            if isinstance(name, str) and (name in names or name.startswith(prefixes)):
                frame: FrameType | None = sys._getframe(1)
                while frame is not None and frame.f_globals.get("__name__") in ("os", "collections.abc"):
                    frame = frame.f_back
                if frame is not None:
                    readers[str(frame.f_globals.get("__name__"))] = name
            return super().__getitem__(name)

    return Environ


def _failed(name: str) -> str:
    """The outermost package that could not be imported on the way to this module."""
    return next((package for package in _packages(name) if package not in sys.modules), name)


def _packages(name: str) -> list[str]:
    """The module, and the packages it is in."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _fork_for_nothing() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


# ---------------------------------------------------------------- what this process has


def children() -> list[int]:
    """Pids; none where the kernel does not tell (one without CONFIG_PROC_CHILDREN)."""
    try:
        return [int(pid) for pid in _read(f"/proc/self/task/{os.getpid()}/children").split()]
    except OSError:
        return []


def threads() -> int:
    """How many, but for those that know of forks and are started again where they are needed."""
    count = 0
    for thread in os.listdir("/proc/self/task"):
        try:
            count += _read(f"/proc/self/task/{thread}/comm").rstrip("\n") not in _KNOW_OF_FORKS
        except OSError:  # it has ended meanwhile
            pass
    return count


def _files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()
