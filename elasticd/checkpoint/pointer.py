"""What was committed, as a file beside the checkpoints. Where there is an agent, the truth is in etcd,
and this a copy of it for those who come without."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from elasticd.checkpoint.manifest import BadCheckpoint, Unreadable, digest, is_fresh
from elasticd.checkpoint.reading import finished_in, whole_in
from elasticd.checkpoint.store import CheckpointStore, Overtaken, store_at, told
from elasticd.core.facts import Checkpoint, Saved
from elasticd.core.naming import parse_folder
from elasticd.core.retention import Commit, CommitRefused, Keep, commit

POINTER: Final = "committed.json"
VERSION: Final = 1
_LOCK: Final = f".{POINTER}.lock"
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)  # so that not even its place was touched
# Whatever the version: the checksum of all before it, at the end.
_SEALED: Final = re.compile(rb'(?P<said>.*),"seal":"(?P<seal>[0-9a-f]{32})"\}', re.DOTALL)


class _PointerVersion(msgspec.Struct, frozen=True):
    v: int


class _Record(_PointerVersion, frozen=True):
    saved: tuple[Saved, ...]


class _Unsealed(_Record, frozen=True, forbid_unknown_fields=True):
    """As the first releases wrote it."""


# Made before there are threads: msgspec crashes where two of them are the first to decode a class.
_VERSIONS: Final = msgspec.json.Decoder(_PointerVersion)
_RECORDS: Final = msgspec.json.Decoder(_Record)
_UNSEALED: Final = msgspec.json.Decoder(_Unsealed)


@dataclass(frozen=True, slots=True)
class _Seen:
    """``version``: what the file may be written over by. ``damage``: what is wrong with the file; then
    ``known`` is what is whole beside it."""

    known: Checkpoint
    version: str | None
    damage: str = ""


class FilePointer:
    """The file ``committed.json`` in a store, which is given itself or by its path or URL.

    If it is damaged or lost, ``say`` is told, and those checkpoints beside it that are whole count.
    """

    def __init__(
        self, store: CheckpointStore | str | os.PathLike[str], say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._store = store_at(store) if isinstance(store, str | os.PathLike) else store
        self._say = say
        self._said = ""
        self._warned = False

    def begin(self) -> None:
        """To be called before the first checkpoint is complete: where the file is missing beside one, it was
        lost. Raises OSError."""
        with self._store.locked(_LOCK):
            try:
                self._store.look(POINTER)
            except FileNotFoundError:
                if not finished_in(self._store):
                    with contextlib.suppress(Overtaken):
                        self.write(Checkpoint(self._store.url), "")

    def read(self) -> Checkpoint:
        """Empty where nothing was ever committed. Raises OSError, and BadCheckpoint where it was written by
        a newer version, or is damaged or lost and nothing beside it is whole."""
        seen = self._look()
        if seen.damage and not seen.known.saved:
            raise BadCheckpoint(
                f"{seen.damage}, and nothing beside it is whole; to train from the start, move what is there "
                "away"
            )
        return seen.known

    def before(self, new: Saved) -> Checkpoint:
        """What a commit comes after: the same, but empty where nothing else is whole."""
        return self._before(new)[0]

    def _before(self, new: Saved) -> tuple[Checkpoint, str | None]:
        seen = self._look()
        known = seen.known
        if seen.damage:  # it lies there and is whole, and is not yet committed
            known = replace(known, saved=tuple(s for s in known.saved if s != new))
        return known, seen.version

    def _look(self) -> _Seen:
        file = f"{self._store.url}/{POINTER}"
        version: str | None = ""
        try:
            raw, version = self._store.look(POINTER)
        except FileNotFoundError:
            if not finished_in(self._store):
                return _Seen(Checkpoint(self._store.url), version)
            damage = f"{file} is missing"
        else:
            try:
                return _Seen(Checkpoint(self._store.url, _saved_by(raw, file)), version)
            except ValueError as error:
                if isinstance(error, BadCheckpoint):
                    raise
                damage = f"{file} is damaged: {error}"
        saved = whole_in(self._store)
        if saved and damage != self._said:
            self._said = damage
            self._say(f"{damage}; the checkpoints beside it that are whole count as committed")
        return _Seen(Checkpoint(self._store.url, saved), version, damage)

    def newest(self) -> Saved | None:
        """The newest that it names, whatever else is whole. Raises BadCheckpoint, OSError."""
        seen = self._look()
        return None if seen.damage else seen.known.newest

    def known(self, *, own: bool = False) -> Checkpoint:
        """A file knows nothing of jobs. Raises as ``read``."""
        del own
        return self.read()

    def last_round(self) -> int:
        """The latest round that has committed here, or has begun to save. Raises BadCheckpoint, OSError."""
        begun = 0
        with contextlib.suppress(FileNotFoundError):
            begun = max((there.round for n in self._store.names() if (there := parse_folder(n))), default=0)
        with contextlib.suppress(Unreadable):  # what lies there and cannot be read now counts by its name
            begun = max(begun, newest.round if (newest := self._look().known.newest) else 0)
        return begun

    def witness(self, fence: int) -> bool:
        """A file knows nothing of rounds."""
        del fence
        return True

    def commit(self, new: Saved, keep: Keep, fence: int = 0, *, in_time: bool = False) -> Commit:
        """Both ``fence`` and ``in_time`` are of rounds, which a file knows nothing of. Raises
        ``CommitRefused``, BadCheckpoint; then nothing has changed. After an OSError it may have."""
        with self._store.locked(_LOCK):
            while True:
                known, version = self._before(new)
                if new in known.saved:  # a former try that was not answered
                    return Commit(known)
                made = commit(known, new, keep)
                try:
                    self.write(made.checkpoint, version)
                    self._warn()
                except Overtaken:
                    continue
                except OSError as error:
                    if self.before(new) == made.checkpoint:  # in place, and may be gone after a power cut
                        return replace(made, unsettled=told(error))
                    if error.errno in _NO_ROOM:
                        raise CommitRefused(f"it could not be committed: {told(error)}") from error
                    raise
                return made

    def _warn(self) -> None:
        if not self._store.fenced and not self._warned:
            self._warned = True
            self._say(
                f"{self._store.url} cannot tell two commits at one moment apart: let only one job at a time "
                "save there, or one of two checkpoints may be forgotten; under elasticd run etcd sees to it"
            )

    def settle(self) -> Checkpoint:
        """What it says, once that is durable. Raises as ``update``."""
        return self.update(lambda known: known)

    def forget(self, name: str) -> None:
        """It is none of ours any more. Raises BadCheckpoint, OSError."""
        self.update(lambda known: replace(known, saved=tuple(s for s in known.saved if s.name != name)))

    def update(self, change: Callable[[Checkpoint], Checkpoint]) -> Checkpoint:
        """Have it say what ``change`` returns, which is given what it says while nobody else writes it.
        Raises BadCheckpoint, OSError, and what ``change`` does."""
        with self._store.locked(_LOCK):
            while True:
                seen = self._look()
                with contextlib.suppress(Overtaken):
                    self.write(changed := change(seen.known), seen.version)
                    return changed

    def clear(self, names: Iterable[str]) -> None:
        """Remove those of the store's files that were left by processes killed while they wrote it."""
        if begun := [name for name in names if is_fresh(name, POINTER)]:
            with self._store.locked(_LOCK):  # once nobody writes it, those that were there then are of no use
                self._store.unlink(begun)

    def close(self) -> None:
        """There is nothing open."""

    def write(self, checkpoint: Checkpoint, over: str | None = None) -> None:
        """``over``: see ``CheckpointStore.replace``."""
        said = msgspec.json.encode(_Record(VERSION, checkpoint.saved)).removesuffix(b"}")
        self._store.replace(POINTER, b'%b,"seal":"%b"}' % (said, digest(said).encode()), over=over)


def _saved_by(raw: bytes, file: str) -> tuple[Saved, ...]:
    """What the record says. Raises BadCheckpoint where a newer version wrote it; ValueError, which says what
    is wrong, where it is damaged."""
    sealed = _SEALED.fullmatch(raw)
    if sealed is None:
        record: _Record = _UNSEALED.decode(raw)
        if record.v != VERSION:
            raise ValueError("its checksum is missing")
    else:
        if digest(sealed["said"]) != sealed["seal"].decode():
            raise ValueError("its checksum is wrong")
        if (newer := _VERSIONS.decode(raw).v) > VERSION:
            raise BadCheckpoint(f"{file} was written by a newer elasticd (version {newer}): upgrade this one")
        record = _RECORDS.decode(raw)
    return record.saved
