"""Reading a checkpoint: several threads read, and every byte is checked against the manifest before it is
used."""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, TypeVar

from elasticd.checkpoint.format.manifest import (
    MANIFEST,
    BadCheckpoint,
    File,
    Manifest,
    Unreadable,
    block_digest,
    decode,
    digest,
    is_intact,
)
from elasticd.checkpoint.storage import CheckpointStore, Opened
from elasticd.core.checkpoint_names import age_of, parse_folder
from elasticd.core.facts import Saved

_THREADS_MAX: Final = 8
_PATIENCE_S: Final = 5.0
_AGAIN_S: Final = 0.2
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class WantedRange:
    """A range of a shard's bytes, from ``at`` on, that is to be read into ``into``."""

    file: int
    at: int
    into: memoryview

    @property
    def end(self) -> int:
        return self.at + len(self.into)


def by_file(ranges: Iterable[WantedRange]) -> dict[int, list[WantedRange]]:
    """Return the ranges that are not empty, by their file."""
    found: dict[int, list[WantedRange]] = {}
    for wanted in ranges:
        if len(wanted.into):
            found.setdefault(wanted.file, []).append(wanted)
    return found


def open_manifest(store: CheckpointStore, saved: Saved) -> Manifest:
    """Return the manifest of a committed checkpoint, after a check that every file is present in full length.
    Raises BadCheckpoint, which names the file."""
    manifest = decode_committed(read_manifest(store, saved.name), saved)
    require_files(store, manifest)
    return manifest


def decode_committed(raw: bytes, saved: Saved) -> Manifest:
    """Return the manifest in these bytes, which must be that of the committed checkpoint. Raises
    BadCheckpoint."""
    if digest(raw) != saved.digest:
        why = (
            "it is intact, but its checksum differs from the one in the record of commits"
            if is_intact(raw)
            else "its checksum is wrong"
        )
        raise BadCheckpoint(f"{saved.name}/{MANIFEST} is not as it was committed: {why}")
    manifest = decode(raw, saved.name)
    told = (manifest.name, manifest.step, manifest.round, manifest.world)
    if told != (saved.name, saved.step, saved.round, saved.world):
        raise BadCheckpoint(
            f"{saved.name}/{MANIFEST} is of step {told[1]}, round {told[2]} and {told[3]} workers, and was "
            f"committed as of step {saved.step}, round {saved.round} and {saved.world} workers"
        )
    return manifest


def require_files(store: CheckpointStore, manifest: Manifest) -> None:
    """Raise BadCheckpoint unless every file of the checkpoint is present in full length. Ranks that have
    written nothing may have no file."""
    name = manifest.name
    sizes = _patiently(name, lambda: store.sizes(name))
    for file in manifest.files:
        if file.size and file.name not in sizes:
            raise BadCheckpoint(f"{name}/{file.name} is missing")
        if (size := sizes.get(file.name, 0)) != file.size:
            raise BadCheckpoint(f"{name}/{file.name} is {size} bytes long in place of {file.size}")


def is_finished(store: CheckpointStore, name: str) -> bool:
    """Return whether the checkpoint has a manifest, which is written last. The content is not checked. Raises
    OSError."""
    try:
        return MANIFEST in store.files(name)
    except FileNotFoundError:  # another process has just removed the folder
        return False


def finished_in(store: CheckpointStore) -> bool:
    """Return whether the store holds a checkpoint with a manifest. Raises OSError."""
    return any(is_finished(store, name) for name in _folders(store))


def whole_in(store: CheckpointStore) -> tuple[Saved, ...]:
    """Return the checkpoints with an intact manifest and every file in full length, oldest first. Used where
    the record of commits is lost. Raises OSError; raises Unreadable if a temporary error hides a checkpoint's
    state."""
    found = []
    for name in _folders(store):
        try:
            if is_intact(raw := read_manifest(store, name)):
                its = decode(raw, name)
                if its.name != name:
                    continue
                size = its.size + len(raw)
                require_files(store, its)
                found.append(Saved(its.name, its.step, its.round, its.world, its.at, size, digest(raw)))
        except Unreadable:
            raise
        except BadCheckpoint:
            continue
    return tuple(sorted(found, key=lambda saved: age_of(saved.name)))


def _folders(store: CheckpointStore) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return [name for name in store.names() if parse_folder(name)]
    return []


def read_manifest(store: CheckpointStore, name: str) -> bytes:
    """Return the bytes of a checkpoint's manifest. Raises BadCheckpoint."""
    return _patiently(where := f"{name}/{MANIFEST}", lambda: store.read(where))


def fill(
    store: CheckpointStore,
    manifest: Manifest,
    ranges: Iterable[WantedRange],
    progress: Callable[[int], None] = lambda _: None,
    *,
    readers: int = 1,
) -> None:
    """Read and verify the ranges. A block that lies wholly within one wanted range is read without a
    copy. After BadCheckpoint the content of the ranges is undefined.

    ``progress`` is called from several threads with the number of bytes read since the last call.
    ``readers``: how many processes of this machine read at the same time and share its processors.
    """
    tasks = [
        (manifest.files[number], first, some)
        for number, these in by_file(ranges).items()
        for first, some in _by_block(these, manifest.block)
    ]
    threads = max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // readers))
    runs = _runs(tasks, threads)
    if len(runs) <= 1:
        for run in runs:
            _read_blocks(store, manifest, run, progress)
        return
    with ThreadPoolExecutor(len(runs), "read") as pool:
        jobs = [pool.submit(_read_blocks, store, manifest, run, progress) for run in runs]
        for job in jobs:
            job.result()


