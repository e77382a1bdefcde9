"""Write the notes for ``elasticd audit``: the samples that this worker used, and the commits.

Each process has a file of its own. One system call writes a note, so a worker that is killed loses no note.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from elasticd.data.auditnotes import (
    EVERY,
    SERIES,
    SUFFIX,
    VARIABLE,
    BatchNote,
    CommitNote,
    EntryNote,
    Gap,
    Note,
    Weights,
    encode,
    pack,
)
from elasticd.worker.samples.loading import Fetched, Share

_log = logging.getLogger(__name__)


class Recorder:
    """The notes of this process. ``every``: a digest of the weights is noted every so many steps."""

    def __init__(self, folder: Path, series: str = "", every: int = 100) -> None:
        self._series, self._every = series, every
        self._file: int | None = None
        self._turn = 0
        self._path = folder / f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}{SUFFIX}"
        self._round: EntryNote | None = None  # the note of the round, until it is written
        self._lost, self._why = 0, ""  # how many notes could not be written, and why
        try:
            self._open()
        except OSError as error:
            self._miss(error, 0)

    def entered(
        self, round: int, rank: int, world: int, step: int, data: tuple[int, int, dict[str, Any]] | None
    ) -> None:
        """Note the entry into a round. ``data``: epoch, position and facts."""
        epoch, position, facts = data or (0, 0, None)
        self._note(EntryNote(round, rank, world, step, self._series, epoch, position, facts), step)

    def took(
        self, step: int, turn: int, share: Share, losses: Iterable[tuple[Fetched, torch.Tensor]]
    ) -> None:
        """Note a batch, before any worker can commit it. ``step``: the first uncommitted step. ``turn``: the
        number of batches since the last commit."""
        parts = []
        ids: list[int] = []
        for fetched, loss in losses:
            assert fetched.part is not None
            parts.append((fetched.part.samples.start, len(fetched.part.samples), float(loss)))
            ids += fetched.ids
        batch = share.batch
        self._note(
            BatchNote(step, turn, batch.epoch, batch.first, batch.samples, tuple(parts), pack(ids)), step
        )

    def committed(self, step: int, learned: Iterable[torch.Tensor], covers: int = 1) -> None:
        """Note a commit. ``step``: the committed steps after it; ``covers``: the steps that it adds."""
        self._note(CommitNote(step, covers), step)
        if step // self._every > (step - max(1, covers)) // self._every:
            self.learned(step, learned)

    def learned(self, step: int, tensors: Iterable[torch.Tensor]) -> None:
        """Note a digest of the weights after ``step`` steps."""
        if not self._why:  # while notes cannot be written, compute no digest, which takes long
            self._note(Weights(step, digest(tensors)), step)
            return
        for _ in tensors:  # the workers gather each tensor of a sharded model together
            pass

    def _note(self, note: Note, step: int) -> None:
        """Write a note. If the disk takes no writes, the note is lost. The number of lost notes is written as
        soon as the disk takes writes again."""
        if isinstance(note, EntryNote):
            self._round = note
        behind = [Gap(step, self._lost, self._why)] if self._lost else []
        of_round = [self._round] if self._round is not None and self._round is not note else []
        lines = b"".join(encode(each) for each in (*of_round, *behind, note))
        try:
            if self._file is None:
                self._open()
            self._write(lines)
        except OSError as error:
            self._miss(error, 1)
            return
        if self._lost:
            _log.warning("notes for an audit are written again: %d of them are missing", self._lost)
        self._round, self._lost, self._why = None, 0, ""

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o644)

    def _write(self, lines: bytes) -> None:
        """Write all lines or none, since a note after an incomplete line could not be read."""
        assert self._file is not None
        end = os.fstat(self._file).st_size
        try:
            if os.write(self._file, lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file, end)
            raise

    def _miss(self, error: OSError, notes: int) -> None:
        """Count lost notes. Training goes on, and the audit reports the gap."""
        if not self._why:
            self._why = error.strerror or str(error)
            _log.warning("notes for an audit cannot be written, and are lost for now: %s", self._why)
        self._lost += notes


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return the SHA-256 of the tensors' bytes, in order."""
    summary = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        summary.update(plain.view(torch.uint8).numpy().data)
    return summary.hexdigest()


@functools.cache
def recorder() -> Recorder | None:
    """Return this process's recorder, if its agent asked for one."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    return Recorder(Path(folder), os.environ.get(SERIES, ""), int(os.environ.get(EVERY) or 100))
