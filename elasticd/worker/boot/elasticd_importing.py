"""Import modules once for all workers, and find the modules that workers cannot share.

A module cannot be shared if its import starts threads or processes, holds files, memory or a GPU, or reads a
value that differs between workers.

Standard library only, and self-contained: the worker's Python need not have other packages.
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


# Names of threads that end before a fork and start again when needed. pyarrow brings jemalloc.
_RESTART_AFTER_FORK = frozenset({"jemalloc_bg_thd"})
_SHARE_S = 0.2  # for the imports of one process, which a bad module makes unusable


def without_left_out(modules: Iterable[str], left_out: Collection[str], *, in_order: bool) -> list[str]:
    """Return the modules that neither are left out nor belong to a package that is left out. ``in_order``:
    only those before the first that is left out."""
    chosen = []
    for name in modules:
        if name not in left_out and not any(package in left_out for package in _packages(name)):
            chosen.append(name)
        elif in_order:
            break
    return chosen


def import_share(
    modules: Sequence[str],
    left_out: Collection[str],
    personal: Any,
    begins: Callable[[str], None],
) -> tuple[int, dict[str, str]]:
    """Import modules for a fifth of a second. Return their number, and the modules to leave out with the
    reasons.

    If a module is to be left out, this process is unusable, since an import cannot be undone. ``personal``:
    ``names`` and ``prefixes`` of environment variables that differ between workers. ``begins`` is called with
    the name of each module before its import, since the import may end the process.
    """
    readers: dict[str, str] = {}
    guard = _Guard(left_out)
    original_class = type(os.environ)
    os.environ.__class__ = _environ_class(personal, readers)
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
                unfit = _import(name, guard) or _read_by(readers, name) or _unshareable(name, files)
                if unfit:
                    return done, unfit
            done += 1
    finally:
        sys.meta_path.remove(guard)
        os.environ.__class__ = original_class
    return done, {}


def _import(name: str, guard: _Guard) -> dict[str, str]:
    guard.met = ""
    module, _, member = name.partition(":")
    try:
        found = importlib.import_module(module)
        if member and not hasattr(found, member):  # which may import it: packages load members on demand
            importlib.import_module(f"{module}.{member}")
    except BaseException as error:  # noqa: BLE001  # SystemExit as well
        return {
            _failed(name): f"it imports {guard.met}" if guard.met else f"it cannot be imported: {error!r}"
        }
    return {name: f"it imports {guard.met}"} if guard.met else {}


def _read_by(readers: dict[str, str], name: str) -> dict[str, str]:
    """Return the modules that read a variable that differs between workers, and the module whose import led
    to them."""
    reads = {reader: f"it reads {variable} when imported" for reader, variable in readers.items()}
    return {name: next(iter(reads.values())), **reads} if reads else {}


def _unshareable(name: str, files: set[str]) -> dict[str, str]:
    """Return the module just imported, with the reason, if forked workers would share, or lack, something
    that the module has made. Return an empty dict otherwise."""
    if threads() > 1:
        _fork_and_exit()  # OpenBLAS and others end their thread pools at a fork
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
    """A module imports a module that is left out. Not an Exception, so that no module catches it."""


class _Guard:
    """A finder before all others that refuses the modules that are left out."""

    def __init__(self, left_out: Iterable[str]) -> None:
        self._left_out = frozenset(left_out)
        self.met = ""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self._left_out:
            self.met = name
            raise _LeftOut(name)


def _environ_class(personal: Any, readers: dict[str, str]) -> type[Any]:
    """Return a class for ``os.environ`` during imports. It notes in ``readers`` each module that reads a
    personal variable, with the variable's name."""
    names, prefixes = frozenset(personal.names), tuple(personal.prefixes)

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
    """Return the outermost package on the way to this module that could not be imported."""
    return next((package for package in _packages(name) if package not in sys.modules), name)


def _packages(name: str) -> list[str]:
    """Return the module's name, and those of the packages that contain it."""
    parts = name.partition(":")[0].split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _fork_and_exit() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


# ---------------------------------------------------------------- what this process has


def children() -> list[int]:
    """Return the pids of the children; none with a kernel without CONFIG_PROC_CHILDREN."""
    try:
        return [int(pid) for pid in _read(f"/proc/self/task/{os.getpid()}/children").split()]
    except OSError:
        return []


def threads() -> int:
    """Return the number of threads, without threads that start again after a fork."""
    count = 0
    for thread in os.listdir("/proc/self/task"):
        try:
            count += _read(f"/proc/self/task/{thread}/comm").rstrip("\n") not in _RESTART_AFTER_FORK
        except OSError:  # the thread has ended meanwhile
            pass
    return count


def _files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()
