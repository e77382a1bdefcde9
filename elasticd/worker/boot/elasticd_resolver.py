"""Have the clients of torch's stores connect without waiting for a name server.

When a client of a TCPStore connects, torch asks for the name of the address, for messages only. All workers
ask at once when a world forms. Where an answer is lost then, glibc waits for 5 s and asks again. So while a
client connects to an address, its thread asks a name server within this process, which knows no name. Torch
then writes the address in its messages.

Standard library only, and self-contained. Other modules are imported only when torch has been.
"""

from __future__ import annotations

import _thread

from elasticd_afterimport import after_import

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

_STATE = "@iiLi16s"  # timeout_s, tries, options, number of name servers, address of the first one
_INITIALISED = 1  # RES_INIT, an option
_HEADER_BYTES = 12  # of a message of DNS
_NO_SUCH_NAME = b"\x81\x83"  # the flags of the answer
_QUESTION_BYTES_MAX = 512


def connect_unasked() -> None:
    """Have the threads of this process ask no name server while they connect to a store whose host is an
    address."""
    after_import({"torch.distributed": _wrap_stores})


def _wrap_stores(distributed: Any) -> None:
    import functools

    stores = distributed.TCPStore
    construct = stores.__init__

    @functools.wraps(construct)
    def unasked(store: Any, *args: Any, **kwargs: Any) -> None:
        host = args[0] if args else kwargs.get("host_name")
        call_unasked(host, functools.partial(construct, store, *args, **kwargs))

    unasked.__qualname__ = "TCPStore.__init__"  # pybind's has its record's
    stores.__init__ = unasked


def call_unasked(host: object, call: Callable[[], None]) -> None:
    """Call the function. Meanwhile this thread finds the names of /etc/hosts only, unless the host is a name,
    or the thread's first name server has an IPv6 address."""
    resolver = resolver_of_this_thread() if _is_address(host) else None
    server = _start_server() if resolver is not None and _has_ipv4_server(resolver) else None
    if resolver is None or server is None:
        call()
        return
    before = bytes(resolver)
    try:
        use_server(resolver, server)
        call()
    finally:
        resolver[:] = before
        try:
            server.sendto(b"", server.getsockname())
        except OSError:
            pass  # another process has ended it


def resolver_of_this_thread() -> memoryview | None:
    """Return the memory of the beginning of glibc's ``struct __res_state``, of which each thread has one, or
    None if this is not glibc. See <resolv.h>."""
    import ctypes
    import struct

    libc = ctypes.CDLL(None)
    try:
        state, initialise = libc.__res_state, libc.__res_init
    except AttributeError:
        return None
    state.restype = ctypes.c_void_p
    resolver = memoryview((ctypes.c_ubyte * struct.calcsize(_STATE)).from_address(state())).cast("B")
    _, _, options, _, _ = struct.unpack(_STATE, resolver)
    if not options & _INITIALISED and initialise():
        return None
    return resolver


def _has_ipv4_server(resolver: memoryview) -> bool:
    """Whether the state has the address of the first name server. An IPv6 address is elsewhere, and glibc
    would write over it."""
    import socket
    import struct

    _, _, _, servers, address = struct.unpack(_STATE, resolver)
    (family,) = struct.unpack_from("=H", address)
    return bool(servers > 0 and family == socket.AF_INET)


def use_server(resolver: memoryview, server: socket.socket) -> None:
    """Have the thread of the resolver ask this name server alone, and once, for 1 s."""
    import socket
    import struct

    _, _, options, _, _ = struct.unpack(_STATE, resolver)
    host, port = server.getsockname()
    address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
    resolver[:] = struct.pack(_STATE, 1, 1, options, 1, address)


def _start_server() -> socket.socket | None:
    """Return the socket of a name server that knows no name. An empty message ends it."""
    import socket

    try:
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    except OSError:
        return None
    try:
        server.bind(("127.0.0.1", 0))
        _thread.start_new_thread(_serve, (server,))
    except (OSError, RuntimeError):
        server.close()
        return None
    return server


def _serve(server: socket.socket) -> None:
    with server:
        while True:
            question, client = server.recvfrom(_QUESTION_BYTES_MAX)
            if not question:
                return
            try:
                server.sendto(_answer(question), client)
            except (OSError, ValueError):
                pass  # the client is gone, or this is no question


def _answer(question: bytes) -> bytes:
    """Answer that there is no such name. Raises ValueError if this is no question."""
    end = question.index(b"\0", _HEADER_BYTES) + 5  # of the name, its type and its class
    counts = b"\0\1" + bytes(6)  # one question, and nothing else
    return question[:2] + _NO_SUCH_NAME + counts + question[_HEADER_BYTES:end]


def _is_address(host: object) -> bool:
    import socket

    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, str(host))
        except (OSError, ValueError):
            continue
        return True
    return False
