"""Forks the ranks of worlds, which may be on several nodes as far as savers go: a rank for each line of JSON
on stdin.

``rank`` and ``size``: of the rank and its world. ``saver`` and ``node``: the names of its node's saver and
of its node. ``path`` and ``store``: of the checkpoints, and of a file where the ranks of a world of several
meet. ``kind``: replicated or sharded. ``saves``: how many steps to make and hand over; 0: as many as it can
until it is killed. The states are those of ``state_of``.

A rank says, a line each: ``pid RANK PID``, ``resumed RANK STEP TIER``, ``handed RANK STEP NAME``,
``ended RANK``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from elasticd.worker.checkpoints import Checkpoints
from tests.checkpoint.faults import check, state_of, whole
from tests.checkpoint.programs.forking import fork_for_each_line, say

torch.set_num_threads(1)


def train(order: dict[str, Any]) -> None:
    rank, size, kind = order["rank"], order["size"], order["kind"]
    os.environ |= {"ELASTICD_SAVER": order["saver"], "ELASTICD_HOLDER": order["node"]}
    say("pid", rank, os.getpid())
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{order['store']}", rank=rank, world_size=size)
    checkpoints = Checkpoints(order["path"], last=2)
    state = state_of(0, kind)
    step = checkpoints.load(state) or 0
    check(whole(state), step)
    say("resumed", rank, step, checkpoints.tier or "nothing")
    made = 0
    while made < order["saves"] or not order["saves"]:
        step += 1
        if checkpoints.save(state_of(step, kind), step):
            made += 1
            name = max(checkpoints._pending, default="")
            if order["saves"]:
                assert checkpoints.wait(60.0) and not checkpoints.failed, checkpoints.last_error
            say("handed", rank, step, name)
    checkpoints.close()
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
    say("ended", rank)


fork_for_each_line(train)
