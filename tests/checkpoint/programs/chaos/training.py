"""A training that saves each step and never ends: every byte of its state says its step. The state is
replicated in one round and sharded in the next. Its copies and its messages to the saver are instants at
which processes may be killed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[4])]
import instants  # noqa: E402

from elasticd.channel.framing import Channel  # noqa: E402
from elasticd.checkpoint.protocol import SaverChannel, WorkerToSaver  # noqa: E402
from elasticd.worker import Checkpoints, rank  # noqa: E402
from tests.checkpoint.faults import check, state_of, whole  # noqa: E402

STEP_S = 0.03
torch.set_num_threads(1)
dist.init_process_group("gloo")
WHO = f"worker@{os.environ['E2E_NODE']}.{os.environ['LOCAL_RANK']}"


def send(
    self: SaverChannel, message: WorkerToSaver, *more: Any, real: Any = Channel.send, **options: Any
) -> None:
    instants.instant(WHO, f"say {type(message).__name__}")
    real(self, message, *more, **options)
    instants.instant(WHO, f"after say {type(message).__name__}")


def copy(into: list[Any], sources: list[Any], real: Any = torch._foreach_copy_) -> None:
    """An instant in the middle of a copy."""
    order = instants.armed(WHO, "copy")
    if order is not None:
        for place, source in zip(into, sources, strict=True):
            some = int(place.numel() * order["part"])
            place.view(-1)[:some].copy_(source.reshape(-1)[:some])
        instants.fire(order)
    real(into, sources)


Channel.send = send  # type: ignore[method-assign]
torch._foreach_copy_ = copy
kind = ("replicated", "sharded")[int(os.environ["ELASTICD_ROUND"]) % 2]
checkpoints = Checkpoints(last=2)
began = time.monotonic()
instants.tell("began", rank=rank(), world=dist.get_world_size(), round=int(os.environ["ELASTICD_ROUND"]))
state = state_of(0, kind)
step = checkpoints.load(state) or 0
try:
    check(whole(state), step)
except AssertionError as error:
    instants.tell("torn", why=f"step {step} from {checkpoints.tier}: {error!r}")
    raise
instants.tell("resumed", step=step, tier=checkpoints.tier or "nothing", rank=rank(), since=began)
while True:
    step += 1
    time.sleep(STEP_S)  # the duration of a step
    checkpoints.save(state_of(step, kind), step)
