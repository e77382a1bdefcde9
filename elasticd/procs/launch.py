"""Fork a child of the warden, and run a program in the child. Standard library only."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Sequence
from typing import NoReturn

from elasticd.channel.warden_messages import Program
from elasticd.procs.linux import die_with_parent

CANNOT_RUN = 127


def launch(program: Program, fds: Sequence[int], files: int | None) -> tuple[int, int]:
    """Fork a child that runs the program in its own session and process group, with copies of ``fds`` as its
    first files. ``files``: how many files the child may have open; None: as many as this process.

    Return the child's pid and a descriptor for ``start_error``. Raises OSError if the fork fails.
    """
    parent = os.getpid()
    errors, tell_error = os.pipe()
    # Signals are blocked until the child has reset its handlers, since the handlers that the child inherits
    # ignore the signals that end a job.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become(program, fds, tell_error, parent, files)
    except OSError:
        os.close(errors)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(tell_error)
    return pid, errors


def start_error(errors: int) -> str | None:
    """Return why the child could not run its program; None if it could. Closes the descriptor."""
    os.set_blocking(errors, False)
    try:
        return os.read(errors, 4096).decode() or None
    except BlockingIOError:  # the child still runs
        return None
    # The process was forked by the zygote, and killed before the warden released it.
    except ConnectionResetError:
        return None
    finally:
        os.close(errors)


def _become(
    program: Program, fds: Sequence[int], tell_error: int, parent: int, files: int | None
) -> NoReturn:
    """Turn this forked child into the requested program."""
    failing = "a process"
    try:
        os.setsid()
        die_with_parent()
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(128 + signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        failing = f"in {program.cwd}"
        os.chdir(program.cwd)
        for target, fd in enumerate(fds):
            if target == tell_error:
                tell_error = os.dup(tell_error)
            os.dup2(fd, target)
            os.set_inheritable(target, True)
        # Nothing else needs closing: the warden's other descriptors are close-on-exec.
        failing = program.argv[0]
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        os.execvpe(program.argv[0], program.argv, program.env)
    except BaseException as error:  # noqa: BLE001  # a forked child must never return from here
        reason = error.strerror if isinstance(error, OSError) else repr(error)
        os.write(tell_error, f"cannot run {failing}: {reason}".encode(errors="backslashreplace"))
    finally:
        os._exit(CANNOT_RUN)
