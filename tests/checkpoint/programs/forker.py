"""Forks savers: one for each line of JSON on stdin, with its options.

A saver prints its name and pid on stdout, and then a line for each event. ``fail``: [function of os, number
of calls that still work, how many fail then, errno]; the saver prints ``spoiled`` at each call that fails.
``record``: the saver prints ``opens``, ``syncs`` and ``renames``, each with the path. ``node``: the name of
its node among those that hold copies for each other; ``peers``: the folder with a file for each node. The
variable ``S3_PART`` is the size of the parts in which a file is sent to S3.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Any

import msgspec

from elasticd.checkpoint import protocol
from elasticd.checkpoint.replication.wire import PeerGone
from elasticd.checkpoint.server.replicating import Replication
from elasticd.checkpoint.server.save_report import SaveReport, sentence
from elasticd.checkpoint.server.saver import Saver
from elasticd.checkpoint.storage.rate_limit import RateLimit
from elasticd.core.facts import SaverAddress
from tests.checkpoint.programs.forking import fork_for_each_line, say

_open, _fsync, _rename = os.open, os.fsync, os.rename


def tell(report: SaveReport) -> None:
    if words := sentence(report):
        say(words)


def spoil(function: str, fine: int, bad: int, code: int) -> None:
    real, calls = getattr(os, function), 0

    def spoiled(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if fine < calls <= fine + bad:
            say(f"spoiled {function}")
            raise OSError(code, os.strerror(code), str(arguments[0]))
        return real(*arguments, **options)

    setattr(os, function, spoiled)


def record() -> None:
    def opened(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            say(f"opens {path}")
        return _open(path, flags, *rest, **options)

    def synced(fd: int) -> None:
        say(f"syncs {os.readlink(f'/proc/self/fd/{fd}')}")
        _fsync(fd)

    def renamed(old: Any, new: Any) -> None:
        say(f"renames {old} {new}")
        _rename(old, new)

    os.open, os.fsync, os.rename = opened, synced, renamed  # type: ignore[assignment]


class FilePeers:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, node: str) -> SaverAddress:
        try:
            return msgspec.json.decode((self._folder / node).read_bytes(), type=SaverAddress)
        except OSError as error:
            raise PeerGone(f"{node} is not known") from error

    def others(self) -> list[SaverAddress]:
        return [self.find(file.name) for file in self._folder.iterdir()]


def saver(options: dict[str, Any]) -> None:
    listener, name = protocol.listen()
    pace = RateLimit(options["bytes_s"]) if "bytes_s" in options else None
    linger_s = options.get("linger_s", 0.0)
    replication = None
    if "node" in options:
        at = socket.create_server(("127.0.0.1", 0))
        me = SaverAddress(options["node"], *at.getsockname(), secret=secrets.token_hex(16))
        (Path(options["peers"]) / me.node).write_bytes(msgspec.json.encode(me))
        replication = Replication(me, at, FilePeers(Path(options["peers"])), say=say)
    if "S3_PART" in os.environ:
        from elasticd.checkpoint.storage import remote

        remote.PART = int(os.environ["S3_PART"])
    say(f"saver {name} {os.getpid()}")
    if "fail" in options:
        spoil(*options["fail"])
    if "record" in options:
        record()
    Saver(listener, pace=pace, linger_s=linger_s, say=say, report=tell, replication=replication).serve()


fork_for_each_line(saver)
