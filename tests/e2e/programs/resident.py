"""A worker that keeps its process from round to round, and reports every step that it commits to the test.
What it learns depends on the number of the step and not on the world, so all worlds together are one
training."""

import atexit
import contextlib
import importlib
import json
import os
import select
import socket
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from elasticd import worker

STEP_S = 0.02
if "NEWS_S" in os.environ:
    importlib.import_module("elasticd.worker.run").NEWS_S = float(os.environ["NEWS_S"])


class Stage:
    """``last``: the step after which all workers are to stop, once it is known."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect("\0" + os.environ["E2E_STAGE"])
        self.unread = b""
        self.last: int | None = None
        self.deaf = False
        self.tell("hello", pid=os.getpid(), argv=[], env=dict(os.environ))

    def tell(self, what: str, **fields: object) -> None:
        line = json.dumps({"is": what, "at": time.monotonic(), **fields})
        self.socket.sendall(line.encode() + b"\n")

    def heed(self, patience_s: float) -> None:
        if select.select([self.socket], [], [], patience_s)[0]:
            data = self.socket.recv(65536)
            if not data:
                os._exit(70)
            *lines, self.unread = (self.unread + data).split(b"\n")
            for order in map(json.loads, lines):
                if order["do"] == "stop_after":
                    self.last = order["step"]
                elif order["do"] == "go_wrong":
                    raise ValueError(order["text"])
                elif order["do"] == "swallow_everything":
                    self.deaf = True
                    self.tell("deaf")
                elif order["do"] == "sleep":
                    self.tell("sleeping")
                    time.sleep(order["seconds"])
                elif order["do"] == "dwell":
                    self.tell("dwelling")
                    self.await_order()
                elif order["do"] == "lose_the_others":
                    lose_connections()
                elif order["do"] == "never_end":
                    atexit.register(threading.Event().wait)

    def await_order(self) -> None:
        """Wait for an order in the script's own code."""
        select.select([self.socket], [], [])


def lose_connections() -> None:
    """Shut all connections, as a network does that forgets them."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if found.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                found.shutdown(socket.SHUT_RDWR)


stage = Stage()
print(f"this is process {os.getpid()}", flush=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
optimizer = torch.optim.AdamW(model.parameters())


def make(state: worker.State, step: int) -> None:
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    loss = (state.model(batch) - batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    worker.report(loss=loss, samples=len(batch), twice=2 * step)
    try:
        state.commit()
    finally:
        if state.step > step:  # the step is reported even if the world ends with this commit
            stage.tell(
                "committed",
                step=step,
                loss=loss.item(),
                rank=worker.rank(),
                world=worker.world_size(),
                round=int(os.environ["ELASTICD_ROUND"]),
            )
    stage.heed(STEP_S)


@worker.run
def train(state: worker.State) -> None:
    stage.tell("entered", round=int(os.environ["ELASTICD_ROUND"]), step=state.step, world=worker.world_size())
    if os.environ["ELASTICD_UNIT"] != "1":
        mesh = worker.mesh()
        ranks = {name: torch.zeros(worker.world_size()) for name in ("replicate", "unit")}
        for name, seen in ranks.items():
            seen[worker.rank()] = 1
            dist.all_reduce(seen, group=mesh.get_group(name))
        stage.tell("meshed", **{name: seen.nonzero().flatten().tolist() for name, seen in ranks.items()})
    for step in state.steps(1_000_000):
        if stage.last is not None and step > stage.last:
            break
        make(state, step)
        while stage.deaf:
            try:
                make(state, state.step)
            except:  # noqa: E722
                stage.tell("swallowed")


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


if "REDUNDANCY" in os.environ:
    redundancy = int(os.environ["REDUNDANCY"])
    train(worker.State(model=model, optimizer=optimizer, shard=shard, redundancy=redundancy))
else:
    train(worker.State(model=model, optimizer=optimizer))
