"""A plain torchrun script that writes a snapshot every ten steps and reports it. SIGTERM kills the script.
Usage: snapshots.py FOLDER

Rank 0 writes each step that all have made to FOLDER/steps, with the world's size. The script ends, with a
last snapshot, once there is a FOLDER/stop.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elasticd import worker

EVERY, PACE_S = 10, 0.02
folder = Path(sys.argv[1])
snapshot = folder / "snapshot.pt"
dist.init_process_group("gloo")
first = dist.get_rank() == 0
step = torch.load(snapshot, weights_only=True)["step"] if snapshot.exists() else 0
stops = torch.zeros(1)
while not stops.item():
    time.sleep(PACE_S)  # the time of a step
    stops[0] = float(first and (folder / "stop").exists())
    dist.all_reduce(stops)
    step += 1
    if first:
        with (folder / "steps").open("a") as file:
            file.write(f"{dist.get_world_size()} {step}\n")
        if step % EVERY == 0 or stops.item():
            torch.save({"step": step}, folder / "snapshot.new")
            (folder / "snapshot.new").replace(snapshot)
            worker.checkpointed(snapshot)
dist.destroy_process_group()
