"""Which files workers print to, and whether these can take it."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

STDOUT, STDERR = 1, 2
_ROOM_BYTES = 1 << 16  # a disk that cannot take that much more is full


@dataclass(frozen=True, slots=True)
class LogDest:
    """Where a round's workers print, by local rank; mirrors torch's ``LogsDest``.

    ``stdouts``, ``stderrs``: a file the stream is redirected to; empty or absent for the console.
    ``tee_stdouts``, ``tee_stderrs``: the same files for streams that go to the console too.
    ``error_files``: where a worker says why it failed. ``filtered_*``: one file for the lines of
    tee'd streams that contain one of the filters. ``capture_dirs``: a folder for our own copy of
    what goes to the console only.
    """

    stdouts: Mapping[int, str] = field(default_factory=dict)
    stderrs: Mapping[int, str] = field(default_factory=dict)
    tee_stdouts: Mapping[int, str] = field(default_factory=dict)
    tee_stderrs: Mapping[int, str] = field(default_factory=dict)
    error_files: Mapping[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""
    capture_dirs: Mapping[int, str] = field(default_factory=dict)

    def file_of(self, stream: int, local_rank: int) -> str:
        """Its redirection; empty if it goes to the console only."""
        return (self.stdouts if stream == STDOUT else self.stderrs).get(local_rank, "")

    def tee_of(self, stream: int, local_rank: int) -> str:
        """Its file if it is tee'd, else empty."""
        return (self.tee_stdouts if stream == STDOUT else self.tee_stderrs).get(local_rank, "")

    def capture_of(self, stream: int, local_rank: int) -> str:
        """Where our own copy of it is kept; empty if it has a file anyway."""
        folder = self.capture_dirs.get(local_rank, "")
        if not folder or self.file_of(stream, local_rank):
            return ""
        return str(Path(folder) / ("stdout.log" if stream == STDOUT else "stderr.log"))

    def unkept(self) -> LogDest:
        """The same with no file for what is printed."""
        return replace(self, stdouts={}, stderrs={}, tee_stdouts={}, tee_stderrs={}, capture_dirs={})


Reify = Callable[[int, dict[int, dict[str, str]]], LogDest]


def trouble_with(path: str) -> str:
    """Why nothing more can be written to a file, such as that its disk is full; empty if it can. The file
    is there afterwards, as it was."""
    try:
        with open(path, "ab", opener=partial(os.open, mode=0o644)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.write(bytes(_ROOM_BYTES))
                return ""
        # Beside it, as somebody may be writing to it; where no other file may be made, nothing is known.
        folder = os.path.dirname(os.path.realpath(path))
        with contextlib.suppress(PermissionError), tempfile.TemporaryFile(dir=folder) as beside:
            beside.write(bytes(_ROOM_BYTES))
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return ""
