"""How long a worker waits for others, measured in a process of its own: nothing is left patched here."""

from __future__ import annotations

import json
import subprocess
import sys

from elasticd.procs.page import BOOT_DIR

PROGRAM = """
import json, sys, threading, time
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
from elasticd_waits import Waits

LATE_S = 0.5
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
wrapped = torch.nn.parallel.DistributedDataParallel(model)
late = False

def hook(_, bucket):
    # What the others add may come late: that is what DistributedDataParallel waits for.
    future = torch.futures.Future()
    done = lambda: future.set_result(bucket.buffer())
    threading.Timer(LATE_S, done).start() if late else done()
    return future

hook.__annotations__.clear()
wrapped.register_comm_hook(None, hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
waits = Waits()
waits.follow(optimizer)
waits.follow(optimizer)  # as after each round's first step

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x
    @staticmethod
    def backward(ctx, grad):
        time.sleep(LATE_S)  # its own work
        return grad

def step(slow=False):
    before = waits.count, waits.total_ns
    x = model[2](Slow.apply(model[1](model[0](torch.ones(2, 8))))) if slow else None
    loss = wrapped(torch.ones(2, 8)).sum()
    (loss if x is None else loss + 0 * x.sum()).backward()
    optimizer.step(); optimizer.zero_grad()
    return waits.count - before[0], (waits.total_ns - before[1]) / 1e9

step()
usual = step()
late = True
waited = step()
late = False
own = step(slow=True)
before = waits.count
dist.all_reduce(torch.ones(1))
dist.all_reduce(torch.ones(1), async_op=True).wait()
elsewhere = threading.Thread(target=lambda: dist.barrier())
elsewhere.start(); elsewhere.join()
seen = {"usual": usual, "waited": waited, "own": own, "collectives": waits.count - before}
print(json.dumps(seen))
"""


def test_what_a_worker_waits_for_is_told_from_its_own_work() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, BOOT_DIR], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["usual"][0] == seen["waited"][0] == 1, "once for each backward pass"
    assert seen["waited"][1] >= 0.4
    assert seen["own"][1] < 0.4, "a slow backward pass is its own"
    assert seen["collectives"] == 2, "and not those of other threads"
