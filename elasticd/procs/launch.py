"""How a child of the warden's comes to run its program. Standard library only."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Sequence
from typing import NoReturn

from elasticd.procs.channel import Message
from elasticd.procs.linux import die_with_parent

CANNOT_RUN = 127


def launch(message: Message, fds: Sequence[int], files: int | None) -> tuple[int, int]:
    """Fork a child that runs ``argv`` in a session and process group of its own, with copies of ``fds`` as
    its first files. ``files``: how many it may have open; None: as many as this process.

    Its pid, and the file that tells ``why_not``. Raises OSError where there can be no child.
    """
    parent = os.getpid()
    errors, tell_error = os.pipe()
    # What is sent to the child before it has handlers of its own waits: those that it has from here
    # ignore what ends a job.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become(message, fds, tell_error, parent, files)
    except OSError:
        os.close(errors)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(tell_error)
    return pid, errors


def why_not(errors: int) -> str | None:
    """Why a child's program could not be run; None if it was. The file is closed."""
    os.set_blocking(errors, False)
    try:
        return os.read(errors, 4096).decode() or None
    except BlockingIOError:  # still held: its program runs
        return None
    except ConnectionResetError:  # forked by the zygote, and killed before it heard its go
        return None
    finally:
        os.close(errors)


def _become(
    message: Message, fds: Sequence[int], tell_error: int, parent: int, files: int | None
) -> NoReturn:
    """Turn this forked child into the program asked for."""
    failing = "a process"
    try:
        os.setsid()
        die_with_parent()
        if os.getppid() != parent:  # it died before the line above
            os._exit(128 + signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        failing = f"in {message['cwd']}"
        os.chdir(message["cwd"])
        for target, fd in enumerate(fds):
            if target == tell_error:
                tell_error = os.dup(tell_error)
            os.dup2(fd, target)
            os.set_inheritable(target, True)
        # Nothing else to close: every other descriptor of the warden is close-on-exec.
        failing = message["argv"][0]
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        os.execvpe(message["argv"][0], message["argv"], message["env"])
    except BaseException as error:  # noqa: BLE001  # a forked child must never return from here
        reason = error.strerror if isinstance(error, OSError) else repr(error)
        os.write(tell_error, f"cannot run {failing}: {reason}".encode(errors="backslashreplace"))
    finally:
        os._exit(CANNOT_RUN)
