"""On a machine with one NVIDIA GPU: a killed worker, to the next step, and what a save costs the training.

Workers share the GPU, whose time they divide, and NCCL connects them over the loopback interface. Under
elasticd two workers are two nodes, as on machines with one GPU each. Under torchrun they are on one node,
which favours torchrun: one agent sees both.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from elasticd.worker import Checkpoints
from tests.bench import launch, whole_state
from tests.bench.launch import Launched
from tests.bench.recovery import SETTLE_S, SURVIVORS, Kill, kills_with_survivors, tables, worker_kills
from tests.etcd.cluster import EtcdOnPorts

WIDTH, BATCH = 1024, 4096  # of the model of the kills
SAVED_WIDTH, SAVED_BATCH = 2048, 4096  # of the model that is saved
STEPS = 10  # that are timed for the usual time of a step
STEPS_MAX = 400  # after which a save has failed
OURS = "elasticd"
AS_IT_IS, FULL = "elasticd, script as it is", "elasticd in place, full size again"


def gpu(kills: int, megabytes: int, saves: int, device: str, folder: Path | None) -> Iterator[str]:
    """Yield the tables. ``megabytes``: of the model and the optimizer that are saved. ``device``: "cuda", or
    "cpu" to try the commands without a GPU."""
    if kills:
        for workers in (1, 2):
            yield _killed(workers, kills, device)
    if saves:
        yield _saved(megabytes, saves, torch.device(device), folder)


# ------------------------------------------------------------ a killed worker


def _killed(workers: int, kills: int, device: str) -> str:
    env = {"PYTHONPATH": launch.ROOT, "BENCH_DEVICE": device}
    env |= {"BENCH_WIDTH": str(WIDTH), "BENCH_BATCH": str(BATCH)} if device == "cuda" else {}
    server = EtcdOnPorts()
    etcd = f"http://{server.start().endpoints[0]}"

    def nodes(least: int, job: Path) -> Callable[[int, Path, Path], Launched]:
        def launcher(workers: int, steps: Path, log: Path) -> Launched:
            name = f"gpu-{time.monotonic_ns()}"
            argv = [launch.BIN / "elasticd", "run", "--etcd", etcd, "--job", name, "--slots", 1]
            argv += ["--min", least, "--max", workers, "--max-restarts", 1000, "--plain"]
            argv += ["--log-format", "json", "--node"]
            return Launched([launch.spawn([*argv, f"n{n}", job], steps, log, env) for n in range(workers)])

        return launcher

    half = (kills + 1) // 2
    rows: dict[str, list[Kill]] = {}

    def add(name: str, launcher: Callable[[int, Path, Path], Launched], settle_s: float = 0.0) -> None:
        rows.setdefault(name, []).extend(worker_kills(launcher, workers, half, settle_s))

    try:
        for _ in range(2):  # in the order A B A B, since a machine's speed changes
            add("torchrun", partial(launch.torchrun_alone, env=env))
            add("torchrun, looking every 10 ms", partial(launch.torchrun_alone, monitor_s=0.01, env=env))
            add(AS_IT_IS, nodes(workers, launch.JOB), SETTLE_S)
            if workers > 1:
                found = kills_with_survivors(nodes(1, launch.JOB_IN_PLACE), workers, half, 0)
                for name, measured in zip((SURVIVORS, FULL), found, strict=True):
                    rows.setdefault(name, []).extend(measured)
    finally:
        server.stop()
    title = f"kill -9 of one of {workers} workers on one GPU, to the next step (NCCL, DDP)"
    return tables(title, rows, SURVIVORS if workers > 1 else AS_IT_IS)


# ------------------------------------------------------------ a save


@dataclass(frozen=True, slots=True)
class Way:
    """A way of saving. ``save``: called between two steps. ``before_change``: called before the optimizer
    next changes what is saved. ``is_durable``: whether the newest save is; raises an exception if the save
    failed. ``load``: puts the newest save back into the model and the optimizer. ``close``: called last."""

    save: Callable[[], object]
    load: Callable[[], object]
    is_durable: Callable[[], bool] = lambda: True
    before_change: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None


class Training:
    """A model on the device, and its steps. ``number``: of the newest step."""

    def __init__(self, megabytes: int, device: torch.device) -> None:
        width = SAVED_WIDTH
        blocks: list[nn.Module] = []
        for _ in range(max(1, round(megabytes / (12 * 8 * width * width / 1e6)))):
            blocks += [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        torch.manual_seed(1)
        self.model = nn.Sequential(*blocks).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.number = 0
        self.before_change: Callable[[], object] = lambda: None
        self.optimizer.register_step_pre_hook(self._before_step)
        self._batch = torch.randn(SAVED_BATCH if device.type == "cuda" else 8, width, device=device)
        self.synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def _before_step(self, *_: object) -> None:
        self.before_change()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def nested(self) -> dict[str, Any]:
        return whole_state.nested(self.model, self.optimizer)

    def bytes(self) -> int:
        held = [v for of in self.optimizer.state.values() for v in of.values() if torch.is_tensor(v)]
        return sum(t.nbytes for t in [*self.model.parameters(), *held])

    def step(self) -> float:
        """Make a step. Return the seconds until the device has finished the step."""
        began = time.perf_counter()
        self.number += 1
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.synchronize()
        return time.perf_counter() - began

    def usual_s(self) -> float:
        return mean(self.step() for _ in range(STEPS))


def _saved(megabytes: int, saves: int, device: torch.device, folder: Path | None) -> str:
    if device.type == "cuda":
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    training = Training(megabytes, device)
    training.usual_s()
    usual_s = training.usual_s()
    size = f"{training.bytes() / 1e9:.1f} GB on {device.type}"
    title = f"saves of {size}, of one worker, beside steps of {usual_s * 1e3:.0f} ms; medians of {saves}"
    lines = [title, f"  {'':<44}{'blocks':>10}{'costs':>10}{'durable':>10}{'load':>10}"]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for name, way in _ways(training, Path(place), pinned=device.type == "cuda"):
            try:
                cells = "".join(f"{seconds:>8.3f} s" for seconds in _measured(training, way, saves))
            except Exception as error:
                if name == OURS:
                    raise
                cells = f"  failed: {error!r:.100}"
            finally:
                training.before_change = lambda: None
                way.close()
            lines.append(f"  {name:<44}{cells}")
    dist.destroy_process_group()
    lines += [
        "blocks: until the call returns; costs: how much longer the steps take until the save is durable,",
        "with what the call blocks; load: from the disk, whose pages are in memory, the faster of two",
    ]
    return "\n".join(lines)


def _measured(training: Training, way: Way, saves: int) -> tuple[float, float, float, float]:
    """Return the medians of what a save blocks and costs, and of when it is durable, and the time of a load.
    Raises RuntimeError if a save is not durable after many steps."""
    blocks, costs, durable = [], [], []
    training.before_change = way.before_change
    for n in range(saves + 2):
        usual_s = training.usual_s()
        began = time.perf_counter()
        way.save()
        blocked = time.perf_counter() - began
        steps = 0
        while not way.is_durable():
            if steps == STEPS_MAX:
                raise RuntimeError(f"the save was not durable after {steps} steps")
            training.step()
            steps += 1
        at = time.perf_counter() - began if steps else blocked
        for _ in range(2):
            training.step()
        if n >= 2:  # the first saves allocate what later ones reuse
            blocks.append(blocked)
            costs.append(time.perf_counter() - began - (steps + 2) * usual_s)
            durable.append(at)
    return median(blocks), median(costs), median(durable), min(_load_s(training, way) for _ in range(2))


def _load_s(training: Training, way: Way) -> float:
    began = time.perf_counter()
    way.load()
    training.synchronize()
    return time.perf_counter() - began


def _ways(training: Training, place: Path, *, pinned: bool) -> Iterator[tuple[str, Way]]:
    yield OURS, _ours(training, place / "ours")
    file, folder = place / "whole.pt", place / "dcp"
    yield (
        "torch.save, with fsync",
        Way(
            lambda: whole_state.save(training.model, training.optimizer, file),
            lambda: whole_state.load(training.model, training.optimizer, file),
        ),
    )

    def load() -> None:
        dcp.load(training.nested(), checkpoint_id=folder)

    yield "dcp.save", Way(lambda: dcp.save(training.nested(), checkpoint_id=folder), load)
    for name, options in _async_options(pinned=pinned).items():
        yield f"dcp.async_save, {name}", _dcp_async(training, folder, options, load)


def _ours(training: Training, folder: Path) -> Way:
    checkpoints = Checkpoints(folder, last=2)
    asked: list[int] = []

    def save() -> None:
        asked.append(training.number)
        assert checkpoints.save(training.state, training.number), checkpoints.last_error

    def is_durable() -> bool:
        if not checkpoints.wait(0.0):
            return False
        newest = checkpoints.newest
        if checkpoints.failed or newest is None or newest.step != asked[-1]:
            raise RuntimeError(f"the save failed: {checkpoints.last_error}")
        return True

    return Way(save, lambda: checkpoints.load(training.state), is_durable, close=checkpoints.close)


def _dcp_async(
    training: Training, folder: Path, options: Mapping[str, Any], load: Callable[[], object]
) -> Way:
    """Return the way of ``dcp.async_save``. As far as the stager allows, the copy overlaps the next forward
    and backward pass, as elasticd's does."""
    staged: list[Any] = []
    durable: list[Any] = []

    def save() -> None:
        answer: Any = dcp.async_save(training.nested(), checkpoint_id=folder, **options)
        if hasattr(answer, "upload_completion"):
            staged[:] = [answer.staging_completion]
            answer = answer.upload_completion
        durable[:] = [answer]

    def wait_for_copy() -> None:
        while staged:
            staged.pop().result()

    def is_durable() -> bool:
        if not durable[0].done():
            return False
        durable[0].result()  # raises the exception if there was one
        return True

    def close() -> None:
        with suppress(Exception):  # it was told already
            durable[0].result()
        stager = options.get("async_stager")
        if stager is not None:
            stager.close()

    return Way(save, load, is_durable, wait_for_copy, close)


def _async_options(*, pinned: bool) -> dict[str, dict[str, Any]]:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    def stager(*, shared: bool) -> Any:
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned,
                use_shared_memory=shared,
                use_async_staging=pinned,
                use_non_blocking_copy=pinned,
            )
        )

    return {
        "default": {},
        "pinned stager": {"async_stager": stager(shared=False)},
        "process, pinned stager": {
            "async_stager": stager(shared=True),
            "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
        },
    }
