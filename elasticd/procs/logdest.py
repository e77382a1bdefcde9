"""The files that workers print to, and a check that the files can be written."""

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
_ROOM_BYTES = 1 << 16  # a disk with less free space than this counts as full


@dataclass(frozen=True, slots=True)
class LogDest:
    """Where a round's workers print, by local rank; mirrors torch's ``LogsDest``.

    ``stdouts``, ``stderrs``: the file that a stream is redirected to; empty or absent for the console.
    ``tee_stdouts``, ``tee_stderrs``: the file of a stream that also goes to the console. ``error_files``:
    where a worker writes why it failed. ``filtered_*``: one file for the lines of tee'd streams that match a
    filter. ``capture_dirs``: a folder for elasticd's copy of a stream that otherwise goes to the console
    only.
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
        """Return the file that the stream is redirected to; empty for the console."""
        return (self.stdouts if stream == STDOUT else self.stderrs).get(local_rank, "")

    def tee_of(self, stream: int, local_rank: int) -> str:
        """Return the file of a tee'd stream; empty if the stream is not tee'd."""
        return (self.tee_stdouts if stream == STDOUT else self.tee_stderrs).get(local_rank, "")

    def capture_of(self, stream: int, local_rank: int) -> str:
        """Return the file for elasticd's copy of a stream; empty if the stream has a file already."""
        folder = self.capture_dirs.get(local_rank, "")
        if not folder or self.file_of(stream, local_rank):
            return ""
        return str(Path(folder) / ("stdout.log" if stream == STDOUT else "stderr.log"))

    def without_files(self) -> LogDest:
        """Return a copy without files for output."""
        return replace(self, stdouts={}, stderrs={}, tee_stdouts={}, tee_stderrs={}, capture_dirs={})


Reify = Callable[[int, dict[int, dict[str, str]]], LogDest]


def trouble_with(path: str) -> str:
    """Return why a file cannot be written, for example a full disk; empty if it can. The file is created if
    missing, and its content does not change."""
    try:
        with open(path, "ab", opener=partial(os.open, mode=0o644)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.write(bytes(_ROOM_BYTES))
                return ""
        # Another process may be writing to the file, so the test writes another file in the same folder. The
        # test is left out where this user may not make files in the folder.
        folder = os.path.dirname(os.path.realpath(path))
        with contextlib.suppress(PermissionError), tempfile.TemporaryFile(dir=folder) as beside:
            beside.write(bytes(_ROOM_BYTES))
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return ""
