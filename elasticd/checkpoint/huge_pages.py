"""Files in memory made of huge pages, where the kernel supports them.

Shared memory has pages of 4 KiB by default, and reading it then costs twice as much as copying the bytes. A
private tmpfs can have huge pages whatever the machine's default is. The tmpfs is mounted nowhere: it exists
only while its file descriptor is open.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from functools import cache
from typing import Final

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # system call numbers; equal on all architectures
_CLOEXEC, _SET_STRING, _CREATE = 1, 1, 6
_NEWUSER_AND_NEWNS: Final = 0x10000000 | 0x00020000
_HELPER_S: Final = 10.0
_HELPER: Final = (
    "import sys; sys.path.append({root!r}); "
    "from elasticd.checkpoint.huge_pages import send_mount; send_mount()"
)
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def make_file() -> int | None:
    """Return an open, empty file without a name, or None where huge pages are not available."""
    mount = _mount_of(os.getpid())
    if mount is None:
        return None
    try:
        return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=mount)
    except OSError:
        return None


@cache
def _mount_of(_: int) -> int | None:
    """Return a descriptor of this process's tmpfs, made on the first call; None if there is none. The
    parameter is the pid, because a forked process needs a tmpfs of its own."""
    try:
        return _mount()
    except PermissionError:
        return _ask_for_one()
    except (OSError, AttributeError):
        return None


def _mount() -> int:
    """Create a tmpfs with huge pages, and return its descriptor. Raises OSError."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    fs = _checked(call(_FSOPEN, b"tmpfs", _CLOEXEC))
    try:
        for name, value in ((b"huge", b"always"), (b"size", b"100%"), (b"mode", b"0700")):
            _checked(call(_FSCONFIG, fs, _SET_STRING, name, value, 0))
        _checked(call(_FSCONFIG, fs, _CREATE, None, None, 0))
        return _checked(call(_FSMOUNT, fs, _CLOEXEC, 0))
    finally:
        os.close(fs)


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _ask_for_one() -> int | None:
    """Get the tmpfs from a helper process with its own user namespace, in which any user may mount a
    tmpfs."""
    ours, its = socket.socketpair()
    with ours, its:
        try:
            subprocess.run(
                [sys.executable, "-S", "-E", "-c", _HELPER.format(root=_ROOT)],
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_HELPER_S,
                check=True,
            )
            _, [mount], _, _ = socket.recv_fds(ours, 1, 1)
        except (OSError, subprocess.SubprocessError, ValueError):
            return None
        return mount


def send_mount() -> None:
    """Run the helper process. Standard input is the socket that the tmpfs is sent through."""
    uid, gid = os.geteuid(), os.getegid()
    _checked(ctypes.CDLL(None, use_errno=True).unshare(_NEWUSER_AND_NEWNS))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    with socket.socket(fileno=0) as its:
        socket.send_fds(its, [b"."], [_mount()])
