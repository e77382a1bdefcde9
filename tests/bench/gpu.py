"""On a machine with one NVIDIA GPU: a killed worker, to the next step, and what a save costs the training.

Workers share the GPU, whose time they divide, and NCCL connects them over the loopback interface. Under
elasticd two workers are two nodes, as on machines with one GPU each. Under torchrun they are on one node,
which favours torchrun: one agent sees both.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from elasticd.worker import Checkpoints
from tests.bench import launch, parts, report
from tests.bench.launch import Launched
from tests.bench.recovery import SETTLE_S, SURVIVORS, Kill, kills_with_survivors, worker_kills
from tests.etcd.cluster import EtcdOnPorts

WIDTH, BATCH = 2048, 2048  # of the model of the kills: a step takes some milliseconds
SAVED_WIDTH, SAVED_BATCH = 2048, 4096  # of the model that is saved
STEPS = 10  # that are timed for the usual time of a step
STEPS_MAX = 400  # after which a save is given up


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

    def torchrun(workers: int, steps: Path, log: Path) -> Launched:
        return launch.torchrun_alone(workers, steps, log, env=env)

    def tuned(workers: int, steps: Path, log: Path) -> Launched:
        return launch.torchrun_alone(workers, steps, log, monitor_s=0.01, env=env)

    as_it_is = "elasticd, script as it is"
    rows: dict[str, list[Kill]] = {}
    try:
        rows["torchrun"] = worker_kills(torchrun, workers, kills)
        rows["torchrun, looking every 10 ms"] = worker_kills(tuned, workers, kills)
        rows[as_it_is] = worker_kills(nodes(workers, launch.JOB), workers, kills, SETTLE_S)
        if workers > 1:
            survivors, full = kills_with_survivors(nodes(1, launch.JOB_IN_PLACE), workers, kills, 0)
            rows |= {SURVIVORS: survivors, "elasticd in place, full size again": full}
    finally:
        server.stop()
    times = {name: [kill.took for kill in row] for name, row in rows.items()}
    known = {name: [kill.parts for kill in row if kill.parts] for name, row in rows.items()}
    title = f"kill -9 of one of {workers} workers on one GPU, to the next step (NCCL, DDP)"
    return "\n".join(
        [
            report.table(title, times, SURVIVORS if workers > 1 else as_it_is),
            "what it was spent on (medians, ms)",
            *(parts.line(name, row) for name, row in known.items() if row),
        ]
    )


# ------------------------------------------------------------ a save


@dataclass(frozen=True, slots=True)
class Way:
    """A way of saving. ``save``: called between two steps. ``is_durable``: whether the newest save is.
    ``load``: puts the newest save back into the model and the optimizer."""

    save: Callable[[], object]
    load: Callable[[], object]
    is_durable: Callable[[], bool] = lambda: True


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
        self._batch = torch.randn(SAVED_BATCH if device.type == "cuda" else 8, width, device=device)
        self._synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def nested(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def bytes(self) -> int:
        held = [v for of in self.optimizer.state.values() for v in of.values() if torch.is_tensor(v)]
        return sum(t.nbytes for t in [*self.model.parameters(), *held])

    def steps(self, count: int) -> float:
        """Make steps. Return the seconds until the device has finished them."""
        began = time.perf_counter()
        for _ in range(count):
            self.number += 1
            self.model(self._batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._synchronize()
        return time.perf_counter() - began


def _saved(megabytes: int, saves: int, device: torch.device, folder: Path | None) -> str:
    if device.type == "cuda":
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    training = Training(megabytes, device)
    training.steps(STEPS)
    usual_s = training.steps(STEPS) / STEPS
    size = f"{training.bytes() / 1e9:.1f} GB on {device.type}"
    title = f"saves of {size}, of one worker, beside steps of {usual_s * 1e3:.0f} ms; medians of {saves}"
    lines = [title, f"  {'':<44}{'blocks':>10}{'costs':>10}{'durable':>10}{'load':>10}"]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for name, way in _ways(training, Path(place), pinned=device.type == "cuda"):
            cells = _measured(training, way, saves)
            lines.append(f"  {name:<44}" + "".join(f"{seconds:>8.3f} s" for seconds in cells))
    dist.destroy_process_group()
    lines += [
        "blocks: until the call returns; costs: how much longer the steps take until the save is durable,",
        "with what the call blocks; load: from the disk, whose pages are in memory",
    ]
    return "\n".join(lines)


def _measured(training: Training, way: Way, saves: int) -> tuple[float, float, float, float]:
    """Return the medians of what a save blocks and costs, when it is durable, and of a load."""
    blocks, costs, durable, load = [], [], [], []
    for n in range(saves + 2):
        usual_s = training.steps(STEPS) / STEPS
        began = time.perf_counter()
        way.save()
        blocked = time.perf_counter() - began
        steps, at = 0, blocked if way.is_durable() else 0.0
        while not at and steps < STEPS_MAX:
            training.steps(1)
            steps += 1
            at = time.perf_counter() - began if way.is_durable() else 0.0
        training.steps(2)
        if n >= 2:  # the first saves allocate what later ones reuse
            blocks.append(blocked)
            costs.append(time.perf_counter() - began - (steps + 2) * usual_s)
            durable.append(at)
    for _ in range(2):
        began = time.perf_counter()
        way.load()
        training.steps(0)
        load.append(time.perf_counter() - began)
    return median(blocks), median(costs), median(durable), min(load)


def _ways(training: Training, place: Path, *, pinned: bool) -> Iterator[tuple[str, Way]]:
    checkpoints = Checkpoints(place / "ours", last=2)
    yield (
        "elasticd",
        Way(
            lambda: _ask(checkpoints, training),
            lambda: checkpoints.load(training.state),
            lambda: checkpoints.wait(0.0),
        ),
    )
    checkpoints.close()
    file = place / "whole.pt"
    yield (
        "torch.save, with fsync",
        Way(lambda: _torch_save(training, file), lambda: _torch_load(training, file)),
    )
    folder = place / "dcp"

    def load() -> None:
        dcp.load(training.nested(), checkpoint_id=folder)

    yield "dcp.save", Way(lambda: dcp.save(training.nested(), checkpoint_id=folder), load)
    for name, options in _async_options(pinned=pinned).items():
        pending: list[Any] = []

        def save(options: Mapping[str, Any] = options, pending: list[Any] = pending) -> None:
            answer: Any = dcp.async_save(training.nested(), checkpoint_id=folder, **options)
            if hasattr(answer, "upload_completion"):
                answer.staging_completion.result()
                answer = answer.upload_completion
            pending[:] = [answer]

        yield f"dcp.async_save, {name}", Way(save, load, lambda pending=pending: pending[0].done())  # type: ignore[misc]
        for answer in pending:
            answer.result()


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


def _ask(checkpoints: Checkpoints, training: Training) -> None:
    assert checkpoints.save(training.state, training.number), checkpoints.last_error


def _torch_save(training: Training, file: Path) -> None:
    with file.open("wb") as out:
        torch.save(training.nested(), out)
        out.flush()
        os.fsync(out.fileno())


def _torch_load(training: Training, file: Path) -> None:
    loaded = torch.load(file, weights_only=True)
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
