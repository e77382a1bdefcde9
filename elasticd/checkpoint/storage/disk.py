"""Checkpoints on the local disk or a mounted file system: every write is durable when the call returns."""

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

from elasticd.checkpoint.format.manifest import BLOCK, File, block_digest, fresh_name
from elasticd.checkpoint.storage.rate_limit import RateLimit

# Errors of a file system that has no locks.
_NO_LOCKS: Final = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
_LARGE: Final = 1 << 20  # bytes; from this size on, files bypass the page cache


class Disk:
    """A folder as a ``CheckpointStore``."""

    poll_s: Final = 0.1
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
        sync(self.path / folder)

    def replace(self, name: str, content: bytes, *, over: str | None = None) -> None:
        del over  # not needed, since ``locked`` keeps writers apart
        make_folder((self.path / name).parent)
        replace_file(self.path / name, content)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def look(self, name: str) -> tuple[bytes, str | None]:
        return self.read(name), None

    def sizes(self, folder: str) -> dict[str, int]:
        with os.scandir(self.path / folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries}

    def files(self, folder: str) -> list[str]:
        return os.listdir(self.path / folder)

    def open(self, name: str) -> OnDisk:
        return OnDisk(os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC))

    def names(self) -> list[str]:
        return os.listdir(self.path)

    def remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
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
    """An open file of a ``Disk``."""

    fd: int

    def read_into(self, into: memoryview, at: int) -> int:
        return os.preadv(self.fd, [into], at)

    def close(self) -> None:
        os.close(self.fd)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents durably. The folder may exist already."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        sync(folder.parent)


def sync(path: Path) -> None:
    """Sync a file or a folder."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, content: memoryview, pace: RateLimit | None = None) -> File:
    """Write a new file, and return its size and checksums. The caller must sync the folder.

    The checksums are computed from memory, so that an error on the way to the disk or on the disk is
    detected.
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
                    # Direct I/O takes whole pages only, and the end of the file is not a whole page.
                    past_cache = _go_past_cache(fd, False)
            if pace is not None:
                pace.wrote(min(BLOCK, len(content) - at))
        os.fsync(fd)
    finally:
        os.close(fd)
    return File(path.name, len(content), digests)


def _go_past_cache(fd: int, on: bool = True) -> bool:
    """Switch direct I/O on or off, and return whether it is on: not every file system supports it. Writes
    through the page cache cost much processor time, and push data that the training reads out of memory."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | (os.O_DIRECT if on else 0))
    except OSError:
        return False
    return on


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably: a reader sees the old content or the new."""
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
    sync(path.parent)


def settle(fresh: Path, path: Path) -> None:
    """Sync a file that another process wrote, and rename it durably to ``path``."""
    sync(fresh)
    os.rename(fresh, path)
    sync(path.parent)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock among the processes of this host, and of other hosts where the shared file
    system supports locks; none if the file system has no locks at all, such as Lustre without ``-o flock``.
    The lock ends with the process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(fd)
