"""Checkpoints on object storage, and on other stores that fsspec can write to. Large files go in parts;
fsspec's libraries retry failed requests.

The libraries take their credentials from the environment (AWS_ACCESS_KEY_ID and the like, roles, files in the
home folder). This module reads, logs and sends no credentials.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import fsspec
from fsspec.spec import AbstractBufferedFile

from elasticd.checkpoint.format.manifest import BLOCK, File, block_digest, fresh_name
from elasticd.checkpoint.storage import BadStore, Overtaken
from elasticd.checkpoint.storage.rate_limit import RateLimit

PART: Final = 16 << 20  # bytes; at most 10,000 parts to a file on S3, so files up to 160 GB
_PARTS_MAX: Final = 9_000
# Schemes of stores without folders.
_FLAT: Final = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "cos", "memory"}

_OVERTAKEN: Final = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}
# Errors of a server or a client that is too old for conditional writes.
_NO_CONDITIONS: Final = {"NotImplemented", "501", "ParamValidationError"}


class Remote:
    """An fsspec folder as a ``CheckpointStore``. ``root``: the folder's name in the file system."""

    poll_s: Final = 1.0

    def __init__(self, fs: Any, root: str, url: str, *, flat: bool = True) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self.url = url
        self._flat = flat
        self.fenced = self._is_s3
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    @classmethod
    def at(cls, url: str) -> Remote:
        """Return the store at ``url``. Only SFTP connects for that. Raises BadStore if fsspec does not know
        the scheme, if the package for the scheme is not installed, or if the connection fails."""
        scheme = url.partition("://")[0]
        try:
            # A cached listing would miss what other processes write.
            fs, root = fsspec.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            extra = f": pip install 'elasticd[{scheme}]'" if scheme == "s3" else f" ({_clause(error)})"
            raise BadStore(f"the package for {scheme}:// is not installed{extra}") from error
        except Exception as error:  # the library of the scheme may connect already, and has its own errors
            raise BadStore(f"{url} is not an address for checkpoints: {_clause(error)}") from error
        return cls(fs, root, url, flat=scheme in _FLAT)

    def write(self, name: str, content: memoryview, pace: RateLimit | None = None) -> File:
        digests = []
        part = max(PART, -(-len(content) // _PARTS_MAX))
        with self._plainly(name):
            self._make_folder_of(name)
            out = self._fs.open(self._at(name), "wb", block_size=part)
            try:
                for at in range(0, len(content), BLOCK):
                    block = content[at : at + BLOCK]
                    digests.append(block_digest(block))
                    out.write(block)
                    if pace is not None:
                        pace.wrote(len(block))
                out.close()
            except BaseException:
                _give_up(out)
                raise
            there = self._fs.info(self._at(name))["size"]
        if there != len(content):
            raise OSError(errno.EIO, f"{there} of {len(content)} bytes arrived", self._url(name))
        return File(name.rpartition("/")[2], len(content), digests)

    def sync(self, folder: str) -> None:
        """Do nothing: every write is durable when it returns."""

    def replace(self, name: str, content: bytes, *, over: str | None = None) -> None:
        with self._plainly(name):
            if self._flat:
                self._put(name, content, over if self._is_s3 else None)
                return
            self._make_folder_of(name)
            folder, slash, last = name.rpartition("/")
            fresh = self._at(f"{folder}{slash}{fresh_name(last)}")
            self._fs.pipe_file(fresh, content)
            self._fs.mv(fresh, self._at(name))

    def read(self, name: str) -> bytes:
        with self._plainly(name):
            return bytes(self._fs.cat_file(self._at(name)))

    def look(self, name: str) -> tuple[bytes, str | None]:
        if not self._is_s3:
            return self.read(name), None
        with self._plainly(name):  # tag first: if the content is newer, ``replace`` fails, which is safe
            tag = str(self._fs.info(self._at(name))["ETag"])
        return self.read(name), tag

    def sizes(self, folder: str) -> dict[str, int]:
        with self._plainly(folder):
            entries = self._fs.ls(self._at(folder), detail=True)
        return {e["name"].rpartition("/")[2]: e["size"] for e in entries if e["type"] == "file"}

    def files(self, folder: str) -> list[str]:
        return [*self.sizes(folder)]

    def open(self, name: str) -> _Ranges:
        return _Ranges(self, name)

    def names(self) -> list[str]:
        entries = []
        with contextlib.suppress(FileNotFoundError), self._plainly(""):
            entries = self._fs.ls(self._root, detail=False)
        found = {str(entry).rstrip("/").rpartition("/")[2] for entry in entries}
        # An unfinished upload in parts is in no other listing, and costs money.
        found |= {key[len(self._key) + 1 :].partition("/")[0] for key, _ in self._begun()}
        return sorted(found)

    def remove(self, name: str) -> None:
        with contextlib.suppress(Exception):
            self._fs.rm(self._at(name), recursive=True)
        for key, upload in self._begun():
            if key.startswith(f"{self._key}/{name}/"):
                with contextlib.suppress(Exception):
                    self._fs.abort_mpu(self._bucket, key, upload)

    def unlink(self, names: Iterable[str]) -> None:
        with contextlib.suppress(Exception):
            self._fs.rm([self._at(name) for name in names])

    def locked(self, name: str) -> AbstractContextManager[object]:
        return self._locks[name]

    def cut_out(self, name: str, at: int, length: int) -> bytes:
        """Return ``length`` bytes of a file, from ``at`` on. Raises OSError."""
        with self._plainly(name):
            return bytes(self._fs.cat_file(self._at(name), start=at, end=at + length))

    def _put(self, name: str, content: bytes, over: str | None) -> None:
        """Write a small file; ``over`` as for ``replace``. Raises Overtaken, and what the library raises."""
        condition = {} if over is None else {"IfMatch": over} if over else {"IfNoneMatch": "*"}
        try:
            self._fs.pipe_file(self._at(name), content, **condition)
        except Exception as error:
            answer = getattr(error.__cause__, "response", None) or {}
            code = answer.get("Error", {}).get("Code", type(error).__name__)
            if condition and code in _NO_CONDITIONS:
                self.fenced = False
                self._put(name, content, None)
            elif condition and code in _OVERTAKEN:
                raise Overtaken(errno.EEXIST, "another process has written the file meanwhile") from error
            else:
                raise

    # ------------------------------------------------------------ names and words

    @property
    def _is_s3(self) -> bool:
        return "s3" in self._fs.protocol

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _url(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    @property
    def _bucket(self) -> str:
        return self._root.partition("/")[0]

    @property
    def _key(self) -> str:
        return self._root.partition("/")[2]

    def _make_folder_of(self, name: str) -> None:
        if not self._flat:
            self._fs.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)

    def _begun(self) -> list[tuple[str, str]]:
        """Return the key and id of each unfinished upload in parts below this store's folder."""
        if not hasattr(self._fs, "list_multipart_uploads"):
            return []
        try:
            found = self._fs.list_multipart_uploads(self._bucket)
        except Exception:  # noqa: BLE001  a writer may lack the right to list uploads
            return []
        return [(u["Key"], u["UploadId"]) for u in found if u["Key"].startswith(f"{self._key}/")]

    @contextlib.contextmanager
    def _plainly(self, name: str) -> Iterator[None]:
        """Turn the errors of each library into OSErrors with a clause for people."""
        try:
            yield
        except Overtaken:
            raise
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, _clause(error), self._url(name)) from error
        except Exception as error:
            raise OSError(_code(error), _clause(error), self._url(name)) from error


@dataclass(frozen=True, slots=True)
class _Ranges:
    """A remote file that is read in ranges."""

    store: Remote
    name: str

    def read_into(self, into: memoryview, at: int) -> int:
        found = self.store.cut_out(self.name, at, len(into))
        into[: len(found)] = found
        return len(found)

    def close(self) -> None:
        """Do nothing: no resource is open."""


def _give_up(out: Any) -> None:
    """Abandon an unfinished file. ``close`` would finish the file, although its content is incomplete."""
    with contextlib.suppress(Exception):
        out.discard()
    if isinstance(out, AbstractBufferedFile):
        out.closed = True  # otherwise the garbage collector would close, and so finish, the file


def _code(error: Exception) -> int:
    """Return the errno that tells people whether a new try can help."""
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
        return errno.EACCES
    if isinstance(error, ValueError | TypeError) or getattr(error, "errno", 0) in (errno.EINVAL, errno.EPERM):
        return errno.EINVAL
    return errno.EIO


def _clause(error: BaseException) -> str:
    """Return the first line of a library's message, without its full stop, to end a sentence of ours."""
    said = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip()
    first = said.splitlines()[0].rstrip(".")
    return first if len(first) <= 300 else f"{first[:300]}..."
