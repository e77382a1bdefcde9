"""A worker under torchrun: prints its world, and trains until a file exists."""

import os
import sys
import time

import torch
import torch.distributed as dist

mode, stop = sys.argv[1:3]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"<joined rank={rank} world={world} pid={os.getpid()} attempt={attempt}>", flush=True)
dist.barrier()

if mode == "crash" and attempt < int(sys.argv[3]):
    if rank == world - 1:
        os.kill(os.getpid(), 9)
    dist.barrier()

while True:
    done = torch.tensor([int(rank == 0 and os.path.exists(stop))])
    if mode == "alone":  # a worker that does not notice that the others have ended
        done[0] = int(os.path.exists(stop))
    else:
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert int(ones) == world
        dist.broadcast(done, 0)
    if done:
        break
    time.sleep(0.02)
print(f"<finished rank={rank} world={world}>", flush=True)
dist.destroy_process_group()
