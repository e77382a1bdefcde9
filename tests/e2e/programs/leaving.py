"""A plain torchrun script that saves when SIGTERM asks it to leave, and at its end. Usage: leaving.py FOLDER
HOW

HOW: with "own" the script writes files of its own and reports them; with "checkpoints" it calls
worker.Checkpoints. Once one rank is asked to leave, all leave after the same step. Rank 0 writes each step
that all have made to FOLDER/steps, with the world's size, and the step after which it leaves to FOLDER/left.
The script ends once there is a FOLDER/stop.
"""

import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elasticd import worker

PACE_S = 0.02
folder, own = Path(sys.argv[1]), sys.argv[2] == "own"
file = folder / "snapshot.pt"
asked: list[int] = []


def save() -> None:
    if own:
        if first:
            torch.save({"step": step}, folder / "snapshot.new")
            (folder / "snapshot.new").replace(file)
            worker.checkpointed(file)
        return
    checkpoints.wait()  # otherwise this save may be left out, if the disk is slow
    if not checkpoints.save(state | {"step": step}, step) or not checkpoints.wait() or checkpoints.failed:
        sys.exit(f"step {step} was not saved: {checkpoints.last_error}")


signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
dist.init_process_group("gloo")
first = dist.get_rank() == 0
state = {"w": torch.zeros(1000), "step": 0}
if own:
    step = torch.load(file, weights_only=True)["step"] if file.exists() else 0
else:
    checkpoints = worker.Checkpoints()
    step = checkpoints.load(state) or 0
leaves, ends = False, False
while not leaves and not ends:
    time.sleep(PACE_S)  # the time of a step
    said = torch.tensor([float(bool(asked)), float(first and (folder / "stop").exists())])
    dist.all_reduce(said)
    leaves, ends = map(bool, said.tolist())
    step += 1
    if first:
        with (folder / "steps").open("a") as made:
            made.write(f"{dist.get_world_size()} {step}\n")
        print("made a step in a world of", dist.get_world_size(), flush=True)
save()
if first:
    with (folder / "left").open("a") as left:
        left.write(f"{step}\n")
dist.destroy_process_group()
sys.exit(0 if ends else 128 + signal.SIGTERM)
