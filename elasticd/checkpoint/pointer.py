"""What was committed, as a file beside the checkpoints. Where there is an agent, the truth is in etcd,
and this a copy of it for those who come without."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import Final

import msgspec

from elasticd.checkpoint.manifest import BadCheckpoint, parse_folder
from elasticd.checkpoint.store import Overtaken, Store, store_at
from elasticd.core.facts import Checkpoint, Saved
from elasticd.core.retention import Commit, Keep, commit

POINTER: Final = "committed.json"
VERSION: Final = 1


class _Record(msgspec.Struct, frozen=True):
    v: int
    saved: tuple[Saved, ...]


class FilePointer:
    """The file ``committed.json`` in a store, which is given itself or by its path or URL."""

    def __init__(self, store: Store | str | os.PathLike[str]) -> None:
        self._store = store_at(store) if isinstance(store, str | os.PathLike) else store

    def read(self) -> Checkpoint:
        """Empty where nothing was ever committed. Raises BadCheckpoint, OSError."""
        return self._look()[0]

    def _look(self) -> tuple[Checkpoint, str | None]:
        """And what it may be written over by."""
        file = f"{self._store.url}/{POINTER}"
        try:
            raw, version = self._store.look(POINTER)
        except FileNotFoundError:
            return Checkpoint(self._store.url), ""
        try:
            record = msgspec.json.decode(raw, type=_Record)
        except (msgspec.DecodeError, ValueError) as error:
            raise BadCheckpoint(f"{file} cannot be read: {error}") from error
        if record.v > VERSION:
            raise BadCheckpoint(f"{file} was written by a newer elasticd (version {record.v})")
        # Names become paths, of what is removed in the end too.
        strange = next((saved.name for saved in record.saved if parse_folder(saved.name) is None), None)
        if strange is not None:
            raise BadCheckpoint(f"{file} names {strange!r}, which is no checkpoint's name")
        return Checkpoint(self._store.url, record.saved), version

    def known(self) -> tuple[Checkpoint, bool]:
        """A file knows nothing of jobs. Raises as ``read``."""
        return self.read(), True

    def last_round(self) -> int:
        """The latest round that has committed here, or has begun to save. Raises as ``read``."""
        newest = self.read().newest
        begun = 0
        with contextlib.suppress(FileNotFoundError):
            begun = max((there.round for n in self._store.names() if (there := parse_folder(n))), default=0)
        return max(begun, newest.round if newest else 0)

    def witness(self, fence: int) -> bool:
        """A file knows nothing of rounds."""
        del fence
        return True

    def commit(self, new: Saved, keep: Keep, fence: int = 0, *, in_time: bool = False) -> Commit:
        """Both ``fence`` and ``in_time`` are of rounds, which a file knows nothing of. Raises
        ``retention.Refused``, BadCheckpoint, OSError; then nothing has changed."""
        with self._store.locked(f".{POINTER}.lock"):
            while True:
                known, version = self._look()
                if new in known.saved:  # a former try that was not answered
                    return Commit(known, ())
                made = commit(known, new, keep)
                try:
                    self.write(made.checkpoint, version)
                except Overtaken:
                    continue
                except OSError:
                    if self.read() != made.checkpoint:
                        raise
                    # It is in place, and may be gone after a power cut: what it was before still counts.
                    return Commit(made.checkpoint, ())
                return made

    def forget(self, name: str) -> None:
        """It is none of ours any more. Raises BadCheckpoint, OSError."""
        with self._store.locked(f".{POINTER}.lock"):
            while True:
                known, version = self._look()
                with contextlib.suppress(Overtaken):
                    stay = tuple(s for s in known.saved if s.name != name)
                    return self.write(replace(known, saved=stay), version)

    def write(self, checkpoint: Checkpoint, over: str | None = None) -> None:
        """``over``: see ``Store.replace``."""
        record = msgspec.json.encode(_Record(VERSION, checkpoint.saved))
        self._store.replace(POINTER, record, over=over)
