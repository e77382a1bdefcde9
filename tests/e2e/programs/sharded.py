"""Trains an FSDP2 model and saves every step, as a plain torchrun script: it is started again after a
failure. Usage: sharded.py FOLDER STEPS STEP

Once, after STEP, rank 1 kills its agent. At each start each rank writes the step, the tier of the checkpoint
and the world to FOLDER/began-RANK. Rank 0 writes the losses.
"""

import os
import signal
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from elasticd import worker

folder, steps, fatal = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 8))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
checkpoints = worker.Checkpoints(folder / "run", last=2)
step = checkpoints.load(state) or 0
with open(folder / f"began-{dist.get_rank()}", "a") as file:
    file.write(f"{step} {checkpoints.tier or 'nothing'} {dist.get_world_size()}\n")
while step < steps:
    torch.manual_seed(step)
    loss = model(torch.randn(4, 64)).square().mean()  # the same on all ranks, and so are the gradients
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    checkpoints.save(state, step)
    assert checkpoints.wait(60.0)
    if dist.get_rank() == 0:
        with open(folder / "losses", "a") as file:
            file.write(f"{step} {loss.item():.9g}\n")
    if step == fatal and not (folder / "killed").exists():
        dist.barrier()  # all ranks have come here
        if dist.get_rank() == 1:
            (folder / "killed").touch()
            # the process that the warden is a child of
            os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
            signal.pause()
        dist.barrier()  # wait for all ranks a last time
checkpoints.close()
dist.destroy_process_group()
