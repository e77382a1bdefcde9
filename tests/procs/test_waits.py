"""How long a worker waits for other workers. Measured in separate processes, so that no patch stays in this
process."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from elasticd.procs.page import BOOT_DIR
from tests import forkserver

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
lost = [None]

def hook(_, bucket):
    if lost[0] is not None:
        return lost[0]
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

def step_that_fails():
    # A peer is lost: DistributedDataParallel says so where it would have waited.
    broken = torch.futures.Future()
    broken.set_exception(RuntimeError("lost a peer"))
    lost[0] = broken
    try:
        step()
    except RuntimeError:
        pass
    lost[0] = None
    optimizer.zero_grad()

step()
step_that_fails()
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


SHARDED = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from elasticd_waits import Waits
from datetime import timedelta

LATE_S = 0.5
other = os.fork()  # before there are threads
rank = 1 if other else 0
torch.set_num_threads(1)
store = dist.FileStore(sys.argv[2] + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
late = ""

class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if rank == 1 and late == "forward":
            time.sleep(LATE_S)
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        if rank == 1 and late == "backward":
            time.sleep(LATE_S)
        return grad

class Layer(torch.nn.Linear):
    def forward(self, x):
        return Work.apply(super().forward(x))

model = torch.nn.Sequential(Layer(4, 4), Layer(4, 4), torch.nn.Linear(4, 1))
fully_shard(model[0])
fully_shard(model[1])
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
waits = Waits()

def step():
    before = waits.count, waits.total_ns
    model(torch.ones(2, 4)).sum().backward()
    if rank == 1 and late == "between":
        time.sleep(LATE_S / 2)
    optimizer.step(); optimizer.zero_grad()
    waits.follow(optimizer)
    return waits.count - before[0], (waits.total_ns - before[1]) / 1e9

step()
seen = {"usual": step()}
for late in ("forward", "backward"):
    seen[late] = step()
late = "between"
step()
late = ""
seen["between"] = step()
seen["hooks"] = sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
with open(f"{sys.argv[2]}/{rank}", "w") as file:
    json.dump(seen, file)
dist.destroy_process_group()
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""

STARVED = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
from elasticd_waits import Waits

NEIGHBOURS, CPU_S = 3, 0.3
torch.set_num_threads(1)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

def compute():
    end = time.thread_time() + CPU_S
    while time.thread_time() < end:
        pass

torch._C._distributed_c10d.Work.wait = lambda work, *args: compute()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
waits = Waits()
waits.follow(optimizer)

def delayed_while(does):
    began, delay_ns, waited_ns = time.monotonic(), waits.delayed_ns(), waits.total_ns
    does()
    took_s = time.monotonic() - began - (waits.total_ns - waited_ns) / 1e9
    return took_s, (waits.delayed_ns() - delay_ns) / 1e9

parent = os.getpid()
for _ in range(NEIGHBOURS):
    if os.fork() == 0:
        while os.getppid() == parent:
            pass
        os._exit(0)
work = dist.all_reduce(torch.ones(1), async_op=True)
seen = {"own": delayed_while(compute), "waiting": delayed_while(work.wait)}
seen["asleep"] = delayed_while(lambda: time.sleep(CPU_S))
print(json.dumps(seen))
"""


def _run(program: str, folder: Path) -> str:
    """Run the program in a process that has imported torch. Return its output."""
    argv = ["-c", program, BOOT_DIR, str(folder)]
    done = forkserver.run(argv, env=os.environ, cwd=folder, timeout_s=120, entry=forkserver.PROGRAM)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_a_worker_waits_for_is_told_from_its_own_work(tmp_path: Path) -> None:
    seen = json.loads(_run(PROGRAM, tmp_path))
    assert seen["usual"][0] == seen["waited"][0] == 1, "once for each backward pass"
    assert seen["waited"][1] >= 0.4
    assert seen["own"][1] < 0.4, "a slow backward pass is its own"
    assert seen["collectives"] == 2, "and not those of other threads"


def test_waits_of_fsdp2_are_measured_in_the_waiting_workers_and_not_in_the_late_one(
    tmp_path: Path,
) -> None:
    _run(SHARDED, tmp_path)
    early, late = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    # Each of the three groups gathers and reduces. The two workers that are not the root gather once more.
    assert early["usual"][0] == late["usual"][0] == 3 + 2 + 3
    for when in ("forward", "backward", "between"):
        assert early[when][1] - late[when][1] > 0.8 * (0.25 if when == "between" else 1.0), when
    assert early["hooks"] == late["hooks"] == 0, (
        "with one, FSDP2 would hold gradients up on their way to the host"
    )


def test_the_time_without_a_processor_is_told_but_for_what_falls_into_waits(tmp_path: Path) -> None:
    """The worker shares one processor with three others that never leave it."""
    seen = json.loads(_run(STARVED, tmp_path))
    took_s, delayed_s = seen["own"]
    assert delayed_s > 0.3 and took_s - delayed_s == pytest.approx(0.3, rel=0.1)
    took_s, delayed_s = seen["waiting"]
    assert took_s - delayed_s == pytest.approx(0.0, abs=0.1), "the delay in the wait counts as waiting"
    took_s, delayed_s = seen["asleep"]
    assert took_s - delayed_s >= 0.29, "sleep is its own"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BOOT_DIR)
    return importlib.import_module("elasticd_waits").Waits()


def measured_of(waits: Any, took_ns: list[int]) -> list[int]:
    """Return those of a worker's steps that it measured."""
    at_ns, measured = 1, []
    waits.step_ended(at_ns)
    for one_ns in took_ns:
        at_ns += one_ns
        if waits.step_ended(at_ns):
            measured.append(one_ns)
    assert (waits.steps, waits.steps_ns) == (len(measured), sum(measured))
    return measured


@pytest.mark.parametrize(("took_ns", "always"), [(50_000_000, False), (1_000_000, True)])
def test_all_steps_are_measured_if_they_are_long_or_if_each_is_read(
    waits: Any, took_ns: int, always: bool
) -> None:
    waits.always = always
    assert len(measured_of(waits, [took_ns] * 500)) == 500


@pytest.mark.parametrize("each", [2, 3, 4, 5, 8, 13, 16, 21, 22, 34, 100])
def test_of_short_steps_twenty_a_second_are_measured_evenly_in_any_pattern(waits: Any, each: int) -> None:
    """One step of so many is the long one: gradients are accumulated, a log is written, an epoch ends."""
    pattern = [4_000_000, *[1_000_000] * (each - 1)]
    took_ns = pattern * (20_000 // each)
    measured = measured_of(waits, took_ns)
    assert len(measured) == pytest.approx(20 * sum(took_ns) / 1e9, rel=0.1)
    assert fmean(measured) == pytest.approx(fmean(took_ns), rel=0.05)
