"""A training in consistent mode. A schedule says when it waits for worlds and when workers have accidents. At
its end it reports the results.

argv: "digits" or "gpt", and a folder. The folder has ``digits.npz`` and ``schedule.json``. The schedule has
"waits" (after so many steps, wait for a world of a certain size) and "accidents" (at a certain point, the
worker of a certain rank dies, stops or falls asleep).
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from elasticd import worker

ROOT = Path(__file__).parents[3]
VIRTUAL_RANKS = 8
SLICE_S = 0.02  # the time between two looks at the world while the worker waits

kind, folder = sys.argv[1], Path(sys.argv[2])
schedule = json.loads((folder / "schedule.json").read_text()) if (folder / "schedule.json").exists() else {}
stage = socket.socket(socket.AF_UNIX)
# its steps show the agent that no worker hangs while all wait for a world
beat = torch.optim.SGD([torch.zeros(1)])


def say(what: str, **fields: object) -> None:
    if "E2E_STAGE" in os.environ:
        line = json.dumps({"is": what, "at": time.monotonic(), **fields})
        stage.sendall(line.encode() + b"\n")


def digits() -> tuple[nn.Module, worker.Data, Any]:
    """Learn some hundred pictures of 8 by 8."""
    with np.load(folder / "digits.npz") as file:
        images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
    samples = list(zip(images, labels, strict=True))[:620]
    data = worker.Data(
        samples, global_batch=64, virtual_ranks=VIRTUAL_RANKS, consistent=True, seed=1, shuffle=True, epochs=3
    )
    return model, data, nn.functional.cross_entropy


def gpt() -> tuple[nn.Module, worker.Data, Any]:
    """Learn the sources of Python."""
    sys.path.insert(0, str(ROOT))
    from workers.gpt import GPT, Shape, read_text

    shape = Shape(layers=2, heads=2, width=32, context=32)
    text = read_text(Path(os.__file__).parent / "asyncio").train.long()[: 33 * 400].view(-1, 33)
    samples = [(row[:-1], row[1:]) for row in text]
    data = worker.Data(
        samples,
        global_batch=24,
        virtual_ranks=VIRTUAL_RANKS,
        accumulate=2,
        consistent=True,
        seed=1,
        shuffle=True,
        epochs=2,
    )
    return (
        GPT(shape),
        data,
        lambda logits, wanted: nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()),
    )


def accident(point: str, done: int) -> None:
    """Have the accident, at most once in the training, whichever worker comes to it."""
    for at, rank, where, what in schedule.get("accidents", ()):
        if (at, where) == (done, point) and worker.rank() == rank % worker.world_size():
            try:
                (folder / f"{what}-{at}-{where}").touch(exist_ok=False)
            except FileExistsError:
                continue
            if what == "sleep":
                time.sleep(3600)
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])


def wait_for_world(state: worker.State) -> None:
    """Wait until the job was scaled, and all workers are in a world of this size. Commit meanwhile,
    unchanged, since a world may end at a commit."""
    wanted = next((size for at, size, _ in schedule.get("waits", ()) if at == state.done), None)
    if wanted is None:
        return
    say("waits", done=state.done, wanted=wanted)
    while True:
        scaled = (folder / f"scaled-{state.done}").exists()
        go_on = torch.tensor([int(scaled and worker.world_size() == wanted)])
        dist.all_reduce(go_on, dist.ReduceOp.MIN)  # all workers, or none
        if go_on.item():
            return
        select.select([], [], [], SLICE_S)
        beat.step()
        state.commit()


@worker.run
def train(state: worker.State, loss_of: Any) -> None:
    say("entered", world=worker.world_size(), rank=worker.rank(), done=state.done)
    beat.step()
    wait_for_world(state)
    for step in state.steps():
        accident("begun", state.done)
        for i, (inputs, wanted) in enumerate(step):
            loss = loss_of(state.model(inputs), wanted)
            if i == 0:
                accident("forward", state.done)
            step.backward(loss)
        accident("summed", state.done)
        state.losses.append(step.loss.item())
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.schedule.step()
        state.done += 1
        accident("stepped", state.done - 1)
        state.commit()
        wait_for_world(state)


def digest(state: worker.State, model: nn.Module) -> str:
    """Return a digest of the weights, the buffers, the optimizer's state and all losses."""
    found = hashlib.sha256(json.dumps(state.losses).encode())
    tensors = [*model.state_dict().values()]
    tensors += [t for values in state.optimizer.state_dict()["state"].values() for t in values.values()]
    for tensor in tensors:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    if "E2E_STAGE" in os.environ:
        stage.connect("\0" + os.environ["E2E_STAGE"])
        say("hello", pid=os.getpid(), argv=[], env=dict(os.environ))
    torch.manual_seed(0)
    model, data, loss_of = {"digits": digits, "gpt": gpt}[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    state = worker.State(model=model, optimizer=optimizer, schedule=rates, data=data, done=0, losses=[])
    train(state, loss_of)
    result = {
        "done": state.done,
        "digest": digest(state, model),
        "first": state.losses[0],
        "last": state.losses[-1],
    }
    say("ended", **result)
    with (folder / f"{os.getpid()}.result").open("w") as file:
        json.dump(result, file)


main()
