"""Object storage and whatever else fsspec writes to: large files in parts, retried by its libraries.

Who may write there is told by the environment (AWS_ACCESS_KEY_ID and its like, roles, files in the home
folder), as each library has it; nothing of it is read here, logged or sent.
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

from elasticd.checkpoint.manifest import BLOCK, File, block_digest, fresh_name
from elasticd.checkpoint.pace import RateLimit
from elasticd.checkpoint.store import BadStore, Overtaken

PART: Final = 16 << 20  # bytes; at most 10,000 parts to a file on S3, so files up to 160 GB
_PARTS_MAX: Final = 9_000
_FLAT: Final = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "cos", "memory"}  # no folders

_OVERTAKEN: Final = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}
_NO_CONDITIONS: Final = {"NotImplemented", "501", "ParamValidationError"}  # of a server or client that is old


class Remote:
    """A folder of fsspec's as a ``CheckpointStore``. ``root``: as the file system itself names it."""

    look_s: Final = 1.0

    def __init__(self, fs: Any, root: str, url: str, *, flat: bool = True) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self.url = url
        self._flat = flat
        self.fenced = self._is_s3
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    @classmethod
    def at(cls, url: str) -> Remote:
        """Nothing is touched yet. Raises BadStore where fsspec knows no such address, or the package
        for it is not installed."""
        scheme = url.partition("://")[0]
        try:
            # Of listings that are remembered, those of others' writes would be wrong.
            fs, root = fsspec.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            extra = f": pip install 'elasticd[{scheme}]'" if scheme == "s3" else f" ({_clause(error)})"
            raise BadStore(f"what writes to {scheme}:// is not installed{extra}") from error
        except (ValueError, TypeError, OSError) as error:
            raise BadStore(f"{url} is no address to keep checkpoints at: {_clause(error)}") from error
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
        """What is written is there, in such a store."""

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
        with self._plainly(name):  # in this order: what is newer than its tag replaces nothing
            tag = str(self._fs.info(self._at(name))["ETag"])
        return self.read(name), tag

    def sizes(self, folder: str) -> dict[str, int]:
        with self._plainly(folder):
            entries = self._fs.ls(self._at(folder), detail=True)
        return {e["name"].rpartition("/")[2]: e["size"] for e in entries if e["type"] == "file"}

    def open(self, name: str) -> _Ranges:
        return _Ranges(self, name)

    def names(self) -> list[str]:
        entries = []
        with contextlib.suppress(FileNotFoundError), self._plainly(""):
            entries = self._fs.ls(self._root, detail=False)
        found = {str(entry).rstrip("/").rpartition("/")[2] for entry in entries}
        # What was begun in parts and never finished shows nowhere else, and is paid for.
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
        """So many bytes of a file. Raises OSError."""
        with self._plainly(name):
            return bytes(self._fs.cat_file(self._at(name), start=at, end=at + length))

    def _put(self, name: str, content: bytes, over: str | None) -> None:
        """Raises Overtaken, and whatever the library does."""
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
                raise Overtaken(errno.EEXIST, "somebody else has written it meanwhile") from error
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
        """Uploads in parts below our folder that are not finished: key and id."""
        if not hasattr(self._fs, "list_multipart_uploads"):
            return []
        try:
            found = self._fs.list_multipart_uploads(self._bucket)
        except Exception:  # noqa: BLE001  who may write need not have the right to ask
            return []
        return [(u["Key"], u["UploadId"]) for u in found if u["Key"].startswith(f"{self._key}/")]

    @contextlib.contextmanager
    def _plainly(self, name: str) -> Iterator[None]:
        """Each library has errors of its own; here they are OSErrors with a clause for people."""
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
    """A file of which parts are asked for."""

    store: Remote
    name: str

    def read_into(self, into: memoryview, at: int) -> int:
        found = self.store.cut_out(self.name, at, len(into))
        into[: len(found)] = found
        return len(found)

    def close(self) -> None:
        """There is nothing open."""


def _give_up(out: Any) -> None:
    """Closing it would finish the file, whatever is in it."""
    with contextlib.suppress(Exception):
        out.discard()
    if isinstance(out, AbstractBufferedFile):
        out.closed = True  # or it is finished when it is forgotten


def _code(error: Exception) -> int:
    """Whether trying again can help is what people need to know."""
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
        return errno.EACCES
    if isinstance(error, ValueError | TypeError) or getattr(error, "errno", 0) in (errno.EINVAL, errno.EPERM):
        return errno.EINVAL
    return errno.EIO


def _clause(error: BaseException) -> str:
    """The first line of what a library says, such that it can end a sentence of ours."""
    said = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip()
    first = said.splitlines()[0].rstrip(".")
    return first if len(first) <= 300 else f"{first[:300]}..."
