"""Forks worlds whose ranks are on several nodes, as far as savers go: one for each line of JSON on stdin.

``ranks``: for each rank the name of its node's saver, and the node's. ``path`` and ``store``: of the
checkpoints, and a file for the ranks to meet at. ``kind``: replicated or sharded. ``saves``: how many
steps to make and hand over then; 0: as many as it can until it is killed. Each is of ``filled``.

A rank says, a line each: ``pid RANK PID``, ``resumed RANK STEP TIER``, ``handed RANK STEP``, ``ended RANK``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

from elasticd.worker.checkpoints import Checkpoints
from tests.checkpoint.faults import check, state_of, whole

torch.set_num_threads(1)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def train(rank: int, order: dict[str, Any]) -> None:
    size = len(order["ranks"])
    dist.init_process_group("gloo", init_method=f"file://{order['store']}", rank=rank, world_size=size)
    checkpoints = Checkpoints(order["path"], last=2)
    state = state_of(0, order["kind"])
    step = checkpoints.load(state) or 0
    check(whole(state), step)
    say("resumed", rank, step, checkpoints.tier or "nothing")
    made = 0
    while made < order["saves"] or not order["saves"]:
        step += 1
        if checkpoints.save(state_of(step, order["kind"]), step):
            made += 1
            if order["saves"]:
                assert checkpoints.wait(60.0) and not checkpoints.failed, checkpoints.last_error
            say("handed", rank, step)
    checkpoints.close()
    dist.barrier()
    dist.destroy_process_group()
    say("ended", rank)


signal.signal(signal.SIGCHLD, signal.SIG_IGN)
children: set[int] = set()
for line in sys.stdin:
    asked = json.loads(line)
    for number, (saver, node) in enumerate(asked["ranks"]):
        if pid := os.fork():
            children.add(pid)
            continue
        os.environ |= {"ELASTICD_SAVER": saver, "ELASTICD_HOLDER": node}
        try:
            say("pid", number, os.getpid())
            train(number, asked)
        except BaseException as error:
            say("error", number, repr(error))
        os._exit(0)
for pid in children:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
