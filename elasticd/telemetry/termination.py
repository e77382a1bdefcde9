"""Write the reason for this process's end to a file: Kubernetes' termination message."""

from __future__ import annotations

import os
from pathlib import Path

BYTES_MAX = 4096  # Kubernetes shows at most this many bytes
_CUT = "\n[...]\n"

KILLED = (
    "The agent was killed before it could say why (SIGKILL: out of memory, or its grace period was over)."
)


class TerminationLog:
    """The termination message. At first it says that the agent was killed, which is true if nothing else gets
    written.

    A file that cannot be written does not stop the agent: ``problem`` then says why, and is empty otherwise.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.problem = ""
        self.write(KILLED)

    def write(self, text: str) -> None:
        """Replace the whole message. A text that is too long loses its middle."""
        if self._path is None:
            return
        try:
            # The file is rewritten in place: in a container the file is a mount.
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            with open(file, "wb") as stream:
                stream.write(shortened(text.rstrip() + "\n"))
        except OSError as error:
            self.problem = f"the termination log {self._path} cannot be written: {error.strerror}"


def shortened(text: str, bytes_max: int = BYTES_MAX) -> bytes:
    """Return the text in UTF-8, without its middle if it is longer than ``bytes_max``: the start says what
    happened, the end where to read on."""
    whole = text.encode(errors="replace")
    if len(whole) <= bytes_max:
        return whole
    room = bytes_max - len(_CUT.encode())
    tail_bytes = room // 2
    head = whole[: room - tail_bytes].decode(errors="ignore")  # drops a character that is cut in two
    tail = whole[len(whole) - tail_bytes :].decode(errors="ignore")
    return f"{head}{_CUT}{tail}".encode()
