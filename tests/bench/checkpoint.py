"""Checkpoints of elasticd, beside torch.save, dcp.save, dcp.async_save and a bare memcpy.

Four gloo workers with the same model and optimizer state make steps with a fixed amount of work. Each way of
saving is used in turns, for some saves each. The figures are the largest of all ranks: how long the loop is
blocked (the floor is a bare copy of the rank's part, made just before); how much slower steps are until the
save is durable; when the save is durable; how long a load takes with a warm page cache, or from the saver's
memory; and how much a worker's memory grows.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from elasticd.checkpoint import protocol
from elasticd.checkpoint.server.standalone import lower_priority
from tests.ports import free_port

Numbers = dict[str, dict[str, list[float]]]
STEP_S = 0.3


OURS = "elasticd"
FLOOR = "floor: memcpy of its own part"
ALL = "memcpy of all of it"
WRITTEN = "floor: and one process writes it all"
DCP = "dcp.save"
LAST = "dcp.async_save"  # the variants' names begin with this


def checkpoint(
    workers: int, megabytes: int, saves: int, folder: Path | None, only: Sequence[str] = ()
) -> str:
    """Run all, and return the table. ``megabytes``: of model and optimizer together. ``only``: only the rows
    whose name begins so, and the floor."""
    wanted, there = megabytes * (workers * 7 // 3 + 2), available_mb()
    if (
        wanted > there
    ):  # each worker has the state, what DDP sends of it, and a copy; the saver has two shards of each worker
        raise click.ClickException(f"this needs about {wanted} MB of memory, and {there} MB are available")
    listener, saver_name = protocol.listen()
    with tempfile.TemporaryDirectory(dir=folder) as place, listener:
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env |= {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers), "OMP_NUM_THREADS": "1"}
        # As under an agent, the saver stays when the workers have left.
        stays = (
            "from elasticd.checkpoint.server.standalone import main; "
            f"main({listener.fileno()}, '{{\"linger_s\": null}}')"
        )
        saver = subprocess.Popen(
            [sys.executable, "-c", stays], pass_fds=[listener.fileno()], start_new_session=True
        )
        env["ELASTICD_SAVER"] = saver_name
        program = "import sys; from tests.bench.checkpoint import worker; worker(*sys.argv[1:])"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", program, place, str(megabytes), str(saves), *only],
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(workers)
        ]
        try:
            said = ranks[0].communicate(timeout=1800)[0]
            if any(rank.wait(120) for rank in ranks):
                raise RuntimeError(f"a worker failed: {said[-2000:]}")
        finally:
            for process in (*ranks, saver):
                process.kill()
                process.wait()
    found = json.loads(said.splitlines()[-1])
    return _table(found["numbers"], found["size"], workers, saves)


def _table(numbers: Numbers, size: float, workers: int, saves: int) -> str:
    heads = ("blocks", "x floor", "slows", "x step", "durable", "load", "memory", "+shards")
    lines = [
        f"{size / 1e6:.0f} MB in all, {workers} workers with a shard each, {saves} saves; medians in seconds",
        f"{'':<36}{''.join(f'{head:>9}' for head in heads)}",
    ]
    for name, row in numbers.items():
        cells = [f"{median(row['blocks']):9.4f}", f"{_over_floor(row):9.2f}"]
        for key, digits in (
            ("slows", 4),
            ("step", 3),
            ("durable", 4),
            ("load", 4),
            ("recall", 4),
            ("grows", 2),
        ):
            cells.append(f"{median(row[key]):9.{digits}f}" if row.get(key) else f"{'-':>9}")
        lines.append(f"{name:<36}{''.join(cells)}")
    return "\n".join([*lines, "", *_judged(numbers)])


def _judged(numbers: Numbers) -> Iterator[str]:
    """Yield how elasticd's figures compare with the aims, for all figures that were measured."""
    variants = [name for name in numbers if name.startswith(LAST)]
    blocks = _of(numbers, OURS, "blocks")
    yield _line("blocks, times the floor", _over_floor(numbers[OURS]), "at most 1.3")
    if variants:
        best = min(_of(numbers, name, "blocks") for name in variants)
        whole = min(_of(numbers, name, "blocks") + _of(numbers, name, "slows") for name in variants)
        ours = blocks + max(0.0, _of(numbers, OURS, "slows"))
        yield _line("best dcp.async_save blocks, times ours", best / blocks, "at least 2.5")
        yield _line("the same with what it slows", whole / ours, "at least 5")
    yield _line("a step while the saver writes, times usual", _of(numbers, OURS, "step"), "at most 1.05")
    if WRITTEN in numbers:
        yield _line("the same while as much is just written", _of(numbers, WRITTEN, "step"), "the floor")
    if ALL in numbers:
        by_memory = _of(numbers, OURS, "recall") / _of(numbers, ALL, "load")
        yield _line("load from memory, times a memcpy of it", by_memory, "at most 1.5")
    if DCP in numbers:
        dcp = _of(numbers, DCP, "load")
        yield _line("load from memory, times dcp.load", _of(numbers, OURS, "recall") / dcp, "below 1")
        yield _line(
            "verified load from disk, times dcp.load", _of(numbers, OURS, "load") / dcp, "at most 1.1"
        )
    yield _line("memory beyond the state, in shards a worker", _of(numbers, OURS, "grows"), "at most 2")


