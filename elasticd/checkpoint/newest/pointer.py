"""The record of committed checkpoints, as a file beside them. With an agent, etcd holds the record, and the
file is a copy for runs without this etcd."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import msgspec

from elasticd.checkpoint.format.manifest import BadCheckpoint, Unreadable, digest, is_fresh
from elasticd.checkpoint.newest.retention import Commit, CommitRefused, Keep, commit
from elasticd.checkpoint.storage import CheckpointStore, Overtaken, error_text, store_at
from elasticd.checkpoint.storage.reading import finished_in, whole_in
from elasticd.core.checkpoint_names import parse_folder
from elasticd.core.facts import Checkpoint, Saved

POINTER: Final = "committed.json"
VERSION: Final = 1
_LOCK: Final = f".{POINTER}.lock"
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)  # these errors leave the old file untouched
# In every version, the file ends with the checksum of the bytes before.
_SEALED: Final = re.compile(rb'(?P<said>.*),"seal":"(?P<seal>[0-9a-f]{32})"\}', re.DOTALL)


class _PointerVersion(msgspec.Struct, frozen=True):
    v: int


class _Record(_PointerVersion, frozen=True):
    saved: tuple[Saved, ...]


# The decoders are made before any thread starts: msgspec crashes if two threads make the first decoder of a
# class at the same time.
_VERSIONS: Final = msgspec.json.Decoder(_PointerVersion)
_RECORDS: Final = msgspec.json.Decoder(_Record)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The result of a read of the file. ``version``: the tag that ``CheckpointStore.replace`` needs to
    overwrite the file. ``damage``: the fault of the file, if there is one; ``known`` then lists the whole
    checkpoints beside the file."""

    known: Checkpoint
    version: str | None
    damage: str = ""


class Committer(Protocol):
    """Records a durable checkpoint as the newest. ``FilePointer`` implements this protocol, and so does the
    agent's pointer in etcd."""

    def read(self, *, own: bool = False) -> Checkpoint:
        """Return the committed checkpoints; with ``own``, only those of this job. Raises BadCheckpoint,
        OSError."""

    def witness(self, fence: int) -> bool:
        """Return whether the job is still in the round ``fence``; False if that can no longer be found out.
        Blocks meanwhile."""

    def commit(self, new: Saved, keep: Keep, fence: int, *, in_time: bool = False) -> Commit:
        """Make ``new`` the newest checkpoint. ``in_time``: the workers handed ``new`` over before the round
        after ``fence`` began. After ``CommitRefused`` or BadCheckpoint the checkpoint is not committed and
        never will be; after OSError the outcome is unknown."""

    def settle(self) -> Checkpoint:
        """Finish a commit that ``commit`` returned as unsettled, so that every reader sees it. Return the
        committed checkpoints. Raises as ``commit``."""

    def close(self) -> None: ...


