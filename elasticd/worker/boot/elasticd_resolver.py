"""Have the clients of torch's stores connect without asking a name server.

When a client of a TCPStore connects, torch asks for the name of the address, for messages only. All workers
ask at once when a world forms. Where an answer is lost then, glibc waits for 5 s and asks again.

Standard library only, and self-contained. Modules are imported once torch is.
"""

from __future__ import annotations

import _thread

from elasticd_afterimport import after_import

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable
    from typing import Any

_INITIALISED = 1  # RES_INIT
_ERRORS = 2  # torch writes errors, and no warnings


def connect_unasked() -> None:
    """Have this process ask no name server while it connects to a store whose host is an address."""
    after_import({"torch.distributed": _wrap_stores})


def _wrap_stores(distributed: Any) -> None:
    import functools

    stores = distributed.TCPStore
    construct = stores.__init__

    @functools.wraps(construct)
    def unasked(store: Any, *args: Any, **kwargs: Any) -> None:
        host = args[0] if args else kwargs.get("host_name")
        _call_unasked(host, functools.partial(construct, store, *args, **kwargs))

    stores.__init__ = unasked


def _call_unasked(host: object, call: Callable[[], None]) -> None:
    """Call the function; this thread asks no name server meanwhile, unless the host is a name.

    torch does not warn then that it cannot find a name. For a moment it warns of nothing in this process.
    """
    count = _count_of_servers() if _is_address(host) else None
    if count is None:
        call()
        return
    servers, count.value = count.value, 0
    _quiet.begin()
    try:
        call()
    finally:
        _quiet.end()
        count.value = servers


def _count_of_servers() -> ctypes.c_int | None:
    """Return the number of name servers that the resolver of this thread asks, or None if this is not glibc.

    It is in glibc's ``struct __res_state``, of which each thread has one. The structure begins with ``int
    retrans, retry; unsigned long options; int nscount;``: see <resolv.h>.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    try:
        state, initialise = libc.__res_state, libc.__res_init
    except AttributeError:
        return None
    state.restype = ctypes.c_void_p
    options_at = state() + 2 * ctypes.sizeof(ctypes.c_int)
    if not ctypes.c_ulong.from_address(options_at).value & _INITIALISED and initialise():
        return None
    return ctypes.c_int.from_address(options_at + ctypes.sizeof(ctypes.c_ulong))


def _is_address(host: object) -> bool:
    import socket

    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, str(host))
        except (OSError, ValueError):
            continue
        return True
    return False


class _Quiet:
    """Keeps torch from warning while any thread connects. All threads share the level of its messages."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._by = 0
        self._before = 0
        self._level: ctypes.c_int | None = None

    def begin(self) -> None:
        with self._lock:
            self._by += 1
            if self._by > 1:
                return
            import ctypes

            try:
                self._level = ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
            except (OSError, ValueError):  # another torch
                return
            self._before = self._level.value
            self._level.value = max(self._before, _ERRORS)

    def end(self) -> None:
        with self._lock:
            self._by -= 1
            if not self._by and self._level is not None:
                self._level.value, self._level = self._before, None


_quiet = _Quiet()
