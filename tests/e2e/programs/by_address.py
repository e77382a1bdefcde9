"""Joins at the address that it is given, as programs did before torchrun: ``--init-method tcp://HOST:PORT``."""

import argparse
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--init-method", required=True)
parser.add_argument("--fail-first", action="store_true")
args = parser.parse_args()

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=args.init_method, rank=rank, world_size=world)
total = torch.ones(1)
dist.all_reduce(total)
if args.fail_first and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise SystemExit(3)
dist.barrier()
print(f"rank {rank} counted {int(total)}", flush=True)
