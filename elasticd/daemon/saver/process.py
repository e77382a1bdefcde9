"""The saver process of an agent. The saver commits through etcd."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from elasticd.checkpoint.server.replication import Replication
from elasticd.checkpoint.server.save_report import Footprint, SaveReport, to_line
from elasticd.checkpoint.server.saver import Saver
from elasticd.checkpoint.server.standalone import lower_priority, say
from elasticd.checkpoint.store.rate_limit import RateLimit
from elasticd.core.facts import SaverAddress
from elasticd.daemon.saver import ADDRESS, OPTIONS
from elasticd.daemon.saver.etcd_peers import EtcdPeers
from elasticd.daemon.saver.etcd_pointer import EtcdPointer, settle
from elasticd.etcd.access import EtcdAccess
from elasticd.procs.linux import hide_memory


def access_of(said: Mapping[str, Any]) -> tuple[EtcdAccess, str]:
    """Return the access to etcd that the agent passed, and the job. The password comes over standard output,
    which is a socket."""
    password = None
    if said["username"]:
        hide_memory()
        password = json.loads(
            os.read(1, 1 << 16).splitlines()[-1]
        )  # an earlier saver may have left its line unread
    return EtcdAccess(
        tuple(said["endpoints"]),
        tls=said["tls"],
        cacert=Path(said["cacert"]) if said["cacert"] else None,
        cert=Path(said["cert"]) if said["cert"] else None,
        key=Path(said["key"]) if said["key"] else None,
        username=said["username"] or None,
        password=password,
        timeout_s=said["timeout_s"],
    ), said["job"]


def main() -> None:
    """Run the saver. Standard input is the socket to listen on."""
    lower_priority()
    options = json.loads(os.environ[OPTIONS])
    access, job = access_of(options)
    bytes_s = options["bytes_s"]
    listener = socket.socket(fileno=0)

    replication = None
    if ADDRESS in os.environ:
        me = msgspec.json.Decoder(SaverAddress).decode(os.environ[ADDRESS])
        replication = Replication(me, socket.socket(fileno=3), EtcdPeers(access, job), say=say)

    def tell(report: SaveReport | Footprint) -> None:
        with contextlib.suppress(OSError):  # the agent does not read, or has ended
            os.write(1, to_line(report))

    saver = Saver(
        listener,
        committer_of=lambda store: EtcdPointer(access, job, store, say=say),
        agent=options["agent"],
        pace=RateLimit(bytes_s) if bytes_s else None,
        linger_s=None,
        say=say,
        report=tell,
        occupies=tell,
        replication=replication,
    )
    signal.signal(signal.SIGTERM, lambda *_: saver.leave())
    with contextlib.suppress(OSError):
        os.write(1, b"\n")  # ready
    settle(access, job)
    saver.serve()
