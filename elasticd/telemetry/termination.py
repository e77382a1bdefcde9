"""Why this process ended, left in a file for who started it: Kubernetes' termination message."""

from __future__ import annotations

import os
from pathlib import Path

BYTES_MAX = 4096  # what Kubernetes shows of it
_CUT = "\n[...]\n"

KILLED = (
    "The agent was killed before it could say why (SIGKILL: out of memory, or its grace period was over)."
)


class TerminationLog:
    """Made at the start, it says at once what will be true if nothing else is written: that the agent
    was killed. A file that cannot be written is no reason to end: ``problem`` says it, else is empty.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.problem = ""
        self.write(KILLED)

    def write(self, text: str) -> None:
        """Have this as the whole message; too long a one loses its middle."""
        if self._path is None:
            return
        try:
            # Not replaced but rewritten: in a container the file is a mount.
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            with open(file, "wb") as stream:
                stream.write(shortened(text.rstrip() + "\n"))
        except OSError as error:
            self.problem = f"the termination log {self._path} cannot be written: {error.strerror}"


def shortened(text: str, bytes_max: int = BYTES_MAX) -> bytes:
    """The text in UTF-8 within so many bytes: its start says what happened, its end where to read on."""
    whole = text.encode(errors="replace")
    if len(whole) <= bytes_max:
        return whole
    room = bytes_max - len(_CUT.encode())
    tail_bytes = room // 2
    head = whole[: room - tail_bytes].decode(errors="ignore")  # a character cut in two is left out
    tail = whole[len(whole) - tail_bytes :].decode(errors="ignore")
    return f"{head}{_CUT}{tail}".encode()
