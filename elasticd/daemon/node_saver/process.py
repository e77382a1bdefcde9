"""The saver process of an agent. The saver commits through etcd."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from dataclasses import replace

from elasticd.checkpoint.server.replicating import Replication
from elasticd.checkpoint.server.save_report import Footprint, SaveReport, to_line
from elasticd.checkpoint.server.saver import Saver
from elasticd.checkpoint.server.standalone import lower_priority, say
from elasticd.checkpoint.storage.rate_limit import RateLimit
from elasticd.daemon.node_saver import VARIABLE, SaverOptions
from elasticd.daemon.node_saver.etcd_peers import EtcdPeers
from elasticd.daemon.node_saver.etcd_pointer import EtcdPointer, settle
from elasticd.procs.linux import hide_memory


def _options() -> SaverOptions:
    """The options that the agent passed. The password comes over standard output, which is a socket."""
    options = SaverOptions.decoded(os.environ[VARIABLE])
    if options.access.username is None:
        return options
    hide_memory()
    said = os.read(1, 1 << 16).splitlines()[-1]  # an earlier saver may have left its line unread
    return replace(options, access=replace(options.access, password=json.loads(said)))


def main() -> None:
    """Run the saver. Standard input is the socket to listen on."""
    lower_priority()
    options = _options()
    access, job = options.access, options.job
    listener = socket.socket(fileno=0)

    replication = None
    if options.address is not None:
        replication = Replication(options.address, socket.socket(fileno=3), EtcdPeers(access, job), say=say)

    def tell(report: SaveReport | Footprint) -> None:
        with contextlib.suppress(OSError):  # the agent does not read, or has ended
            os.write(1, to_line(report))

    saver = Saver(
        listener,
        committer_of=lambda store: EtcdPointer(access, job, store, say=say),
        agent=options.agent,
        pace=RateLimit(options.bytes_s) if options.bytes_s else None,
        linger_s=None,
        say=say,
        report=tell,
        occupies=tell,
        replication=replication,
    )
    signal.signal(signal.SIGTERM, lambda *_: saver.leave())
    with contextlib.suppress(OSError):
        os.write(1, b"\n")  # ready
    # In a thread, since the folder that etcd names may be on a disk that hangs, and may not be this run's.
    threading.Thread(target=settle, args=(access, job, say), name="settle", daemon=True).start()
    saver.serve()
