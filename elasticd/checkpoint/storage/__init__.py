"""Where checkpoints are kept: a protocol, and the choice between its two implementations.

``disk.Disk`` is a local or mounted folder. ``remote.Remote`` is a store that fsspec can write to: S3 and
similar stores, Google's and Azure's stores, SFTP, HDFS. File names are relative to the store, with ``/``
between parts.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Protocol

from elasticd.checkpoint.format.manifest import File
from elasticd.checkpoint.storage.disk import Disk
from elasticd.checkpoint.storage.rate_limit import RateLimit

_LOCAL = ("file", "local")


class Opened(Protocol):
    """A file that is read at random places, by one thread at a time."""

    def read_into(self, into: memoryview, at: int) -> int:
        """Read into ``into`` from ``at`` on, and return the bytes read: fewer only at the end. Raises
        OSError."""

    def close(self) -> None: ...


class CheckpointStore(Protocol):
    """A place for checkpoints. A write is durable once the call returns, except where a docstring says
    otherwise. All methods raise OSError with one clause for people as ``strerror``; FileNotFoundError if a
    file is missing."""

    @property
    def url(self) -> str:
        """The address for people, without secrets; a plain path if local."""

    @property
    def fenced(self) -> bool:
        """Whether ``over`` or ``locked`` keeps two concurrent writers of a file from undoing each other's
        change, on any host. The value is certain only after a conditional ``replace``."""

    @property
    def poll_s(self) -> float:
        """Seconds between two listings that look for other writers' files: a store sends no notifications."""

    def write(self, name: str, content: memoryview, pace: RateLimit | None = None) -> File:
        """Write a new file, with its missing parent folders, and return its size and checksums. ``sync`` must
        follow for the folder. The checksums are computed from memory, so that an error on the way is
        detected."""

    def sync(self, folder: str) -> None:
        """Make the names of the files in a folder durable."""

    def replace(self, name: str, content: bytes, *, over: str | None = None) -> None:
        """Replace a file atomically. ``over``: a tag from ``look``, or "" for no file; if the file differs
        from that, raise Overtaken. Only S3 and similar stores compare; the others replace the file in any
        case."""

    def read(self, name: str) -> bytes:
        """Return the whole content of a small file."""

    def look(self, name: str) -> tuple[bytes, str | None]:
        """Return the content of a small file, and its tag for ``replace``."""

    def sizes(self, folder: str) -> Mapping[str, int]:
        """Return the sizes of the files in a folder, by name. May be empty if there is no such folder."""

    def files(self, folder: str) -> Collection[str]:
        """Return the names of the files in a folder, which on a disk is faster than their sizes. May be empty
        if there is no such folder."""

    def open(self, name: str) -> Opened: ...

    def names(self) -> Sequence[str]:
        """Return the names of the files and folders at the top."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content and its unfinished uploads. Files that cannot be
        removed stay."""

    def unlink(self, names: Iterable[str]) -> None:
        """Remove many files. Files that cannot be removed stay."""

    def locked(self, name: str) -> AbstractContextManager[object]:
        """Hold an exclusive lock. On disk, the lock excludes the other processes of this host, and of other
        hosts if the disk supports locks. Elsewhere it excludes only the other threads of this process. See
        ``replace``."""


class Overtaken(OSError):
    """Another process has written the file since ``look``."""


def error_text(error: BaseException) -> str:
    """Return an error in words, with the name of its file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) or repr(error)


class BadStore(ValueError):
    """An address of a store is not valid. The message is one sentence."""


def store_at(where: str | os.PathLike[str]) -> CheckpointStore:
    """Return the store at a path, or at a URL that fsspec knows, such as ``s3://bucket/folder``. The store
    itself is not touched, except that SFTP connects. Raises BadStore."""
    text = os.fspath(where)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadStore(f"{text!a} is not UTF-8: rename the folder for checkpoints") from None
    if "\0" in text:
        raise BadStore(f"{text!r} is not an address for checkpoints: it holds a NUL byte")
    scheme, colon, rest = text.partition("://")
    if not colon:
        return Disk(text)
    if "::" in text:
        raise BadStore(f"{text} names several stores; give one address")
    if not rest.strip("/"):
        raise BadStore(f"the address {text} names no folder; give one such as {scheme}://bucket/folder")
    who, at, host = rest.partition("@")
    if at and ":" in who:  # a secret may contain any character
        raise BadStore(
            f"the address {scheme}://...@{host} holds a secret; give the secret in the environment"
        )
    if scheme in _LOCAL:
        return Disk(f"/{rest.lstrip('/')}")
    return _remote(text.rstrip("/"), os.getpid())


@cache
def _remote(url: str, _: int) -> CheckpointStore:
    """Return the store of this process: a forked process cannot use its parent's connections."""
    # Imported here, since the import is slow and few runs need it.
    from elasticd.checkpoint.storage.remote import Remote

    return Remote.at(url)
