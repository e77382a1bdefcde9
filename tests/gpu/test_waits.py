"""How long a GPU waits for other ranks, by its own clock. tests/procs/test_waits_on_a_gpu.py tests the same
code with a simulated clock."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from elasticd.procs.page import BOOT_DIR

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
from elasticd_waits import Waits

CYCLES = 200_000_000
torch.cuda.set_device(0)
dist.init_process_group(sys.argv[2], store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).cuda()
wrapped = torch.nn.parallel.DistributedDataParallel(model)
late = False

def hook(_, bucket):
    # What the others add comes late, on a stream of its own: that is what is waited for.
    added = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return added.then(lambda f: torch.cuda._sleep(CYCLES * late) or f.value()[0])

hook.__annotations__.clear()
wrapped.register_comm_hook(None, hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
waits = Waits()
waits.follow(optimizer)
x = torch.ones(2, 8, device="cuda")

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(CYCLES)  # its own work
        return grad

def told(count, total_ns):
    torch.cuda.synchronize()
    waits.catch_up()
    return waits.count - count, (waits.total_ns - total_ns) / 1e6

def step(slow=False):
    before = waits.count, waits.total_ns
    y = wrapped(Slow.apply(x.clone().requires_grad_()) if slow else x)
    y.sum().backward()
    waits.catch_up()  # nobody waits for it
    optimizer.step(); optimizer.zero_grad()
    return told(*before)

begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
for _ in range(3):
    step()
begun.record(); torch.cuda._sleep(CYCLES); ended.record(); torch.cuda.synchronize()
seen = {"sleeps_ms": begun.elapsed_time(ended), "usual": step(), "own": step(slow=True)}
late = True
seen["waited"] = step()
late = False
with wrapped.no_sync():
    before = waits.count, waits.total_ns
    wrapped(x).sum().backward()
    seen["unsynced"] = told(*before)

# A whole step is captured, with these callbacks in it, and replayed.
other = torch.nn.Linear(8, 1).cuda()
stepper = torch.optim.SGD(other.parameters(), lr=0.1)
waits.follow(stepper)
aside = torch.cuda.Stream()
aside.wait_stream(torch.cuda.current_stream())
def whole():
    stepper.zero_grad(set_to_none=False)
    other(x).sum().backward()
    stepper.step()
    waits.catch_up()
with torch.cuda.stream(aside):
    for _ in range(3):
        whole()
torch.cuda.current_stream().wait_stream(aside)
before = told(0, 0)[0]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    whole()
weight = other.weight.clone()
graph.replay()
torch.cuda.synchronize()
seen["captured"] = told(before, 0)[0]
seen["replayed"] = not torch.equal(weight, other.weight)
before = waits.count, waits.total_ns
seen["after"] = step()
seen["clock"] = waits._gpu._cuda is not None
dist.destroy_process_group()
print(json.dumps(seen))
"""


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_gpu_that_waits_for_others_is_told_from_one_that_works(backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, BOOT_DIR, backend], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    asleep_ms = seen["sleeps_ms"]
    assert seen["usual"][0] == seen["own"][0] == seen["waited"][0] == 1, "once for each backward pass"
    assert seen["waited"][1] > 0.8 * asleep_ms
    assert seen["own"][1] < 0.5 * asleep_ms, "a slow backward pass is its own"
    assert seen["unsynced"][0] == 1 and seen["unsynced"][1] < 0.1 * asleep_ms
    assert seen["captured"] == 0 and seen["replayed"], "a captured graph is neither marked nor spoilt"
    assert seen["after"][0] == 1 and seen["clock"]
