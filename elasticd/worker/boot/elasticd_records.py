"""Write the records of ``elasticd run --debug``: the collectives of each process group, and notes.

Each worker writes files of its own into a folder of the round. A line is JSON of a fixed length, and the
newest lines replace the oldest. A line is written before its collective begins, so that the files tell how
far a worker came, however the worker ends.

Standard library only, and self-contained. The reader is elasticd/data/debugrecords.py, which describes the
lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

FOLDER = "ELASTICD_DEBUG_FOLDER"
_CALL_BYTES, _CALLS = 512, 2000
_NOTE_BYTES, _NOTES = 2048, 500
_GROUPS_MAX = 64
_TEXT_MAX = 160


class RingFile:
    """A file with a first line that stays, and then the newest ``lines`` lines of ``size`` bytes each."""

    def __init__(self, path: str, size: int, lines: int, head: dict[str, Any]) -> None:
        self._size, self._lines = size, lines
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.count = 0
        self._write(head, 0)

    def add(self, line: dict[str, Any]) -> None:
        self.count += 1
        self._write({"n": self.count, **line}, 1 + (self.count - 1) % self._lines)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, line: dict[str, Any], position: int) -> None:
        data = _encoded(line)
        if len(data) >= self._size:  # it would overwrite the next line: leave out what is for people
            short: dict[str, Any] = {name: str(line[name])[-20:] for name in ("of", "at") if name in line}
            data = _encoded({**line, **short, **({"first": []} if "first" in line else {})})
        if len(data) < self._size:
            os.pwrite(self._fd, data.ljust(self._size - 1) + b"\n", position * self._size)


class GroupRecord:
    """The collectives of one process group: the file, and a checksum over all calls so far."""

    def __init__(self, file: RingFile) -> None:
        self.file = file
        self.chain = 0


class Records:
    """The records of this process. No method raises an error: after the first error nothing more is
    recorded."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pid = os.getpid()
        self._round = ""
        self._notes: RingFile | None = None
        self._groups: dict[str, GroupRecord] = {}
        self._places = Places()

    @property
    def alive(self) -> bool:
        """Whether anything is recorded: not in a forked child, and not after an error."""
        return bool(self._folder) and os.getpid() == self._pid

    @property
    def round(self) -> str:
        """The number of the worker's round."""
        return os.environ.get("ELASTICD_ROUND", "0")

    def call(self, group: str, ranks: Sequence[int], same: Iterable[Any], text: str) -> None:
        """Record that this worker is about to call a collective. ``same``: what must be the same in all ranks
        of the group. ``text``: the tensors, for people."""
        if not self.alive:
            return
        try:
            self._enter()
            record = self._groups.get(group)
            if record is None:
                record = self._begin_group(group, ranks)
            if record is not None:
                same = list(same)
                record.chain = zlib.crc32(json.dumps(same).encode(), record.chain)
                line = {"t": time.time(), "same": same, "of": text, "at": self._places.of_script()}
                record.file.add({**line, "chain": record.chain})
        except (OSError, ValueError, TypeError):
            self._folder = ""

    def note(self, kind: str, **fields: Any) -> None:
        if not self.alive:
            return
        try:
            self._enter()
            if self._notes is not None:
                self._notes.add({"is": kind, "t": time.time(), **fields})
        except (OSError, ValueError, TypeError):
            self._folder = ""

    def place(self) -> str:
        """Return the line of the script that runs now, as "train.py:57"."""
        return self._places.of_script()

    def place_of(self, error: BaseException) -> str:
        """Return the line of the script at which an exception was raised."""
        return self._places.of_error(error.__traceback__)

    def _enter(self) -> None:
        """Begin new files if the worker has entered another round."""
        if self._round == self.round:
            return
        for file in (self._notes, *(group.file for group in self._groups.values())):
            if file is not None:
                file.close()
        self._round, self._groups = self.round, {}
        os.makedirs(self._place(), exist_ok=True)
        self._notes = RingFile(
            os.path.join(self._place(), f"rank-{_rank()}.notes"), _NOTE_BYTES, _NOTES, self._head()
        )

    def _begin_group(self, group: str, ranks: Sequence[int]) -> GroupRecord | None:
        if len(self._groups) >= _GROUPS_MAX:
            return None
        name = f"rank-{_rank()}.group-{len(self._groups)}"
        head = {**self._head(), "group": group[:_TEXT_MAX], "ranks": _packed(ranks)}
        record = GroupRecord(RingFile(os.path.join(self._place(), name), _CALL_BYTES, _CALLS, head))
        self._groups[group] = record
        return record

    def _place(self) -> str:
        return os.path.join(self._folder, f"round-{self._round}")

    def _head(self) -> dict[str, Any]:
        world, unit = os.environ.get("WORLD_SIZE", "1"), os.environ.get("ELASTICD_UNIT", "1")
        return {"v": 1, "rank": _rank(), "world": int(world), "unit": int(unit), "pid": self._pid}


class Places:
    """Finds lines of the user's own code: outside torch, other packages, elasticd and the standard
    library."""

    def __init__(self) -> None:
        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        self._others = [os.path.join(os.path.dirname(os.__file__), ""), os.path.join(package, "")]
        self._own: dict[str, bool] = {}
        self._script = ""  # its folder, once it is known: __main__ loses its file at the end

    def of_script(self) -> str:
        """Return the innermost line of the user's code that runs now in this thread; empty if there is
        none."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if self.is_own(file):
                return self.named(file, frame.f_lineno)
            frame = frame.f_back
        return ""

    def of_error(self, traceback: Any) -> str:
        """Return the innermost line of the user's code in a traceback; empty if there is none."""
        place = ""
        while traceback is not None:
            file = traceback.tb_frame.f_code.co_filename
            if self.is_own(file):
                place = self.named(file, traceback.tb_lineno)
            traceback = traceback.tb_next
        return place

    def is_own(self, file: str) -> bool:
        own = self._own.get(file)
        if own is None:
            inside = any(f"/{name}/" in file for name in ("site-packages", "dist-packages"))
            own = not (inside or file.startswith(("<", *self._others)))
            self._own[file] = own
        return own

    def named(self, file: str, line: int) -> str:
        file = os.path.abspath(file)
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        if script:
            self._script = os.path.dirname(os.path.abspath(script))
        for folder in filter(None, (os.getcwd(), self._script)):
            file = file.removeprefix(os.path.join(folder, ""))
        return f"{file[-_TEXT_MAX:]}:{line}"


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _packed(ranks: Sequence[int]) -> list[list[int]]:
    """Return the ranks as pairs of a first and a last rank."""
    pairs: list[list[int]] = []
    for rank in ranks:
        if pairs and pairs[-1][1] == rank - 1:
            pairs[-1][1] = rank
        else:
            pairs.append([rank, rank])
    return pairs
