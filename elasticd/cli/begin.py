"""The entry point of the ``elasticd`` command. It handles errors that occur before the command itself can
run.

It imports few modules, all of the standard library, because an import may fail.
"""

from __future__ import annotations

import os
import signal
import sys

from elasticd.cli.command_error import USAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn


class Stopped(BaseException):
    """A signal arrived before there was an agent that could shut down in order."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number
        self.sentence = f"stopped by {signal.Signals(number).name} before the job began"


def main() -> NoReturn:
    """Run a command and exit."""
    try:
        if sys.argv[1:2] == ["run"]:  # handle signals until the agent installs its own handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, _stop)
        from elasticd.cli.main import main as go

        go()
    except Stopped as stopped:
        _leave(stopped.sentence, stopped.code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        sentence = _unreadable() or _shadowed(error)
        if not sentence:
            raise
        _leave(sentence, USAGE)


def _stop(number: int, _: FrameType | None) -> None:
    raise Stopped(number)


def _leave(sentence: str, code: int) -> NoReturn:
    print(f"elasticd: {sentence}.", file=sys.stderr, flush=True)
    sys.exit(code)


def _unreadable() -> str:
    """Return a sentence about a file of Python or elasticd that this user may not run or read, for example
    after ``su``; empty if there is none."""
    library = os.path.dirname(os.__file__)
    for path, way in ((sys.executable, os.X_OK), (library, os.R_OK | os.X_OK), (__file__, os.R_OK)):
        if path and not os.access(path, way):
            what = "run" if way == os.X_OK else "read"
            return (
                f"user {os.getuid()} may not {what} {path}: permit it, or install elasticd in another folder"
            )
    return ""


def _shadowed(error: Exception) -> str:
    """Return a sentence about a file that shadows a module of the standard library; empty if there is none. A
    file shadows a module if that module was imported from a folder of PYTHONPATH."""
    others = [os.path.realpath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    for name in sorted(sys.stdlib_module_names & sys.modules.keys()):
        file = getattr(sys.modules[name], "__file__", None) or ""
        folder = os.path.dirname(os.path.realpath(file))
        package = os.path.dirname(folder) if os.path.basename(file).startswith("__init__.") else folder
        if file and package in others:
            return (
                f"{file} is imported in place of Python's own module {name} "
                f"({type(error).__name__}: {error}): rename it, or take its folder out of PYTHONPATH"
            )
    return ""


if __name__ == "__main__":
    # Imported, since Stopped would be another class in ``__main__``.
    from elasticd.cli.begin import main as begin

    begin()
