"""Bounds how long a thread waits for a name server.

When a client of torch's TCPStore connects, torch asks for the name of the address, for messages only. If the
answer is lost, glibc waits for 5 s and asks again. The answers are lost where many workers ask at once.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import ClassVar

_INITIALISED = 1  # RES_INIT


class _Resolver(ctypes.Structure):
    """The beginning of glibc's ``struct __res_state``, of which each thread has one: see <resolv.h>."""

    _fields_: ClassVar = [("retrans", ctypes.c_int), ("retry", ctypes.c_int), ("options", ctypes.c_ulong)]


def _of_this_thread() -> _Resolver | None:
    """Return the state of this thread's resolver, or None if this is not glibc."""
    libc = ctypes.CDLL(None)
    try:
        state, initialise = libc.__res_state, libc.__res_init
    except AttributeError:
        return None
    state.restype = ctypes.POINTER(_Resolver)
    resolver: _Resolver = state().contents
    if not resolver.options & _INITIALISED and initialise():
        return None
    return resolver


@contextlib.contextmanager
def asked_briefly() -> Iterator[None]:
    """Have this thread ask each name server once in the block, and wait for the answer for 1 s."""
    resolver = _of_this_thread()
    if resolver is None:
        yield
        return
    before = resolver.retrans, resolver.retry
    resolver.retrans = resolver.retry = 1
    try:
        yield
    finally:
        resolver.retrans, resolver.retry = before
