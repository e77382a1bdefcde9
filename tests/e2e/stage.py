"""The stage: the workers of a test report their steps to it, and get orders from it."""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Script:
    """What a worker is to do. ``steps``: the steps before it ends well (None: for ever). ``on_sigterm``:
    "die", "save" (and end with 0) or "ignore"."""

    steps: int | None = None
    on_sigterm: str = "die"
    orders: tuple[dict[str, Any], ...] = ()


@dataclass(eq=False)
class Player:
    """One worker, as it introduced itself. Times are of the monotonic clock, which all processes share."""

    conn: socket.socket
    pid: int
    env: dict[str, str]
    argv: list[str]
    step: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    gone: bool = False
    heard: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pidfd = os.pidfd_open(self.pid)

    def __repr__(self) -> str:
        state = "gone" if self.gone else "here"
        return (
            f"<rank {self.rank}/{self.world} of round {self.round}: slot {self.slot} on {self.node}, "
            f"pid {self.pid}, step {self.step}, {state}>"
        )

    @property
    def job(self) -> str:
        return self.env["ELASTICD_JOB_NAME"]

    @property
    def node(self) -> str:
        return self.env["E2E_NODE"]

    @property
    def rank(self) -> int:
        return int(self.env["RANK"])

    @property
    def world(self) -> int:
        return int(self.env["WORLD_SIZE"])

    @property
    def round(self) -> int:
        return int(self.env["ELASTICD_ROUND"])

    @property
    def slot(self) -> int:
        return int(self.env["ELASTICD_SLOT"])

    @property
    def restarts(self) -> int:
        """Failures charged to the job before this worker started."""
        return int(self.env["TORCHELASTIC_RESTART_COUNT"])

    def did(self, what: str) -> list[dict[str, Any]]:
        return [m for m in self.heard if m["is"] == what]

    def tell(self, do: str, **fields: Any) -> None:
        """Give an order. A worker that has ended does not get the order."""
        try:
            self.conn.sendall(json.dumps({"do": do, **fields}).encode() + b"\n")
        except OSError:
            pass


class Stage:
    """Listens to all workers of a test in one thread. ``direct`` returns what each new worker is to do."""

    def __init__(self, changed: threading.Condition) -> None:
        self.name = f"elasticd-e2e-{uuid.uuid4().hex}"  # in the abstract namespace, so without a file
        self.players: list[Player] = []
        self.direct: Callable[[Player], Script] = lambda player: Script()
        self._changed = changed
        self._unread: dict[socket.socket, bytes] = defaultdict(bytes)
        self._of: dict[socket.socket, Player] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + self.name)
        self._listener.listen(128)
        self._stopped, self._stop = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stopped, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._stop)
        self._thread.join()
        os.close(self._stopped)
        self._listener.close()
        for conn in list(self._unread):
            conn.close()
        for player in self.players:
            os.close(player.pidfd)
        self._selector.close()

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._stopped:
                    return
                if key.fileobj is self._listener:
                    conn, _ = self._listener.accept()
                    self._unread[conn] = b""
                    self._selector.register(conn, selectors.EVENT_READ)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)

    def _read(self, conn: socket.socket) -> None:
        try:
            data = conn.recv(1 << 16)
        except ConnectionError:
            data = b""
        with self._changed:
            *lines, self._unread[conn] = (self._unread[conn] + data).split(b"\n")
            for line in lines:
                self._hear(conn, json.loads(line))
            if not data:
                self._selector.unregister(conn)
                if conn in self._of:
                    self._of[conn].gone = True
            self._changed.notify_all()

    def _hear(self, conn: socket.socket, message: dict[str, Any]) -> None:
        if message["is"] == "hello":
            self._greet(conn, message)
            return
        player = self._of.get(conn)
        if player is None:
            return
        if message["is"] == "step":
            player.step, player.last_at = message["step"], message["at"]
            player.first_at = player.first_at or message["at"]
        else:
            player.heard.append(message)

    def _greet(self, conn: socket.socket, hello: dict[str, Any]) -> None:
        try:
            player = Player(conn, hello["pid"], hello["env"], hello["argv"])
        except ProcessLookupError:  # the worker was killed as soon as it had connected
            return
        self._of[conn] = player
        self.players.append(player)
        script = self.direct(player)
        player.tell("begin", steps=script.steps, on_sigterm=script.on_sigterm)
        for order in script.orders:
            player.tell(**order)


def overlaps(players: list[Player]) -> list[tuple[Player, Player]]:
    """Return the workers of one job that made a step after a later round had begun to train. There must be
    none."""
    return [
        (old, new)
        for old in players
        for new in players
        if old.job == new.job and old.round < new.round and new.first_at and old.last_at > new.first_at
    ]
