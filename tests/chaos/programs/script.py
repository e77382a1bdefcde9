"""A plain torchrun script: DistributedDataParallel with snapshots, and nothing of elasticd. It writes a
ledger. The samples of a step depend on the step's number alone.

A snapshot's name has its step, so that a late snapshot does not replace a newer one.
"""

import os
import random
import time
from pathlib import Path

import ledger
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES, BATCH, EVERY, KEPT = 192, 24, 5, 3
UNTIL = int(ledger.ALONE) if ledger.ALONE else None
torch.set_num_threads(1)
chance = torch.Generator().manual_seed(1)
inputs, wanted = torch.randn(SAMPLES, 12, generator=chance), torch.randn(SAMPLES, 4, generator=chance)
snapshots = Path(ledger.FOLDER) / "snapshots"


def newest():
    return max((int(path.stem) for path in snapshots.glob("*.pt")), default=0)


def save(step, model, optimizer):
    unfinished = snapshots / f"{step}.{os.getpid()}.tmp"
    with unfinished.open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(snapshots / f"{step}.pt")
    ledger.note("saved", step=step, **place)
    for path in snapshots.glob("*.pt"):
        if int(path.stem) <= newest() - KEPT * EVERY:
            path.unlink(missing_ok=True)


if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
place = {
    "round": int(os.environ.get("ELASTICD_ROUND", "0")),
    "rank": dist.get_rank(),
    "world": dist.get_world_size(),
}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
since = time.time()
where = torch.tensor([newest()])
dist.broadcast(where, 0)
step = int(where)
if step:
    found = torch.load(snapshots / f"{step}.pt", weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
replica = DistributedDataParallel(model)
ledger.note("entered", step=step, since=since, **place)
stops = torch.zeros(1)
while UNTIL is None or step < UNTIL:
    since = time.time()
    stops[0] = float(ledger.told_to_stop())
    dist.all_reduce(stops)
    if stops.item():
        break
    ledger.fail_if_told(place["rank"])
    time.sleep(ledger.STEP_S)
    epoch, first = divmod(step * BATCH, SAMPLES)
    order = random.Random(epoch).sample(range(SAMPLES), SAMPLES)
    used = order[first : first + BATCH][place["rank"] :: place["world"]]
    loss = (replica(inputs[used]) - wanted[used]).pow(2).sum() / (BATCH * 4) * place["world"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    ledger.note(
        "step",
        step=step,
        epoch=epoch,
        samples=used,
        digest=ledger.digest([*model.state_dict().values()]),
        since=since,
        **place,
    )
    if place["rank"] == 0 and step % EVERY == 0:
        save(step, model, optimizer)
ledger.note("ended", step=step)
dist.destroy_process_group()
