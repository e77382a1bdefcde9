"""Connects to torch's stores without asking a name server.

When a client of a TCPStore connects, torch asks for the name of the address, for messages only. Many workers
ask at once when a world forms. Where answers are lost then, glibc waits for 5 s and asks again.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import threading
from collections.abc import Iterator
from typing import ClassVar

_INITIALISED = 1  # RES_INIT
_ERRORS = 2  # torch writes errors, and no warnings


class _Resolver(ctypes.Structure):
    """The beginning of glibc's ``struct __res_state``, of which each thread has one: see <resolv.h>."""

    _fields_: ClassVar = [
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
    ]


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
def unasked(host: str) -> Iterator[None]:
    """Have this thread ask no name server in the block, unless the host is a name.

    torch does not warn then that it cannot find a name. For a moment it warns of nothing in this process.
    """
    resolver = _of_this_thread() if _is_address(host) else None
    if resolver is None:
        yield
        return
    servers, resolver.nscount = resolver.nscount, 0
    try:
        with _torchs_warnings_muted():
            yield
    finally:
        resolver.nscount = servers


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _Muted:
    """How many threads connect now, and the level of torch's messages before, which all threads share."""

    lock = threading.Lock()
    by = 0
    before = 0


@contextlib.contextmanager
def _torchs_warnings_muted() -> Iterator[None]:
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # another torch
        yield
        return
    with _Muted.lock:
        if not _Muted.by:
            _Muted.before = level.value
            level.value = max(level.value, _ERRORS)
        _Muted.by += 1
    try:
        yield
    finally:
        with _Muted.lock:
            _Muted.by -= 1
            if not _Muted.by:
                level.value = _Muted.before