def _over_floor(row: dict[str, list[float]]) -> float:
    """Return how long saves block, as a multiple of the floor that was measured beside each save: the
    machine's speed changes."""
    return median(row["blocks"]) / median(row["floor"])


def _line(what: str, value: float, wanted: str) -> str:
    return f"{what:<46}{value:7.3f}   wanted: {wanted}"


def _of(numbers: Numbers, name: str, key: str) -> float:
    return median(numbers[name][key])


# ------------------------------------------------------------ a worker


def worker(place: str, megabytes: str, saves: str, *only: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    bench = _Bench(Path(place), rank, world, int(saves))
    width = 1024
    layers = max(1, int(megabytes) * 1_000_000 // (12 * (4 * width * width + 4 * width + width * 4)))
    blocks: list[torch.nn.Module] = []
    for _ in range(layers):
        blocks += [torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)]
        blocks += [torch.nn.LayerNorm(width)]
    bench.model = DistributedDataParallel(torch.nn.Sequential(*blocks))
    bench.optimizer = torch.optim.AdamW(bench.model.parameters(), lr=1e-4)
    bench.model(torch.randn(2, width)).sum().backward()
    bench.optimizer.step()
    bench.optimizer.zero_grad()
    bench.calibrate()
    bench.run(only)
    if rank == 0:
        print(json.dumps({"numbers": bench.numbers, "size": bench.size}), flush=True)
    dist.destroy_process_group()


def available_mb() -> int:
    [line] = [x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable")]
    return int(line.split()[1]) // 1000


def memory_held() -> int:
    """Return the bytes of this process: its own, and those that it shares with the saver."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split()[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")}
    return sizes["RssAnon:"] + sizes["RssShmem:"]


def write_when_told(size: int) -> None:
    """For each byte that arrives, write that many bytes to a file, durably and past the page cache; then
    answer with a byte."""
    lower_priority()
    content = mmap.mmap(-1, size // mmap.PAGESIZE * mmap.PAGESIZE)
    content.write(b"\1" * len(content))
    while os.read(0, 1):
        fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
        written = 0
        while written < len(content):
            written += os.write(fd, memoryview(content)[written : written + (16 << 20)])
        os.fsync(fd)
        os.close(fd)
        os.write(1, b"1")


class _Bench:
    def __init__(self, place: Path, rank: int, world: int, saves: int) -> None:
        import torch

        self.place, self.rank, self.world, self.saves = place, rank, world, saves
        self.model: Any = None
        self.optimizer: Any = None
        self.numbers: Numbers = {}
        self.work = torch.randn(384, 384)
        self.rounds = 1
        self.usual_s = 0.0
        self.size = 0
        self.count = 0
        self.bare_copy: Callable[[], None] = lambda: None

    def calibrate(self) -> None:
        """Choose the amount of work with which a step of all ranks takes about ``STEP_S``."""
        import torch
        import torch.distributed as dist

        tensors = [t for t in self.tensors().values() if isinstance(t, torch.Tensor)]
        self.size = sum(t.nbytes for t in tensors)
        self.bare_copy = next(self.memcpy(1 / self.world))["save"]
        self.rounds = 200
        took = median(self.step() for _ in range(5))
        mine = torch.tensor([max(1.0, self.rounds * STEP_S / took)])
        dist.all_reduce(mine, dist.ReduceOp.MIN)
        self.rounds = int(mine)
        self.usual_s = median(self.step() for _ in range(12))

    def step(self) -> float:
        """Make a step like that of a training: compute, and wait for the others."""
        import torch.distributed as dist

        began = time.perf_counter()
        for _ in range(self.rounds):
            self.work = (self.work @ self.work).tanh_()
        dist.barrier()
        return time.perf_counter() - began

    def timed(self, do: Callable[[], Any]) -> float:
        import torch.distributed as dist

        dist.barrier()
        began = time.perf_counter()
        do()
        return time.perf_counter() - began

    def tensors(self) -> dict[str, Any]:
        from elasticd.checkpoint.client.state_dict import flatten

        return flatten({"model": self.model, "optimizer": self.optimizer}).tensors

    def nested(self) -> dict[str, Any]:
        from tests.bench import whole_state

        return whole_state.nested(self.model, self.optimizer)

    def most(self, seconds: float) -> float:
        import torch
        import torch.distributed as dist

        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value)

    def run(self, only: Sequence[str]) -> None:
        for name, way in (
            (FLOOR, self.memcpy(1 / self.world)),
            (ALL, self.memcpy(1.0)),
            (WRITTEN, self.bare_write()),
            (OURS, self.ours()),
            ("torch.save on rank 0, with fsync", self.torch_save()),
            (DCP, self.dcp_save()),
            (f"{LAST}, default", self.dcp_async({})),
            (f"{LAST}, cached pinned stager", self.dcp_async({"stager": "cached"})),
            (f"{LAST}, process", self.dcp_async({"process": True})),
            (f"{LAST}, process, stager", self.dcp_async({"process": True, "stager": "default"})),
        ):
            if only and not name.startswith((FLOOR, OURS, *only)):
                continue
            try:
                self.numbers[name] = self.measure(way)
            except Exception as error:
                if name in (OURS, FLOOR):
                    raise
                print(f"{name}: {error!r}"[:300], file=sys.stderr)

    def measure(self, way: Iterator[dict[str, Callable[[], Any]]]) -> dict[str, list[float]]:
        """Measure a way of saving. ``way`` has functions: ``save`` (which blocks), ``durable`` (returns once
        the save is durable), ``load``, ``leave``, and ``recall`` (load from memory)."""
        import torch.distributed as dist

        doing = next(way)
        row: dict[str, list[float]] = {
            "blocks": [],
            "floor": [],
            "slows": [],
            "step": [],
            "durable": [],
            "load": [],
        }
        row["recall"] = []
        had = memory_held()
        for n in range(self.saves + 2):
            self.count += 1
            floor = self.timed(self.bare_copy)
            self.usual_s = median([self.step() for _ in range(3)])
            dist.barrier()
            began = time.perf_counter()
            doing["save"]()
            blocked = time.perf_counter() - began
            steps, slower = 0, 0.0
            if "durable" in doing:
                done: list[float] = []
                while not done and steps < 30:
                    slower += self.step() - self.usual_s
                    steps += 1
                    if self.most(0.0 if (at := doing["is_durable"]()) else 1.0) == 0.0:
                        done.append(at)
                doing["durable"]()
                durable = doing["when_durable"]() - began
            else:
                durable = 0.0
            numbers = {
                "blocks": self.most(blocked),
                "floor": self.most(floor),
                "slows": self.most(slower),
                "step": self.most(1 + slower / (steps * self.usual_s) if steps else 0.0),
                "durable": self.most(durable),
            }
            if n >= 2:  # steady state
                for key, value in numbers.items():
                    if key not in ("durable", "step") or durable:
                        row[key].append(value)
        row["grows"] = [self.most(max(0, memory_held() - had)) / (self.size / self.world)]
        for what in ("load", "leave", "recall"):
            for _ in range(3 if what in doing and what != "leave" else 0):
                row[what].append(self.most(self.timed(doing[what])))
            if what == "leave" and what in doing:
                doing[what]()
                dist.barrier()
        with contextlib.suppress(StopIteration):
            next(way)
        return row

    # -------------------------------------------------------- the ways of saving

    def memcpy(self, share: float) -> Iterator[dict[str, Callable[[], Any]]]:
        import torch

        wanted = int(self.size * share)
        sources, have = [], 0
        for tensor in self.tensors().values():
            flat = tensor.reshape(-1)[: max(0, (wanted - have) // tensor.itemsize)]
            sources.append(flat)
            have += flat.nbytes
        places = [torch.empty_like(s) for s in sources]

        def copy() -> None:
            torch._foreach_copy_(places, sources)

        def back() -> None:
            torch._foreach_copy_(sources, places)

        yield {"save": copy, "load": back}

    def bare_write(self) -> Iterator[dict[str, Callable[[], Any]]]:
        """Make the bare copy. A process with the saver's priority then writes that many bytes, and does
        nothing else. So this row shows what the disk alone costs the steps."""
        writer: subprocess.Popen[bytes] | None = None
        if self.rank == 0:
            program = f"from tests.bench.checkpoint import write_when_told; write_when_told({self.size})"
            writer = subprocess.Popen(
                [sys.executable, "-c", program, self.place / "bare"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        tell, said = (pipe.fileno() for pipe in (writer.stdin, writer.stdout) if pipe) if writer else (-1, -1)
        at: list[float] = []

        def save() -> None:
            self.bare_copy()
            at[:] = [] if writer else [time.perf_counter()]
            if writer:
                os.write(tell, b"1")

        def is_durable(within_s: float = 0.0) -> bool:
            if writer and not at and select.select([said], [], [], within_s)[0]:
                os.read(said, 1)
                at.append(time.perf_counter())
            return bool(at)

        yield {
            "save": save,
            "durable": lambda: is_durable(60.0),
            "is_durable": is_durable,
            "when_durable": lambda: at[0],
        }
        if writer:
            writer.kill()
            writer.wait()

    def ours(self) -> Iterator[dict[str, Callable[[], Any]]]:
        from elasticd.worker import Checkpoints

        path = self.place / "ours"
        checkpoints = Checkpoints(path, last=2)
        state = {"model": self.model, "optimizer": self.optimizer}
        began: list[float] = []
        at: list[float] = []

        def save() -> None:
            began[:] = [time.perf_counter()]
            at.clear()
            assert checkpoints.save(state, self.count)

        def is_durable() -> bool:
            return checkpoints.wait(0.0)

        def when() -> float:
            # The saver reports the time since it was handed the first shard.
            newest = checkpoints.newest
            assert newest is not None and not checkpoints.failed, checkpoints.last_error
            return began[0] + newest.took_s

        def recall() -> None:
            assert returned.load(state) == self.count and returned.tier == "memory"

        returned = Checkpoints(path)
        yield {
            "save": save,
            "durable": checkpoints.wait,
            "is_durable": is_durable,
            "when_durable": when,
            "load": lambda: checkpoints.load(state),
            "leave": checkpoints.close,
            "recall": recall,
        }
        returned.close()

    def torch_save(self) -> Iterator[dict[str, Callable[[], Any]]]:
        import torch.distributed as dist

        from tests.bench import whole_state

        file = self.place / "whole.pt"

        def save() -> None:
            if self.rank == 0:
                whole_state.save(self.model, self.optimizer, file)
            dist.barrier()

        yield {"save": save, "load": lambda: whole_state.load(self.model, self.optimizer, file)}

    def folder(self) -> Path:
        path = self.place / f"dcp-{self.count}"
        for old in self.place.glob("dcp-*"):
            if self.rank == 0 and int(old.name[4:]) < self.count - 1:
                shutil.rmtree(old, ignore_errors=True)
        return path

    def dcp_load(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.nested(), checkpoint_id=self.place / f"dcp-{self.count}")

    def dcp_save(self) -> Iterator[dict[str, Callable[[], Any]]]:
        import torch.distributed.checkpoint as dcp

        yield {
            "save": lambda: dcp.save(self.nested(), checkpoint_id=self.folder()),
            "load": self.dcp_load,
        }

    def dcp_async(self, options: dict[str, Any]) -> Iterator[dict[str, Callable[[], Any]]]:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        group = dist.new_group(backend="gloo")
        more: dict[str, Any] = {}
        if options.get("process"):
            more["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        if options.get("stager"):
            cached = options["stager"] == "cached"
            more["async_stager"] = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=not cached,
                    use_async_staging=not cached,
                    use_non_blocking_copy=False,
                )
            )
        pending: list[Any] = []
        at: list[float] = []

        def save() -> None:
            at.clear()
            answer = dcp.async_save(self.nested(), checkpoint_id=self.folder(), process_group=group, **more)
            if hasattr(answer, "upload_completion"):
                answer.staging_completion.result()
                answer = answer.upload_completion
            answer.add_done_callback(lambda _: at.append(time.perf_counter()))
            pending[:] = [answer]

        yield {
            "save": save,
            "durable": lambda: pending[0].result(),  # noqa: PLW0108  (not there yet)
            "is_durable": lambda: pending[0].done(),  # noqa: PLW0108
            "when_durable": lambda: at[0],
            "load": self.dcp_load,
        }
