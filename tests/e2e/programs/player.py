"""A worker that follows the test's orders, which come over a socket, and reports each of its steps to the
test. As a program it runs without torch, so that it starts fast. Its steps count as steps of an optimizer."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

STEP_S = 0.02


NAP = """
import os, time
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    time.sleep(3600)
"""


class Player:
    """``work``: the function that is called in each step."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.stage = socket.socket(socket.AF_UNIX)
        self.stage.connect("\0" + os.environ["E2E_STAGE"])
        self.unread = b""
        self.step = 0
        self.steps_max: int | None = None
        self.on_sigterm = "die"
        self.step_s = STEP_S

    def tell(self, what: str, **fields: Any) -> None:
        line = json.dumps({"is": what, "at": time.monotonic(), **fields})
        # The stage is gone, so the test is over: that is no failure.
        with contextlib.suppress(OSError):
            self.stage.sendall(line.encode() + b"\n")

    def heed(self, patience_s: float | None) -> None:
        """Follow the orders that have come. Wait for the first order at most that long."""
        if select.select([self.stage], [], [], patience_s)[0]:
            data = self.stage.recv(65536)
            if not data:
                os._exit(70)
            *lines, self.unread = (self.unread + data).split(b"\n")
            for line in lines:
                self.obey(json.loads(line))

    def obey(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "begin":
                self.steps_max, self.on_sigterm = order["steps"], order["on_sigterm"]
            case "finish":
                sys.exit(0)
            case "exit":
                sys.exit(order["code"])
            case "raise":
                self.go_wrong(order["text"])
            case "pace":
                self.step_s = order["step_s"]
            case "print":
                sys.stdout.write(order["text"])
                sys.stderr.write(order["error_text"])
            case "keep_thread":
                threading.Thread(target=signal.pause, daemon=True).start()
                self.tell("keeps_thread")
            case "leave_orphan":
                self.leave_orphan()

    def go_wrong(self, text: str) -> None:
        raise RuntimeError(text)

    def leave_orphan(self) -> None:
        """Leave a grandchild in a session of its own whose parent has ended: a kill of the process group
        misses it."""
        said = subprocess.Popen([sys.executable, "-S", "-c", NAP], stdout=subprocess.PIPE)
        assert said.stdout is not None
        pid = int(said.stdout.readline())
        said.wait()
        self.tell("orphan", pid=pid)

    def terminated(self, number: int, _: object) -> None:
        self.tell("asked", signal=number)
        if self.on_sigterm == "die":
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.on_sigterm == "save":
            self.tell("saved", step=self.step)
            os._exit(0)
        # else "ignore"

    def play(self) -> None:
        # An agent may ask a new worker to end before the stage has said what SIGTERM does.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.terminated)
        self.tell("hello", pid=os.getpid(), argv=sys.argv[1:], env=dict(os.environ))
        self.heed(None)
        while self.steps_max is None or self.step < self.steps_max:
            self.step += 1
            self.work()
            self.tell("step", step=self.step)
            self.heed(self.step_s)


if __name__ == "__main__":
    sys.path.insert(0, os.environ["E2E_FAKE_TORCH"])
    # The stand-in for torch of tests/procs. An import statement would tell the agent that the program uses
    # torch,
    # that the server of the rounds' stores would import torch ahead.
    torch_optimizer = importlib.import_module("torch.optim.optimizer")
    Player(torch_optimizer.Optimizer().step).play()
