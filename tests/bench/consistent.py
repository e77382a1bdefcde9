"""The cost of consistent mode: plain DistributedDataParallel, DistributedDataParallel under elasticd's
weighting, and consistent mode, in turns in the same processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elasticd.data.dealing import parts_of
from elasticd.worker.gradients.consistent import ConsistentReduction
from elasticd.worker.gradients.reduction import AveragedReduction, Reduction
from elasticd.worker.gradients.wrapping import WrappedModels
from workers.gpt import GPT, Shape

SHAPES = {  # layers, heads, width
    "small": (2, 2, 64),
    "medium": (4, 4, 192),
    "large": (6, 6, 384),
}
WARM_UP_STEPS = 5
CONTEXT = 64
SAMPLES = 8  # samples of a virtual rank
PLAIN, AVERAGED, CONSISTENT = "plain DDP", "consistent=False", "consistent=True"


def _model(shape: str) -> nn.Module:
    layers, heads, width = SHAPES[shape]
    torch.manual_seed(0)
    return GPT(Shape(layers, heads, width, CONTEXT))


class _Contestant:
    """One model, and the way in which its gradients are added up."""

    def __init__(self, name: str, shape: str, virtual_ranks: int) -> None:
        self.name, self.virtual_ranks = name, virtual_ranks
        bare = _model(shape)
        self.megabytes = sum(p.nbytes for p in bare.parameters()) / 1e6
        self.model: Any = bare
        self.steps = 0
        self.optimizer = torch.optim.AdamW(bare.parameters())
        self.reduction: Reduction | None = None
        if name == CONSISTENT:
            self.reduction = ConsistentReduction([bare], virtual_ranks, 0, lambda: [self.steps])
        else:
            wrap = partial(DistributedDataParallel, gradient_as_bucket_view=True)
            if name == AVERAGED:
                models = WrappedModels({"model": bare}, ["model"], wrap)
                models.enter(None)
                self.model, self.reduction = models["model"], AveragedReduction(models)
            else:
                self.model = wrap(bare)

    def step(self, batch: torch.Tensor) -> None:
        parts = parts_of(
            dist.get_rank(),
            dist.get_world_size(),
            samples=SAMPLES * self.virtual_ranks,
            virtual_ranks=self.virtual_ranks,
        )
        self.steps += 1
        self.optimizer.zero_grad()
        if self.reduction is None:
            for part in parts:
                self.model.require_backward_grad_sync = part.last
                self._loss(batch).backward()
        else:
            for part in parts:
                with self.reduction.part(part):
                    self.reduction.backward(self._loss(batch), part)
            self.reduction.finish(parts)
        self.optimizer.step()

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def _worker(
    rank: int, world: int, port: int, shape: str, each: int, rounds: int, steps: int, line: Connection
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    batch = torch.randint(0, 256, (SAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(rank))
    contestants = [_Contestant(name, shape, each * world) for name in (PLAIN, AVERAGED, CONSISTENT)]
    took: dict[str, list[float]] = {c.name: [] for c in contestants}
    for contestant in contestants:
        for _ in range(WARM_UP_STEPS):
            contestant.step(batch)
    for _ in range(rounds):
        for contestant in contestants:
            contestant.step(batch)  # what the contestant before has left in caches must not count
            times = []
            for _ in range(steps):
                dist.barrier()
                began = time.perf_counter()
                contestant.step(batch)
                times.append(time.perf_counter() - began)
            took[contestant.name].append(median(times))
    line.send((contestants[0].megabytes, took))
    line.close()
    dist.barrier()
    dist.destroy_process_group()


def _race(world: int, shape: str, each: int, rounds: int, steps: int) -> tuple[float, dict[str, list[float]]]:
    """Return the megabytes of gradients, and the median step of each round by contestant, as rank 0
    saw it."""
    context = mp.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    lines = []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (rank, world, store.port, shape, each, rounds, steps, theirs)
        processes.append(context.Process(target=_worker, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        lines.append(ours)
    found: list[tuple[float, dict[str, list[float]]]] = [line.recv() for line in lines]
    for process in processes:
        process.join()
    return found[0]


def consistent(
    worlds: list[int], shapes: list[str], virtual_ranks: list[int], rounds: int, steps: int
) -> Iterator[str]:
    """Measure in the order A B C A B C. The ratio is the median of the ratios within each turn, since the
    machine's speed changes. Yield each line as soon as it is measured: all together take many minutes."""
    yield f"one training step of a GPT on gloo, 1 thread a worker ({rounds} turns of {steps} steps each)"
    for each in virtual_ranks:
        for world in worlds:
            for shape in shapes:
                megabytes, took = _race(world, shape, each, rounds, steps)

                def times(name: str, took: dict[str, list[float]] = took) -> str:
                    ratio = median(a / b for a, b in zip(took[name], took[PLAIN], strict=True))
                    return f"{name} {median(took[name]) * 1e3:.1f} ms ({ratio:.3f}x)"

                yield (
                    f"  {megabytes:5.1f} MB, {world} workers, {each} virtual ranks each: "
                    f"{PLAIN} {median(took[PLAIN]) * 1e3:.1f} ms, {times(AVERAGED)}, {times(CONSISTENT)}"
                )