class FilePointer:
    """The file ``committed.json`` in a store. ``store`` is a store, a path or a URL.

    If the file is damaged or lost, the whole checkpoints beside the file count as committed, and ``say`` gets
    a warning.
    """

    def __init__(
        self, store: CheckpointStore | str | os.PathLike[str], say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._store = store_at(store) if isinstance(store, str | os.PathLike) else store
        self._say = say
        self._said = ""
        self._warned = False

    def begin(self) -> None:
        """Create the file if the store holds no checkpoint. Must be called before the first checkpoint is
        complete: a file that is missing beside a complete checkpoint counts as lost. Raises OSError."""
        with self._store.locked(_LOCK):
            try:
                self._store.look(POINTER)
            except FileNotFoundError:
                if not finished_in(self._store):
                    with contextlib.suppress(Overtaken):
                        self.write(Checkpoint(self._store.url), "")

    def read(self, *, own: bool = False) -> Checkpoint:
        """Return the committed checkpoints; none if nothing was ever committed. ``own`` is ignored, since a
        file does not know jobs. Raises OSError. Raises BadCheckpoint if a newer version wrote the file, or if
        the file is damaged or lost and no checkpoint beside it is whole."""
        del own
        seen = self._look()
        if seen.damage and not seen.known.saved:
            raise BadCheckpoint(
                f"{seen.damage}, and no checkpoint beside it is whole; to train from the start, move the "
                "content of the folder away"
            )
        return seen.known

    def before(self, new: Saved) -> Checkpoint:
        """Return the checkpoints committed before ``new``. A damaged file with no whole checkpoint beside it
        gives none."""
        return self._before(new)[0]

    def _before(self, new: Saved) -> tuple[Checkpoint, str | None]:
        seen = self._look()
        known = seen.known
        if seen.damage:  # ``new`` is whole on disk, but not yet committed
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
        """Return the newest checkpoint that the file names; None if the file is damaged. Raises
        BadCheckpoint, OSError."""
        seen = self._look()
        return None if seen.damage else seen.known.newest

    def last_round(self) -> int:
        """Return the latest round that has committed or begun to save here. Raises BadCheckpoint, OSError."""
        begun = 0
        with contextlib.suppress(FileNotFoundError):
            begun = max((there.round for n in self._store.names() if (there := parse_folder(n))), default=0)
        with contextlib.suppress(Unreadable):  # an unreadable checkpoint counts by its name
            begun = max(begun, newest.round if (newest := self._look().known.newest) else 0)
        return begun

    def witness(self, fence: int) -> bool:
        """Return True: a file does not know rounds."""
        del fence
        return True

    def commit(self, new: Saved, keep: Keep, fence: int = 0, *, in_time: bool = False) -> Commit:
        """Commit ``new``. ``fence`` and ``in_time`` are ignored, since a file does not know rounds. After
        ``CommitRefused`` or BadCheckpoint the file is unchanged; after OSError the file may have changed."""
        with self._store.locked(_LOCK):
            while True:
                known, version = self._before(new)
                if new in known.saved:  # an earlier attempt succeeded, but its answer was lost
                    return Commit(known)
                made = commit(known, new, keep)
                try:
                    self.write(made.checkpoint, version)
                    self._warn()
                except Overtaken:
                    continue
                except OSError as error:
                    # The file is written, but a power cut may undo the write.
                    if self.before(new) == made.checkpoint:
                        return replace(made, unsettled=error_text(error))
                    if error.errno in _NO_ROOM:
                        raise CommitRefused(f"it could not be committed: {error_text(error)}") from error
                    raise
                return made

    def _warn(self) -> None:
        if not self._store.fenced and not self._warned:
            self._warned = True
            self._say(
                f"{self._store.url} does not notice two commits at the same time: let only one job at a time "
                "save there, or one of two checkpoints may be lost; under elasticd run, etcd prevents that"
            )

    def settle(self) -> Checkpoint:
        """Rewrite the file durably, and return its content. Raises as ``update``."""
        return self.update(lambda known: known)

    def forget(self, name: str) -> None:
        """Remove a checkpoint from the record. Raises BadCheckpoint, OSError."""
        self.update(lambda known: replace(known, saved=tuple(s for s in known.saved if s.name != name)))

    def update(self, change: Callable[[Checkpoint], Checkpoint]) -> Checkpoint:
        """Replace the record by the result of ``change``, under the lock. Raises BadCheckpoint, OSError, and
        the errors of ``change``."""
        with self._store.locked(_LOCK):
            while True:
                seen = self._look()
                with contextlib.suppress(Overtaken):
                    self.write(changed := change(seen.known), seen.version)
                    return changed

    def clear(self, names: Iterable[str]) -> None:
        """Remove temporary files of the pointer, left by processes that were killed while they wrote."""
        if begun := [name for name in names if is_fresh(name, POINTER)]:
            with self._store.locked(_LOCK):  # under the lock, no process is writing these files
                self._store.unlink(begun)

    def close(self) -> None:
        """Do nothing: no resource is open."""

    def write(self, checkpoint: Checkpoint, over: str | None = None) -> None:
        """Write the file. ``over``: see ``CheckpointStore.replace``."""
        said = msgspec.json.encode(_Record(VERSION, checkpoint.saved)).removesuffix(b"}")
        self._store.replace(POINTER, b'%b,"seal":"%b"}' % (said, digest(said).encode()), over=over)


def _saved_by(raw: bytes, file: str) -> tuple[Saved, ...]:
    """Return the checkpoints in the record. Raises BadCheckpoint if a newer version wrote the record, and
    ValueError, with the fault, if the record is damaged."""
    sealed = _SEALED.fullmatch(raw)
    if sealed is None:
        raise ValueError("its checksum is missing")
    if digest(sealed["said"]) != sealed["seal"].decode():
        raise ValueError("its checksum is wrong")
    if (newer := _VERSIONS.decode(raw).v) > VERSION:
        raise BadCheckpoint(f"{file} was written by a newer elasticd (version {newer}): upgrade this one")
    return _RECORDS.decode(raw).saved