def verify(
    store: CheckpointStore, manifest: Manifest, progress: Callable[[int], None] = lambda _: None
) -> Iterator[tuple[File, list[str]]]:
    """Read each file that is not empty, completely. Yield the file and what is wrong with it: sentences, none
    if the file is intact."""
    scratch = memoryview(bytearray(manifest.block))
    for file in filter(attrgetter("size"), manifest.files):
        wrong = []
        where = f"{manifest.name}/{file.name}"
        try:
            with closing(store.open(where)) as opened:
                for n, expected in enumerate(file.digests):
                    block = scratch[: _length(file, n, manifest.block)]
                    _read_exactly(opened, block, n * manifest.block, where)
                    if block_digest(block) != expected:
                        wrong.append(_wrong(manifest, file, n))
                    progress(len(block))
        except OSError as error:
            wrong.append(f"{where} cannot be read: {error.strerror or error}")
        except BadCheckpoint as error:
            wrong.append(str(error))
        yield file, wrong


# ------------------------------------------------------------ blocks

_Task = tuple[File, int, list[WantedRange]]


def _by_block(ranges: list[WantedRange], block: int) -> Iterator[tuple[int, list[WantedRange]]]:
    """Yield the number of each block that is needed, with the wanted ranges in it."""
    ranges.sort(key=lambda w: w.at)
    by_number: dict[int, list[WantedRange]] = {}
    for wanted in ranges:
        for n in range(wanted.at // block, (wanted.end - 1) // block + 1):
            by_number.setdefault(n, []).append(wanted)
    yield from sorted(by_number.items(), key=lambda item: item[0])


def _runs(tasks: Sequence[_Task], count: int) -> list[Sequence[_Task]]:
    """Cut the tasks into at most ``count`` runs of neighbours, of about equal length."""
    size = max(1, -(-len(tasks) // count))
    return [tasks[at : at + size] for at in range(0, len(tasks), size)]


def _length(file: File, number: int, block: int) -> int:
    return min(block, file.size - number * block)


def _read_blocks(
    store: CheckpointStore, manifest: Manifest, tasks: Sequence[_Task], progress: Callable[[int], None]
) -> None:
    scratch: memoryview | None = None
    shard = _Shard(store, "")
    try:
        for file, number, ranges in tasks:
            where = f"{manifest.name}/{file.name}"
            if where != shard.where:
                shard.close()
                shard = _Shard(store, where)
            start = number * manifest.block
            length = _length(file, number, manifest.block)
            direct = len(ranges) == 1 and ranges[0].at <= start and ranges[0].end >= start + length
            if direct:
                at = start - ranges[0].at
                block = ranges[0].into[at : at + length]
            else:
                scratch = scratch or memoryview(bytearray(manifest.block))
                block = scratch[:length]
            shard.read(block, start)
            if block_digest(block) != file.digests[number]:
                raise BadCheckpoint(_wrong(manifest, file, number))
            progress(length)
            if not direct:
                for wanted in ranges:
                    first, last = max(wanted.at, start), min(wanted.end, start + length)
                    wanted.into[first - wanted.at : last - wanted.at] = block[first - start : last - start]
    finally:
        shard.close()


@dataclass(slots=True)
class _Shard:
    """A file that is read at random places. The file is opened again after an error."""

    store: CheckpointStore
    where: str
    _opened: Opened | None = None

    def read(self, into: memoryview, at: int) -> None:
        """Read until ``into`` is full. Raises BadCheckpoint."""
        _patiently(self.where, lambda: self._read(into, at))

    def _read(self, into: memoryview, at: int) -> None:
        if self._opened is None:
            self._opened = self.store.open(self.where)
        try:
            _read_exactly(self._opened, into, at, self.where)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened = None


def _patiently(where: str, read: Callable[[], _T]) -> _T:
    """Call ``read``, and repeat the call after errors that may be temporary, such as those of a network disk.
    A missing file is not tried again. Raises BadCheckpoint."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return read()
        except OSError as error:
            why = f"{where} cannot be read: {error.strerror or error}"
            if isinstance(error, FileNotFoundError):
                raise BadCheckpoint(why) from error
            if time.monotonic() > until:
                raise Unreadable(why) from error
        time.sleep(_AGAIN_S)


def _read_exactly(opened: Opened, into: memoryview, at: int, where: str) -> None:
    """Fill ``into`` from ``at`` on. Raises OSError; raises BadCheckpoint if the file ends early."""
    while into:
        read = opened.read_into(into, at)
        if not read:
            raise BadCheckpoint(f"{where} ends early, at byte {at}")
        into, at = into[read:], at + read


def _wrong(manifest: Manifest, file: File, number: int) -> str:
    """Return a sentence about a damaged block, with the names of its tensors."""
    start = number * manifest.block
    end = start + manifest.block
    index = next((n for n, f in enumerate(manifest.files) if f is file), -1)
    places = sorted(
        (chunk.item, key, chunk.item + chunk.length)
        for key, tensor in manifest.index.tensors.items()
        for chunk in tensor.chunks
        if chunk.file == index
    )
    first = max(0, bisect_right([p[0] for p in places], start) - 1)
    keys = [key for item, key, last in places[first:] if item < end and last > start]
    held = f" (of {', '.join(keys[:3])}{' and others' if len(keys) > 3 else ''})" if keys else ""
    return f"{manifest.name}/{file.name} is damaged between bytes {start} and {min(end, file.size)}{held}"
