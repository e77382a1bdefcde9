"""What was committed, as a file beside the checkpoints. Where there is an agent, the truth is in etcd,
and this a copy of it for those who come without."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import msgspec

from elasticd.checkpoint.manifest import BadCheckpoint, is_fresh, parse_folder
from elasticd.checkpoint.reading import whole_in
from elasticd.checkpoint.store import Overtaken, Store, store_at, told
from elasticd.core.facts import Checkpoint, Saved
from elasticd.core.retention import Commit, Keep, Refused, commit

POINTER: Final = "committed.json"
VERSION: Final = 1
_LOCK: Final = f".{POINTER}.lock"
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)  # so that not even its place was touched


class _Version(msgspec.Struct, frozen=True):
    v: int


class _Record(_Version, frozen=True):
    saved: tuple[Saved, ...]


# Made before there are threads: msgspec crashes where two of them are the first to decode a class.
_VERSIONS: Final = msgspec.json.Decoder(_Version)
_RECORDS: Final = msgspec.json.Decoder(_Record)


class FilePointer:
    """The file ``committed.json`` in a store, which is given itself or by its path or URL.

    If it is damaged, ``say`` is told, and the checkpoints beside it that are whole count as committed.
    """

    def __init__(
        self, store: Store | str | os.PathLike[str], say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._store = store_at(store) if isinstance(store, str | os.PathLike) else store
        self._say = say
        self._said = ""
        self._warned = False

    def read(self) -> Checkpoint:
        """Empty where nothing was ever committed. Raises OSError, and BadCheckpoint where it was written by
        a newer version, or is damaged and nothing beside it is whole."""
        known, _, damage = self._look()
        if damage and not known.saved:
            raise BadCheckpoint(f"{damage}, and nothing beside it is whole; without it training begins anew")
        return known

    def before(self, new: Saved) -> Checkpoint:
        """What a commit comes after: the same, but empty where nothing else is whole."""
        return self._before(new)[0]

    def _before(self, new: Saved) -> tuple[Checkpoint, str | None]:
        known, version, damage = self._look()
        if damage:  # it lies there and is whole, and is not yet committed
            known = replace(known, saved=tuple(s for s in known.saved if s != new))
        return known, version

    def _look(self) -> tuple[Checkpoint, str | None, str]:
        """And what it may be written over by, and what is wrong with it."""
        file = f"{self._store.url}/{POINTER}"
        try:
            raw, version = self._store.look(POINTER)
        except FileNotFoundError:
            return Checkpoint(self._store.url), "", ""
        try:
            newer = _VERSIONS.decode(raw).v
            saved = _RECORDS.decode(raw).saved if newer <= VERSION else ()
            # Names become paths, of what is removed in the end too.
            strange = next((s.name for s in saved if parse_folder(s.name) is None), None)
            damage = f"it names {strange!r}, which is no checkpoint's name" if strange is not None else ""
        except (msgspec.DecodeError, ValueError) as error:
            newer, saved, damage = 0, (), str(error)
        if newer > VERSION:
            raise BadCheckpoint(f"{file} was written by a newer elasticd (version {newer}): upgrade this one")
        if damage:
            damage, saved = f"{file} is damaged: {damage}", whole_in(self._store)
            if saved and damage != self._said:
                self._said = damage
                self._say(f"{damage}; the checkpoints beside it that are whole count as committed")
        return Checkpoint(self._store.url, saved), version, damage

    def newest(self) -> Saved | None:
        """The newest that it names, whatever else is whole. Raises BadCheckpoint, OSError."""
        known, _, damage = self._look()
        return None if damage else known.newest

    def known(self, *, own: bool = False) -> Checkpoint:
        """A file knows nothing of jobs. Raises as ``read``."""
        del own
        return self.read()

    def last_round(self) -> int:
        """The latest round that has committed here, or has begun to save. Raises BadCheckpoint, OSError."""
        newest = self._look()[0].newest
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
        ``retention.Refused``, BadCheckpoint; then nothing has changed. After an OSError it may have."""
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
                        raise Refused(f"it could not be committed: {told(error)}") from error
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
                known, version, _ = self._look()
                with contextlib.suppress(Overtaken):
                    self.write(changed := change(known), version)
                    return changed

    def clear(self, names: Iterable[str]) -> None:
        """Remove those of the store's files that were left by processes killed while they wrote it."""
        if begun := [name for name in names if is_fresh(name, POINTER)]:
            with self._store.locked(_LOCK):  # once nobody writes it, those that were there then are of no use
                self._store.unlink(begun)

    def close(self) -> None:
        """There is nothing open."""

    def write(self, checkpoint: Checkpoint, over: str | None = None) -> None:
        """``over``: see ``Store.replace``."""
        record = msgspec.json.encode(_Record(VERSION, checkpoint.saved))
        self._store.replace(POINTER, record, over=over)
