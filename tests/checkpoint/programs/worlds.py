"""Three processes that train and resume in one world after the other.

Usage: worlds.py FOLDER. Each stage is a world of its own size and kind, and all stages must have the same
numbers. A stage loads what the stage before has saved, with elasticd and with plain DCP.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elasticd.checkpoint.client import schedule as schedules
from elasticd.checkpoint.client.collectives import rank_group
from elasticd.checkpoint.client.saver_connection import started
from elasticd.checkpoint.client.schedule import Schedule
from elasticd.checkpoint.newest.pointer import FilePointer
from elasticd.worker.checkpoints import Checkpoints

FOLDER = Path(sys.argv[1])
RUN = FOLDER / "run"
torch.set_num_threads(1)
peers: list[int] = []
for RANK in (1, 2, 0):  # forked, so that torch is imported only once
    if RANK == 0:
        break
    if not (pid := os.fork()):
        peers.clear()
        break
    peers.append(pid)


def made(kind: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(301, 407), torch.nn.LayerNorm(407), torch.nn.Linear(407, 5)
    )
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        for layer in list(model):  # type: ignore[arg-type]
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 301)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return every tensor whole, under a name that is the same in any world."""
    model, optimizer = state["model"], state["optimizer"]
    found = {f"model.{k}": v for k, v in get_model_state_dict(model).items()}
    for name, its in get_optimizer_state_dict(model, optimizer)["state"].items():
        found |= {f"optimizer.{name}.{k}": v for k, v in its.items()}
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in found.items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key


def by_plain_dcp(kind: str) -> dict[str, torch.Tensor]:
    model, optimizer = made(kind, 5)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    newest = FilePointer(RUN).read().newest
    assert newest is not None
    dcp.load(state, checkpoint_id=RUN / newest.name)
    found = {f"model.{k}": v for k, v in state["model"].items()}
    for name, its in state["optimizer"]["state"].items():
        found |= {f"optimizer.{name}.{k}": v for k, v in its.items()}
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v) for k, v in found.items()}


def stage(number: int, size: int, kind: str) -> None:
    if size <= RANK:
        return
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store{number}", rank=RANK, world_size=size)
    checkpoints = Checkpoints(RUN)
    model, optimizer = made(kind, number)
    state = {"model": model, "optimizer": optimizer, "progress": {"stage": number}}
    step = checkpoints.load(state, required=number > 0)
    expected = FOLDER / "expected.pt"
    if number:
        assert step == number, step
        assert state["progress"] == {"stage": number - 1}
        same(whole(state), torch.load(expected, weights_only=True))
        same(by_plain_dcp(kind), torch.load(expected, weights_only=True))
    dist.barrier()
    train(model, optimizer, 2)
    state["progress"] = {"stage": number}
    full = whole(state)
    if RANK == 0:
        torch.save(full, expected)
    assert checkpoints.save(state, number + 1)
    assert checkpoints.wait(60.0) and not checkpoints.failed, checkpoints.last_error
    checkpoints.close()
    dist.barrier()
    dist.destroy_process_group()
    print(f"stage {number}: {kind} of {size}", flush=True)


for n, (world, how) in enumerate(
    [(3, "ddp"), (2, "fsdp"), (3, "fsdp"), (1, "plain"), (3, "fsdp"), (2, "ddp"), (3, "ddp")]
):
    stage(n, world, how)


def more_ranks_than_tensors() -> None:
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=3)
    for last in (0, 1):
        state = {"w": torch.full((5,), float(last))}
        checkpoints = Checkpoints(FOLDER / "small")
        assert (checkpoints.load(state) or 0) == last and bool((state["w"] == last).all())
        state["w"] += 1
        assert checkpoints.save(state, last + 1)
        assert checkpoints.wait(60.0) and not checkpoints.failed, checkpoints.last_error
        checkpoints.close()
        dist.barrier()
    dist.destroy_process_group()


def all_save_at_the_same_steps() -> None:
    """Check that all ranks save at the same steps: those by the clock of rank 0, which alone knows how often
    the job has failed."""
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/clocks", rank=RANK, world_size=3)
    schedules.LEAST_S = 0.03
    if RANK == 0:
        os.environ |= {"ELASTICD_BEGAN": str(time.time() - 60), "ELASTICD_FAILURES": "1000000"}
    ranks = rank_group()
    for cadence in (schedules.EverySeconds(0.03), schedules.Auto()):
        schedule, step, saved = Schedule(cadence), 0, []
        while len(saved) < 4:
            step += 1
            dist.barrier()  # keeps the ranks together, as a training step does
            if schedule.due(step, ranks):
                saved.append((step, time.monotonic()))
        assert len(set(ranks.gather(str([step for step, _ in saved]).encode()))) == 1, saved
        assert saved[3][1] - saved[0][1] >= 0.03, saved  # a save is not due at each step
    for each in ([b"same"] * 3, [b"", b"ab", b"c" * 5000], [b"ab", b"", b"ab"]):
        assert ranks.collect(each[RANK]) == (each if RANK == 0 else [])
        assert ranks.hand_out(each if RANK == 0 else ()) == each[RANK]
        assert ranks.from_first(each[RANK]) == each[0]
    dist.destroy_process_group()


def refuse(*_: Any) -> None:
    raise AssertionError("it unpickles what another rank has sent")


def plain_dcp_fills_shards() -> None:
    if RANK == 2:
        return
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/plain-store", rank=RANK, world_size=2)
    model, optimizer = made("fsdp", 1)
    train(model, optimizer, 2)
    expected = whole({"model": model, "optimizer": optimizer})
    theirs = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(theirs, checkpoint_id=FOLDER / "plain")
    model, optimizer = made("fsdp", 2)
    state = {"model": model, "optimizer": optimizer}
    unpickle = distributed_c10d._tensor_to_object
    distributed_c10d._tensor_to_object = refuse  # unpickles what another rank has sent
    Checkpoints(FOLDER / "no").load_plain(state, FOLDER / "plain")
    distributed_c10d._tensor_to_object = unpickle
    same(whole(state), expected)
    train(model, optimizer, 1)
    dist.barrier()
    dist.destroy_process_group()


more_ranks_than_tensors()
all_save_at_the_same_steps()
plain_dcp_fills_shards()
for saver in started:
    saver.wait(60.0)

for peer in peers:
    _, status = os.waitpid(peer, 0)
    assert status == 0, f"a peer ended with {os.waitstatus_to_exitcode(status)}"
os._exit(0)  # torch's own exit takes as long as three worlds
