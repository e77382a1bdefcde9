"""The local disk (or whatever is mounted): every write here is durable once it returns."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elasticd.checkpoint.manifest import BLOCK, File, block_digest, fresh_name
from elasticd.checkpoint.pace import RateLimit

_LARGE: Final = 1 << 20  # bytes


class Disk:
    """A folder as a ``CheckpointStore``."""

    look_s: Final = 0.1
    fenced: Final = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))

    @property
    def url(self) -> str:
        return str(self.path)

    def write(self, name: str, content: memoryview, pace: RateLimit | None = None) -> File:
        path = self.path / name
        make_folder(path.parent)
        return write_file(path, content, pace)

    def sync(self, folder: str) -> None:
        sync_folder(self.path / folder)

    def replace(self, name: str, content: bytes, *, over: str | None = None) -> None:
        del over  # there are locks
        make_folder((self.path / name).parent)
        replace_file(self.path / name, content)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def look(self, name: str) -> tuple[bytes, str | None]:
        return self.read(name), None

    def sizes(self, folder: str) -> dict[str, int]:
        with os.scandir(self.path / folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries}

    def open(self, name: str) -> OnDisk:
        return OnDisk(os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC))

    def names(self) -> list[str]:
        return os.listdir(self.path)

    def remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir():
            remove_folder(path)
        else:
            self.unlink([name])

    def unlink(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    def locked(self, name: str) -> AbstractContextManager[None]:
        make_folder(self.path)
        return locked(self.path / name)


@dataclass(frozen=True, slots=True)
class OnDisk:
    """An open file."""

    fd: int

    def read_into(self, into: memoryview, at: int) -> int:
        return os.preadv(self.fd, [into], at)

    def close(self) -> None:
        os.close(self.fd)


def make_folder(path: Path) -> None:
    """With those above it, and so that they are there after a power cut. It may be there."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, content: memoryview, pace: RateLimit | None = None) -> File:
    """A new file; returns what to check it by. Its folder is yet to be synced.

    The checksums are of what is in memory, so that nothing that goes wrong on the way to the disk
    or on it can be missed.
    """
    digests = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        past_cache = len(content) >= _LARGE and _go_past_cache(fd)
        for at in range(0, len(content), BLOCK):
            block = content[at : at + BLOCK]
            digests.append(block_digest(block))
            while block:
                try:
                    block = block[os.write(fd, block) :]
                except OSError as error:
                    if error.errno != errno.EINVAL or not past_cache:
                        raise
                    past_cache = _go_past_cache(fd, False)  # the end of the file is no whole page
            if pace is not None:
                pace.wrote(min(BLOCK, len(content) - at))
        os.fsync(fd)
    finally:
        os.close(fd)
    return File(path.name, len(content), digests)


def _go_past_cache(fd: int, on: bool = True) -> bool:
    """Have the disk fetch what is written from where it is, and no copy be kept for who may read it soon: it
    costs as much processor time as all the rest, and drives what the training reads out of memory. Returns
    whether it is so now: not every file system can."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | (os.O_DIRECT if on else 0))
    except OSError:
        return False
    return on


def replace_file(path: Path, content: bytes) -> None:
    """At once, for whoever reads it: the old content or the new."""
    fresh = path.with_name(fresh_name(path.name))
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    sync_folder(path.parent)


def settle(fresh: Path, path: Path) -> None:
    """Put a file that others wrote in its place, durably."""
    fd = os.open(fresh, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(fresh, path)
    sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """As far as that goes; what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One at a time, among the processes of this host (and of others, where the disk is shared and
    keeps locks). The lock is gone with the process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
