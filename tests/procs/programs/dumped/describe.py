"""Prints, as JSON, everything that a script can see of its process, without what differs between any two
processes."""

import atexit
import ctypes
import faulthandler
import gc
import inspect
import json
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings

try:
    from .steps import step_once
except ImportError:
    from steps import step_once

MAIN_AT_FIRST = sorted(globals())


class Local:
    """A class that is pickled by the name of its module."""


def _fd(number):
    return [
        os.readlink(f"/proc/self/fd/{number}").split(":")[0].rstrip("0123456789/"),
        os.get_inheritable(number),
    ]


def _stack():
    return [frame.name for frame in traceback.extract_stack()]


def _signals():
    return {s.name: str(signal.getsignal(s)) for s in signal.valid_signals() if isinstance(s, signal.Signals)}


def _status(*names):
    with open("/proc/self/status") as file:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in file)
    return {name: lines.get(name) for name in names}


def _stream(stream):
    return {
        "type": str(type(stream)),
        "raw": repr(stream.buffer).replace(hex(id(stream.buffer)), ""),
        "about": [stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.name],
        "mode": stream.mode,
        "able": [stream.readable(), stream.writable(), stream.seekable(), stream.isatty(), stream.fileno()],
    }


def _signal_when_the_parent_dies():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
    return number.value


def describe():
    main = sys.modules["__main__"]
    with open("/proc/self/environ", "rb") as file:
        environ = [entry.decode(errors="surrogateescape") for entry in file.read().split(b"\0") if entry]
    with open("/proc/self/cmdline", "rb") as file:
        cmdline = file.read().decode().split("\0")
    return {
        "main": {k: repr(getattr(main, k, "none")) for k in MAIN_AT_FIRST if k.startswith("__")},
        "loader": str(type(__loader__)),
        "spec": repr(__spec__),
        "is main": main.__dict__ is globals(),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "cmdline": cmdline,
        "comm": open("/proc/self/comm").read(),
        "path": sys.path,
        "meta_path": [str(finder) for finder in sys.meta_path],
        "hooks": [str(hook).partition(" at ")[0] for hook in sys.path_hooks],
        "flags": str(sys.flags),
        "prefix": [sys.prefix, sys.exec_prefix, sys.executable],
        "traces": [sys.gettrace(), sys.getprofile(), threading.gettrace(), sys.getswitchinterval()],
        "excepthook": sys.excepthook is sys.__excepthook__,
        "environ": dict(os.environ),
        "libc": os.environb[b"WORD"].decode(),
        "proc environ": set(environ) == {f"{k}={v}" for k, v in os.environ.items()},
        "boot": [m for m in sys.modules if "elasticd" in m or m in ("sitecustomize", "usercustomize")],
        "cwd": os.getcwd(),
        "umask": os.umask(0o22),
        "fds": {n: _fd(n) for n in range(3, 64) if os.path.exists(f"/proc/self/fd/{n}")},
        "streams": [_stream(s) for s in (sys.stdin, sys.stdout, sys.stderr)],
        "same streams": [
            sys.stdin is sys.__stdin__,
            sys.stdout is sys.__stdout__,
            sys.stderr is sys.__stderr__,
        ],
        "stack": _stack(),
        "signals": _signals(),
        "masks": _status("SigBlk", "SigIgn", "SigCgt", "Threads", "NoNewPrivs"),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "threads": [t.name for t in threading.enumerate()],
        "main thread": threading.main_thread() is threading.current_thread(),
        "native id": threading.main_thread().native_id == threading.get_native_id() == os.getpid(),
        "exithandlers": atexit._ncallbacks(),
        "warnings": [str(f) for f in warnings.filters],
        "logging": [str(h) for h in logging.root.handlers] + [logging.root.level],
        "faulthandler": faulthandler.is_enabled(),
        "gc": [gc.isenabled(), gc.get_threshold()],
        "dies with parent": _signal_when_the_parent_dies(),
        "recursion": sys.getrecursionlimit(),
        "source": inspect.getsource(Local),
        "pickled": pickle.loads(pickle.dumps(Local())).__class__ is Local,
        "stdin": sys.stdin.read(),
    }


if __name__ == "__main__":
    step_once()
    print(json.dumps([gc.get_freeze_count() > 1000, describe()]))
