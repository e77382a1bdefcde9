"""Where checkpoints are: one small port, and two edges of it.

``disk.Disk`` is a folder of this machine, or mounted there; ``remote.Remote`` is whatever fsspec writes
to: S3 and its like, Google's and Azure's stores, SFTP, HDFS. Files are named relative to the store,
with ``/`` between.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Protocol

from elasticd.checkpoint.disk import Disk
from elasticd.checkpoint.manifest import File
from elasticd.checkpoint.pace import RateLimit

_LOCAL = ("file", "local")


class Opened(Protocol):
    """A file that is read here and there, by one thread at a time."""

    def read_into(self, into: memoryview, at: int) -> int:
        """Bytes read, from ``at`` on; less than wanted only at the end. Raises OSError."""

    def close(self) -> None: ...


class CheckpointStore(Protocol):
    """Whatever is written is durable once the call returns, where not said otherwise. All raise OSError,
    whose ``strerror`` is one clause for people; FileNotFoundError where that is all."""

    @property
    def url(self) -> str:
        """How people call it; a plain path where it is a local one. It holds no secrets."""

    @property
    def fenced(self) -> bool:
        """Whether of two that replace a file at one moment, by ``over`` or ``locked``, neither undoes what
        the other did, wherever they run. Known for sure once something has been replaced so."""

    @property
    def look_s(self) -> float:
        """How often to look for what others write here, which nobody tells."""

    def write(self, name: str, content: memoryview, pace: RateLimit | None = None) -> File:
        """A new file, in folders that may be missing; returns what to check it by. Its folder is yet
        to be synced. The checksums are of what is in memory, so that nothing that goes wrong on the
        way can be missed."""

    def sync(self, folder: str) -> None:
        """The names of the files in it are durable too."""

    def replace(self, name: str, content: bytes, *, over: str | None = None) -> None:
        """At once, for whoever reads it: the old content or the new. ``over``: only if the old is what
        ``look`` returned with that, or if there is none (""); raises Overtaken otherwise. Only S3 and its
        like can tell; elsewhere it is replaced all the same."""

    def read(self, name: str) -> bytes:
        """All of a small file."""

    def look(self, name: str) -> tuple[bytes, str | None]:
        """The same, and what ``replace`` knows it by."""

    def sizes(self, folder: str) -> Mapping[str, int]:
        """Of the files in a folder, by name. May be empty where there is no such folder."""

    def open(self, name: str) -> Opened: ...

    def names(self) -> Sequence[str]:
        """Of the files and folders at the top."""

    def remove(self, name: str) -> None:
        """A file, or a folder with all there is in it, and what was begun there; as far as that goes:
        what cannot be removed stays."""

    def unlink(self, names: Iterable[str]) -> None:
        """Files, many at once; as far as that goes."""

    def locked(self, name: str) -> AbstractContextManager[object]:
        """One at a time, as far as the store can tell: on disk among the processes of this host (and of
        others, where the disk keeps locks), elsewhere among the threads of this process: see ``replace``."""


class Overtaken(OSError):
    """Somebody else has written it since it was looked at."""


def told(error: BaseException) -> str:
    """An error in words, with the file that it is about."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) or repr(error)


class BadStore(ValueError):
    """There can be no store at such an address. The message is one sentence."""


def store_at(where: str | os.PathLike[str]) -> CheckpointStore:
    """``where``: a path, or an URL that fsspec knows, such as ``s3://bucket/folder``. Nothing is
    touched yet. Raises BadStore."""
    text = os.fspath(where)
    scheme, colon, rest = text.partition("://")
    if not colon:
        return Disk(text)
    if "::" in text:
        raise BadStore(f"{text} names several stores; give the one that is written to")
    if not rest.strip("/"):
        raise BadStore(f"the address {text} names no place, such as {scheme}://bucket/folder")
    who, at, host = rest.partition("@")
    if at and ":" in who:  # a secret may have any letter in it
        raise BadStore(
            f"the address {scheme}://...@{host} holds a secret, which belongs into the environment"
        )
    if scheme in _LOCAL:
        return Disk(f"/{rest.lstrip('/')}")
    return _remote(text.rstrip("/"), os.getpid())


@cache
def _remote(url: str, _: int) -> CheckpointStore:
    """One for each process: what is open there does not live on in forked ones."""
    from elasticd.checkpoint.remote import Remote  # late: only who needs it pays for it

    return Remote.at(url)
