"""Have a worker that connects to torch's store ask a name server again soon, where an answer is lost.

When a client of a TCPStore connects, torch asks for the name of the address, for messages only. All workers
ask at once when a world forms, and some answers are lost. glibc waits for 5 s before it asks again. While a
client connects to an address, glibc waits here for 1 s.

Standard library only, and self-contained. Other modules are imported only when torch has been.
"""

from __future__ import annotations

from elasticd_afterimport import after_import

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable
    from typing import Any

_INITIALISED = 1  # RES_INIT
_SOON_S = 1  # the least that glibc can wait


def ask_again_soon() -> None:
    """Have the threads of this process wait for 1 s at most for each answer of a name server, while they
    connect to a store whose host is an address."""
    after_import({"torch.distributed": _wrap_stores})


def _wrap_stores(distributed: Any) -> None:
    import functools

    stores = distributed.TCPStore
    construct = stores.__init__

    @functools.wraps(construct)
    def connect(store: Any, *args: Any, **kwargs: Any) -> None:
        host = args[0] if args else kwargs.get("host_name")
        call_impatiently(host, functools.partial(construct, store, *args, **kwargs))

    connect.__qualname__ = "TCPStore.__init__"  # pybind's is a name of its own
    stores.__init__ = connect


def call_impatiently(host: object, call: Callable[[], object]) -> None:
    """Call the function. If the host is an address, this thread waits meanwhile for 1 s at most for each
    answer of a name server. The address of a name is waited for as ever."""
    wait = wait_of_this_thread() if _is_address(host) else None
    if wait is None:
        call()
        return
    before = wait.value
    try:
        wait.value = min(before, _SOON_S)
        call()
    finally:
        wait.value = before


def wait_of_this_thread() -> ctypes.c_int | None:
    """Return the place of the seconds for which this thread waits for an answer, or None if this is not
    glibc.

    It is in glibc's ``struct __res_state``, of which each thread has one. The structure begins with ``int
    retrans, retry; unsigned long options;``: see <resolv.h>.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    try:
        state, initialise = libc.__res_state, libc.__res_init
    except AttributeError:
        return None
    state.restype = ctypes.c_void_p
    at: int = state()
    options = ctypes.c_ulong.from_address(at + 2 * ctypes.sizeof(ctypes.c_int))
    if not options.value & _INITIALISED and initialise():
        return None
    return ctypes.c_int.from_address(at)


def _is_address(host: object) -> bool:
    import socket

    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, str(host))
        except (OSError, ValueError):
            continue
        return True
    return False
