"""Makes calls of an agent's saver instants at which processes may be killed. Python imports this module by
itself where the module is on the path; in other processes it does nothing."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
from typing import Any

if any("elasticd.daemon.node_saver" in word for word in sys.orig_argv):
    import instants

    from elasticd.etcd.blocking_client import Client

    WHO = f"saver@{os.environ['E2E_NODE']}"

    def around(owner: Any, name: str, event: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            instants.instant(WHO, event)
            done = real(*arguments, **options)
            instants.instant(WHO, f"after {event}")
            return done

        setattr(owner, name, call)

    def write(fd: int, content: Any, real: Any = os.write) -> int:
        """An instant in the middle of a write."""
        order = instants.armed(WHO, "write") if stat.S_ISREG(os.fstat(fd).st_mode) else None
        if order is None:
            return int(real(fd, content))
        some = int(len(content) * order["part"])
        if some:
            real(fd, content[:some])
        instants.fire(order)
        return some or int(real(fd, content))

    def sendall(self: socket.socket, content: Any, real: Any = socket.socket.sendall) -> None:
        """An instant in the middle of what is sent to another node's saver."""
        order = instants.armed(WHO, "send") if self.family == socket.AF_INET else None
        some = int(len(content) * order["part"]) if order is not None else 0
        if order is not None:
            real(self, content[:some])
            instants.fire(order)
        real(self, content[some:])

    os.write = write
    socket.socket.sendall = sendall  # type: ignore[method-assign, assignment]
    around(os, "fsync", "fsync")
    around(os, "rename", "rename")
    around(os, "mkdir", "mkdir")
    around(shutil, "rmtree", "remove")
    around(Client, "transact", "transact")
    instants.tell("saver")
