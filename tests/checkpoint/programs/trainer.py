"""Forks workers that resume and save without end: one for each line (JSON: path and saver) on stdin.

A worker says ``pid``, ``resumed STEP``, and ``handed STEP`` for each save.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch

from elasticd.worker.checkpoints import Checkpoints
from tests.checkpoint.faults import check, filled

torch.set_num_threads(1)


def say(sentence: str) -> None:
    os.write(1, f"{sentence}\n".encode())


def train(path: str) -> None:
    checkpoints = Checkpoints(path, last=2)
    state = filled(0)
    step = checkpoints.load(state) or 0
    check(state, step)
    say(f"resumed {step}")
    while True:
        step += 1
        if checkpoints.save(filled(step), step):
            say(f"handed {step} {max(checkpoints._pending, default='')}")


signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    order = json.loads(line)
    if not (pid := os.fork()):
        os.environ["ELASTICD_SAVER"] = order["saver"]
        try:
            say(f"pid {os.getpid()}")
            train(order["path"])
        except BaseException as error:
            say(f"error {error!r}")
        os._exit(1)
