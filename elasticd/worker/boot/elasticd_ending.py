"""Tells the agent that the script has ended well, before Python is taken down: what crashes after that
is not the script.

Before Python 3.14 a thread of torch's that asks for the interpreter's lock while Python is being taken
down aborts the process ("terminate called without an active exception", torch issue 190489). gloo's
do, when they let go of what they have just reduced; on a busy machine that may be after the script's
end. So they are given a moment to come to rest, and for those who are later yet, what counts is said
beforehand: that the script ran to its end, with nothing left to it that could still fail.

Standard library only, and self-contained.
"""

from __future__ import annotations

import atexit
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_SETTLE_S = 5.0
_LOOK_S = 0.001

_told: list[tuple[int, Callable[[], None]]] = []
_is_script = False


def be_last() -> None:
    """To be called before anything else registers functions with atexit, as the first one is called
    last. Python has joined its threads by then, and all that the script wants done at its end is done."""
    global _is_script  # noqa: PLW0603
    if not _told:
        _told.append((0, _nobody))
        _is_script = bool(sys.argv) and os.path.isfile(sys.argv[0])
        atexit.register(_last)


def tell(ended_well: Callable[[], None]) -> None:
    """Call this if the script of this process has ended well, and nothing is left to do."""
    be_last()
    _told[0] = (os.getpid(), ended_well)


def _nobody() -> None:
    pass


def _last() -> None:
    pid, ended_well = _told[0]
    if pid == os.getpid():  # and no forked child
        well = _ended_well()
        if "torch" in sys.modules and sys.version_info < (3, 14):
            _settle()
        if well:
            ended_well()


def _ended_well() -> bool:
    """Whether the script ran to its end: then, and not when it left by SystemExit with whatever
    status, Python has taken its ``__file__`` away again. An exception would have been remembered."""
    main = sys.modules.get("__main__")
    return (
        _is_script
        and main is not None
        and not hasattr(main, "__file__")
        and not hasattr(sys, "last_type")
        and not hasattr(sys, "last_exc")
    )


def _settle() -> None:
    """Let go of the lock until no thread of torch's has anything to do, for some seconds at most."""
    until = time.monotonic() + _SETTLE_S
    quiet = 0
    while quiet < 2 and time.monotonic() < until:  # nobody tells of a thread that has come to rest
        time.sleep(_LOOK_S)
        quiet = 0 if _busy() else quiet + 1


def _busy() -> bool:
    """Whether a thread that torch has named (pt_gloo_runloop, pt_autograd_0) runs or is to run."""
    own = str(os.getpid())
    try:
        for thread in os.listdir("/proc/self/task"):
            if thread != own:
                with open(f"/proc/self/task/{thread}/stat", "rb") as file:
                    name, _, state = file.read().rpartition(b") ")
                if b"(pt_" in name and state[:1] in b"RD":
                    return True
    except OSError:  # one has ended meanwhile; or there is no such folder
        pass
    return False
