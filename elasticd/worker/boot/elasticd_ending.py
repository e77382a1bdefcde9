"""Tell the agent that the script has ended well, before Python's finalisation: a later crash is not the
script's. Keep torch's threads from blocking the end.

Before Python 3.14 a torch thread that takes the interpreter's lock during finalisation aborts the process
("terminate called without an active exception", torch issue 190489). gloo's threads take the lock when they
release the tensors of a collective, which may be after the script's end on a busy machine. So this module
waits until no torch thread is busy, for some seconds at most. It then tells the agent that the script ran to
its end, so that the agent does not count a later abort as a failure.

A thread of gloo may also hang the process after ``destroy_process_group``. The last reference to a group may
be that of a DistributedDataParallel, whose destructor (torch 2.13) holds the interpreter's lock while it
waits for the thread. The thread waits for that lock to release the last collective. So
``destroy_process_group`` returns here once no torch thread is busy.

Finalisation may also hang: a thread ends while it holds a lock that a destructor takes. So the kernel kills a
process that does not exit two minutes after its script has ended.

Standard library only, and self-contained.
"""

from __future__ import annotations

import atexit
import os
import sys
import time

from elasticd_afterimport import after_import

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SETTLE_S = 5.0
_EXIT_S = 120.0  # a context on a GPU takes seconds to destroy
_LOOK_S = 0.001

_callback: list[tuple[int, Callable[[], None]]] = []
_is_script = False


def register_exit_function() -> None:
    """Register a function that runs at exit. Call this before anything else uses atexit: atexit calls
    functions in reverse order, so the first one registered runs last.

    When the function runs, Python has joined its threads, and the script's own exit functions are done.
    """
    global _is_script  # noqa: PLW0603
    if not _callback:
        _callback.append((0, _nobody))
        _is_script = bool(sys.argv) and os.path.isfile(sys.argv[0])
        atexit.register(_last)


def on_success(ended_well: Callable[[], None]) -> None:
    """Call ``ended_well`` at exit if the script of this process has ended well."""
    register_exit_function()
    _callback[0] = (os.getpid(), ended_well)


def settle_after_groups() -> None:
    """Have ``destroy_process_group`` return once no torch thread is busy."""
    after_import({"torch.distributed.distributed_c10d": _wrap_destruction})


def _wrap_destruction(c10d: Any) -> None:
    inner = c10d.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        inner(group)
        if group is None:
            _settle()

    for name in ("__doc__", "__module__", "__qualname__"):
        setattr(destroy_process_group, name, getattr(inner, name))
    vars(destroy_process_group)["__wrapped__"] = inner
    c10d.destroy_process_group = destroy_process_group
    package: Any = sys.modules.get("torch.distributed")  # has copied the name, unless it is being imported
    if getattr(package, "destroy_process_group", None) is inner:
        package.destroy_process_group = destroy_process_group


def _nobody() -> None:
    pass


def _last() -> None:
    pid, ended_well = _callback[0]
    if pid == os.getpid():  # do nothing in a forked child
        well = _ended_well()
        if "torch" in sys.modules and sys.version_info < (3, 14):
            _settle()
        if well:
            ended_well()
        _limit()


def _ended_well() -> bool:
    """Whether the script ran to its end.

    Python has then removed ``__file__`` from ``__main__``; after SystemExit with any status it has not. An
    exception would have left ``sys.last_type``.
    """
    main = sys.modules.get("__main__")
    return (
        _is_script
        and main is not None
        and not hasattr(main, "__file__")
        and not hasattr(sys, "last_type")
        and not hasattr(sys, "last_exc")
    )


def _settle() -> None:
    """Sleep until no torch thread is busy, for some seconds at most. While this thread sleeps, others can
    take the interpreter's lock."""
    until = time.monotonic() + _SETTLE_S
    quiet = 0
    while quiet < 2 and time.monotonic() < until:  # polls: a thread gives no signal when it becomes idle
        time.sleep(_LOOK_S)
        quiet = 0 if _busy() else quiet + 1


def _limit() -> None:
    """Have the kernel end this process if finalisation hangs."""
    import _signal

    try:
        _signal.signal(_signal.SIGALRM, _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (_signal.SIGALRM,))
        asked_s, _ = _signal.getitimer(_signal.ITIMER_REAL)  # a limit of the script's own
        _signal.setitimer(_signal.ITIMER_REAL, min(asked_s or _EXIT_S, _EXIT_S))
    except Exception:  # noqa: BLE001, S110  # the main thread of a subinterpreter may not do so
        pass


def _busy() -> bool:
    """Whether a thread that torch has named (pt_gloo_runloop, pt_autograd_0) runs or is ready to run."""
    own = str(os.getpid())
    try:
        for thread in os.listdir("/proc/self/task"):
            if thread != own:
                with open(f"/proc/self/task/{thread}/stat", "rb") as file:
                    name, _, state = file.read().rpartition(b") ")
                if b"(pt_" in name and state[:1] in b"RD":
                    return True
    except OSError:  # a thread has ended meanwhile, or there is no such folder
        pass
    return False
