"""The script of a chaos run, made by its plan, and the faults of its worker.

The script keeps a ledger: the samples that it used in each step, and the steps that it saw committed."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import functools
import hashlib
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from elasticd import worker
from elasticd.channel.worker_messages import ADDRESS
from elasticd.worker.joining import exchange, transfer
from elasticd.worker.world import connecting
from tests.worker.jobs import is_rehearsing

WISHES = "CHAOS_WISHES"  # the abstract address of the socket at which a worker reports planned faults
SAMPLES = 38
EPOCHS = 2
BATCH = 8
STEPS = -(-SAMPLES // BATCH)  # of an epoch
OUTSIDE = ("forming", "sending", "receiving", "returned")


torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports many modules: once, before workers are forked


@dataclass(frozen=True)
class Script:
    """``data``: numbers, map, stream or sharding. ``every``: steps to a commit. ``wrapper``: the code around
    the loop. ``twice``: whether ``steps`` is called once for each half of the training. ``follows``: a second
    module has averages of the weights; the script updates them before the sums of a step (early) or after the
    optimizer, or swaps them in for an evaluation (averages). ``sharp``: gradients are computed at other
    weights than those that are trained. ``unfreezes``: the first layer is frozen at the beginning. ``codes``:
    a large buffer changes through ``.data``. ``epochs``: the steps are those of ``state.epochs()``, each as
    long as in the data (data) or as the script says (steps). ``local``: each worker has a list and a
    generator of its own. ``late``: two workers are connected when they first talk, as in a large world.
    ``apart``: no worker reads another one's memory, as on several nodes.
    ``spoilt``: what goes wrong after the first world, to check that the run is found wrong."""

    data: str = "map"
    consistent: bool = False
    kind: str = "mlp"
    optimizer: str = "sgd"
    scaler: bool = False
    every: int = 1
    accumulate: int = 1
    loaders: int = 0
    schedule: str = ""
    clip: bool = False
    ddp: str = ""
    wrapper: str = ""
    twice: bool = False
    checkpoints: bool = False
    autocast: bool = False
    follows: str = ""
    sharp: bool = False
    unfreezes: bool = False
    codes: bool = False
    undo: bool | None = None
    epochs: str = ""
    local: bool = False
    late: bool = False
    apart: bool = False
    seed: int = 0
    spoilt: str = ""

    @property
    def steps(self) -> int:
        return STEPS * EPOCHS

    def commits(self, number: int) -> bool:
        """Whether the script commits after this many steps."""
        ends = STEPS if self.epochs else self.steps
        return number % self.every == 0 or number % ends == 0


@dataclass(frozen=True)
class Fault:
    """``kind``: kill, stop, pause, fail, drain, grow. ``who``: the worker's number, in the order of their
    start. The fault happens at ``point`` of ``step``. Outside of steps, ``step`` counts how often the point
    was met."""

    kind: str
    who: int
    point: str
    step: int


# ---------------------------------------------------------------- data


def sample(i: int, of: str) -> tuple[int, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(i)
    kind = torch.float32 if of == "consistent" else torch.float64
    x = torch.randn(6, generator=source, dtype=kind)
    return i, x, x.sum(0, keepdim=True).sin()


class Indexed(Dataset[Any]):
    def __init__(self, of: str) -> None:
        self.of = of

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return sample(i, self.of)


class Flow(IterableDataset[Any]):
    """A stream. ``deals``: shards by loading process, as torch's documentation shows."""

    def __init__(self, of: str, deals: bool) -> None:
        self.of, self.deals, self.epoch = of, deals, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, by = (info.id, info.num_workers) if info is not None and self.deals else (0, 1)
        return (sample((i * 7 + self.epoch) % SAMPLES, self.of) for i in range(first, SAMPLES, by))


def data_of(script: Script) -> worker.Data | None:
    of = "consistent" if script.consistent else ""
    if script.data == "numbers":
        return None
    dataset = Indexed(of) if script.data == "map" else Flow(of, script.data == "sharding")
    return worker.Data(
        dataset,
        global_batch=BATCH,
        virtual_ranks=2 if script.kind == "bn" else 4,  # BatchNorm wants two samples or more
        accumulate=script.accumulate,
        consistent=script.consistent,
        seed=script.seed,
        epochs=EPOCHS,
        num_workers=script.loaders,
    )


# ---------------------------------------------------------------- faults


class Faults:
    """The faults of this worker."""

    def __init__(self, faults: list[Fault], wishes: str) -> None:
        self._ahead = list(faults)
        self._wishes = wishes
        self._seen: dict[str, int] = {}

    def at(self, point: str, step: int) -> None:
        for fault in [f for f in self._ahead if (f.point, f.step) == (point, step)]:
            self._ahead.remove(fault)
            self._befall(fault)

    def count(self, point: str) -> None:
        """Count that a point outside of steps was met."""
        self._seen[point] = self._seen.get(point, 0) + 1
        self.at(point, self._seen[point])

    def wants(self, point: str, step: int) -> bool:
        return any((f.point, f.step) == (point, step) for f in self._ahead)

    def _befall(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fail":
                raise ValueError("a fault of the script's own")
            case kind:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wishes:
                    wishes.sendto(f"{kind} {os.getpid()}".encode(), "\0" + self._wishes)
                if kind in ("stop", "pause"):
                    os.kill(os.getpid(), signal.SIGSTOP)


def trip_outside(faults: Faults) -> None:
    init, begin, carry = dist.init_process_group, transfer._Chain.__init__, transfer._Chain._carry
    read, has_read = transfer.PeerMemory.read, transfer._has_read
    carried = 0

    def form(*args: Any, **kwargs: Any) -> None:
        if not is_rehearsing():
            faults.count("forming")
        init(*args, **kwargs)

    def set_out(chain: Any, *args: Any) -> None:
        nonlocal carried
        carried = 0
        begin(chain, *args)

    def stumble(chain: Any, piece: torch.Tensor) -> None:
        nonlocal carried
        carried += 1
        if carried == 3:
            faults.count("sending" if chain._before is None else "receiving")
        carry(chain, piece)

    def stumble_at_a_tensor(memory: Any, number: int, place: torch.Tensor) -> None:
        if number == 2:
            faults.count("receiving")
        read(memory, number, place)

    def stumble_at_a_reader(reader: int) -> bool:
        faults.count("sending")
        return has_read(reader)

    dist.init_process_group = form
    transfer._Chain.__init__, transfer._Chain._carry = set_out, stumble
    transfer.PeerMemory.read = stumble_at_a_tensor  # type: ignore[method-assign]
    transfer._has_read = stumble_at_a_reader


# ---------------------------------------------------------------- the script


def source(name: str) -> torch.Generator:
    """Return the source of a worker's own random numbers."""
    return torch.Generator().manual_seed(sum(name.encode()))


def drawn_from(source: torch.Generator) -> float:
    return float(torch.rand(1, generator=source, dtype=torch.float32))


class Ledger:
    def __init__(self, folder: Path, name: str) -> None:
        self._file = os.open(folder / f"{name}.ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **what: Any) -> None:
        os.write(self._file, json.dumps(what).encode() + b"\n")


def build(script: Script) -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(script.seed)
    random.seed(script.seed)
    torch.set_default_dtype(torch.float32 if script.consistent else torch.float64)
    middle: list[nn.Module] = [nn.BatchNorm1d(8), nn.Dropout(0.1)] if script.kind == "bn" else []
    model = nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 1))
    modules: dict[str, nn.Module] = {"model": model}
    if script.codes:
        model.register_buffer("codes", torch.zeros(70_000))
    if script.kind == "two":
        modules["head"] = nn.Linear(1, 1)
    parameters = [p for module in modules.values() for p in module.parameters()]
    make = {
        "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "adamw": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
        "amsgrad": functools.partial(torch.optim.Adam, lr=0.01, eps=1e-3, amsgrad=True, foreach=True),
        "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, eps=1e-3),
        "fused": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3, fused=True),
        "closure": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "lbfgs": functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=3, history_size=3),
    }[script.optimizer]
    optimizers: dict[str, torch.optim.Optimizer] = {"optimizer": make(parameters)}
    if script.follows:
        modules["follower"] = copy.deepcopy(model).requires_grad_(False)
    if script.kind == "gan":
        optimizers = {"optimizer": make(model[0].parameters()), "second": make(model[2].parameters())}
    return modules, optimizers


def schedule_of(script: Script, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    schedules = torch.optim.lr_scheduler
    if script.schedule == "exponential":
        return {"schedule": schedules.ExponentialLR(optimizer, 0.9)}
    if script.schedule == "onecycle":
        return {"schedule": schedules.OneCycleLR(optimizer, 0.05, total_steps=script.steps + 2)}
    if script.schedule == "warm":
        return {"schedule": schedules.CosineAnnealingWarmRestarts(optimizer, 3)}
    return {}


def wrap_of(script: Script) -> dict[str, Any]:
    options = {
        "unused": {"find_unused_parameters": True},
        "view": {"gradient_as_bucket_view": True},
        "static": {"static_graph": True},
        "small": {"bucket_cap_mb": 0.0001},
    }.get(script.ddp)
    if options is None:
        return {}
    return {"wrap": lambda model: DistributedDataParallel(model, init_sync=False, **options)}


class Training:
    def __init__(self, script: Script, faults: Faults, ledger: Ledger, folder: Path, name: str) -> None:
        self.script, self.faults, self.ledger = script, faults, ledger
        modules, optimizers = build(script)
        others: dict[str, Any] = {}
        if script.scaler:
            others["scaler"] = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        if script.local:
            others |= {"own": worker.Local([]), "source": worker.Local(source(name))}
        self.state = worker.State(
            **modules,
            **optimizers,
            **others,
            **schedule_of(script, optimizers["optimizer"]),
            **wrap_of(script),
            data=data_of(script),
            checkpoints=str(folder / "checkpoints") if script.checkpoints else None,
            seen=[],
            ended=[],
            total=0.0,
            table={},
            noise=torch.Generator().manual_seed(script.seed),
            undo=script.undo,
        )
        self.optimizers = optimizers
        self.number = -1
        self.told, self.summed = True, torch.zeros(())
        register_optimizer_step_pre_hook(lambda *_: faults.at("in the optimizer", self.number))
        register_optimizer_step_post_hook(lambda *_: faults.at("after an optimizer", self.number))
        keep = self.state._committed.last.keep

        def kept() -> None:
            faults.at("in commit", self.number)
            keep()

        self.state._committed.last.keep = kept  # type: ignore[method-assign]

    def loop(self, state: worker.State) -> None:
        number = state._committed.world.number if state._committed.world is not None else 1
        self.ledger.write(entered=number, step=state.step, rank=worker.rank(), world=worker.world_size())
        if self.script.epochs:
            for epoch in state.epochs(EPOCHS, steps=STEPS if self.script.epochs == "steps" else None):
                self.go_through(epoch)
                self.faults.at("after an epoch", self.number)
                drawn = float(torch.rand(1, generator=state.noise))
                state.ended.append([epoch.number, state.step, drawn])
            return
        halves = [self.script.steps // 2 // self.script.every * self.script.every, self.script.steps]
        for until in halves if self.script.twice else halves[1:]:
            self.go_through(state.steps(until))

    def go_through(self, steps: Iterable[Any]) -> None:
        state = self.state
        for step in steps:
            self.number = step if isinstance(step, int) else step.number
            self.faults.at("start", self.number)
            if (
                self.script.spoilt
                and state._committed.world is not None
                and state._committed.world.number > 1
            ):
                self.spoil(state)
            commits = self.script.commits(self.number + 1)
            self.make(step, commits)
            if commits:
                self.commit()
            self.faults.at("committed", self.number)

    def spoil(self, state: worker.State) -> None:
        spoilt, self.script = self.script.spoilt, replace(self.script, spoilt="")
        if spoilt == "skips":
            state._committed.step += 1
        elif spoilt == "forgets":
            state.own.pop()
        elif spoilt == "repeats":
            self.ledger.write(took=self.number, ids=[0])
        else:
            with torch.no_grad():
                next(iter(state._contents.modules["model"].parameters())).add_(1e-4)

    def commit(self) -> None:
        before = self.state.step
        try:
            self.state.commit()
        finally:
            if self.state.step > before:
                self.ledger.write(committed=self.state.step)

    def make(self, step: Any, commits: bool) -> None:
        """Make a step. One update has the gradients of all steps that a commit covers."""
        self.note()
        if self.script.unfreezes:
            self.trained[0].requires_grad_(self.number >= 4)
        if self.script.follows == "averages" and self.number % 2:
            self.evaluate()
        if self.script.follows == "early" and commits:
            self.follow()
        if not commits:
            self.gradients(step)
            return
        if self.script.optimizer == "closure":
            for optimizer in self.optimizers.values():
                optimizer.step(lambda: self.gradients(step))
        elif self.script.optimizer == "lbfgs":
            self.again_and_again(step)
        else:
            self.gradients(step)
            self.update()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        if self.script.codes:
            self.trained.codes.data.add_(1.0)
        if self.script.follows == "averages":
            self.follow()
        self.faults.at("stepped", self.number)
        if self.script.schedule:
            self.state.schedule.step()

    @property
    def trained(self) -> Any:
        """Return the model, not wrapped."""
        return self.state._contents.modules["model"]

    def note(self) -> None:
        """Change plain data that has keys of all kinds."""
        self.state.seen.append(self.number)
        drawn = float(torch.rand(1, generator=self.state.noise))
        self.state.table[self.number] = {"a.b": drawn, "a": {"b": str(self.number)}, (1, None): True}
        if self.script.local:
            self.state.own.append([self.number, drawn_from(self.state.source)])

    def follow(self) -> None:
        with torch.no_grad():
            for mine, other in zip(
                self.state._contents.modules["follower"].parameters(), self.trained.parameters(), strict=True
            ):
                mine.data.mul_(0.5).add_(other.data, alpha=0.5)

    def evaluate(self) -> None:
        """Evaluate with the averages in place of the weights."""
        parameters = list(self.trained.parameters())
        own = [p.data.clone() for p in parameters]
        for mine, other in zip(
            parameters, self.state._contents.modules["follower"].parameters(), strict=True
        ):
            mine.data.copy_(other.data)
        self.trained.eval()
        with torch.no_grad():
            found = self.state.model(torch.ones(2, 6)).mean()
        self.faults.at("evaluated", self.number)
        dist.all_reduce(found)
        self.trained.train()
        for mine, data in zip(parameters, own, strict=True):
            mine.data.copy_(data)

    def again_and_again(self, step: Any) -> None:
        [optimizer] = self.optimizers.values()
        calls = 0

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            self.gradients(step, told=calls == 1)
            return self.summed

        optimizer.step(closure)

    def gradients(self, step: Any, told: bool = True) -> float:
        """Compute the gradients of a step. ``told``: write the used samples to the ledger."""
        self.told, self.summed = told, torch.zeros(())
        if self.script.sharp:
            own = [p.detach().clone() for p in self.trained.parameters()]
            with torch.no_grad():
                for p in self.trained.parameters():
                    p.add_(0.01 * p.sign())
        if isinstance(step, int):
            self.of_own_samples(step)
        else:
            for batch in step:
                self.took(batch[0].tolist())
                loss = self.loss(batch)
                self.watch(loss)
                step.backward(loss)
        if self.script.sharp:
            with torch.no_grad():
                torch._foreach_copy_(list(self.trained.parameters()), own)
        self.faults.at("summed", self.number)
        return 0.0

    def of_own_samples(self, step: int) -> None:
        """Without Data: use this rank's share of a batch, in micro-batches, as DDP scripts do."""
        whole = [(step * BATCH + i) % SAMPLES for i in range(BATCH)]
        mine = whole[worker.rank() :: worker.world_size()]
        self.took(mine)
        pieces = [mine[k :: self.script.accumulate] for k in range(self.script.accumulate)]
        for turn, piece in enumerate(pieces):
            model = self.state.model
            last = turn == len(pieces) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                ids, x, y = zip(*(sample(i, "") for i in piece), strict=True) if piece else ((), (), ())
                if not piece:  # this rank has no part of the batch
                    loss = model(torch.zeros(1, 6)).sum() * 0
                else:
                    share = len(piece) / BATCH * worker.world_size()
                    loss = self.loss((ids, torch.stack(x), torch.stack(y))) * share
                self.watch(loss)
                self.scaled(loss).backward()
                self.summed += loss.detach() / worker.world_size()
        if self.script.optimizer == "lbfgs":
            dist.all_reduce(self.summed)

    def took(self, ids: list[int]) -> None:
        if self.told:
            self.ledger.write(took=self.number, ids=ids)
        self.faults.at("fetched", self.number)

    def loss(self, batch: Any) -> torch.Tensor:
        _, x, y = batch
        with torch.autocast("cpu", torch.bfloat16, enabled=self.script.autocast):
            out = self.state.model(x)
        self.faults.at("forward", self.number)
        loss = (out - y).square().mean()
        return self.scaled(loss) if self.script.data != "numbers" else loss

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return self.state.scaler.scale(loss) if self.script.scaler else loss

    def watch(self, loss: torch.Tensor) -> None:
        if self.faults.wants("backward", self.number):
            number = self.number
            weight = next((p for p in self.trained.parameters() if p.requires_grad), None)
            if weight is not None:
                weight.register_hook(lambda _: self.faults.at("backward", number))

    def update(self) -> None:
        for optimizer in self.optimizers.values():
            if self.script.scaler:
                self.state.scaler.unscale_(optimizer)
                self.faults.at("unscaled", self.number)
            if self.script.clip:
                nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.5)
            if self.script.scaler:
                self.state.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.script.scaler:
            self.state.scaler.update()

    def outcome(self) -> dict[str, Any]:
        tensors: dict[str, list[float]] = {}
        exact = hashlib.sha256()
        for name, module in self.state._contents.modules.items():
            for key, tensor in module.state_dict().items():
                tensors[f"{name}.{key}"] = tensor.double().flatten().tolist()
                exact.update(tensor.contiguous().numpy().tobytes())
        for name, optimizer in self.optimizers.items():
            for number, values in sorted(optimizer.state_dict()["state"].items()):
                for key, value in values.items():
                    if isinstance(value, torch.Tensor) and self.script.optimizer != "lbfgs":
                        tensors[f"{name}.{number}.{key}"] = value.double().flatten().tolist()
                        exact.update(value.contiguous().numpy().tobytes())
        rates = [g["lr"] for o in self.optimizers.values() for g in o.param_groups]
        scale = self.state.scaler.get_scale() if self.script.scaler else 1.0
        plain = {"seen": self.state.seen, "rates": rates, "scale": scale, "step": self.state.step,
                 "table": str(self.state.table), "ended": self.state.ended}  # fmt: skip
        own = self.state.own if self.script.local else []
        return {"tensors": tensors, "digest": exact.hexdigest(), "plain": plain, "own": own}


def work(
    address: str, folder: str, name: str, script: dict[str, Any], faults: list[dict[str, Any]], wishes: str
) -> None:
    """Run the script of one worker. Without an address the script runs undisturbed, in a world of its own."""
    torch.set_num_threads(1)
    where = Path(folder)
    sys.stderr = (where / f"{name}.err").open("w", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)  # also the output of torch and of the savers
    faulthandler.register(signal.SIGUSR1)
    multiprocessing.set_start_method("fork", force=True)  # as in a process that a server has not forked
    os.environ.pop(ADDRESS, None)
    os.environ.pop("ELASTICD_SAVER", None)
    if address:
        os.environ |= {ADDRESS: address, "ELASTICD_ROUND": "0"}
    trips = Faults([Fault(**f) for f in faults], wishes)
    trip_outside(trips)
    plan = Script(**script)
    if plan.late:
        connecting.MOST_AT_ONCE = 1
    if plan.apart:
        exchange.reach = lambda: 0
    training = Training(plan, trips, Ledger(where, name), where, name)
    run = worker.run(within(plan.wrapper, training))
    run(training.state)
    trips.count("returned")
    ended = where / f"{name}.outcome"
    ended.write_text(json.dumps(training.outcome()))


def within(wrapper: str, training: Training) -> Callable[[worker.State], None]:
    """Return the loop inside the code that scripts have around it."""

    def exits(state: worker.State) -> None:
        try:
            training.loop(state)
        except Exception as error:
            print("training failed:", error, file=sys.stderr)
            sys.exit(1)

    def cleans(state: worker.State) -> None:
        try:
            training.loop(state)
        finally:
            time.sleep(0)
            if training.state.step < training.script.steps:
                raise OSError("nothing to clean up")

    return {"": training.loop, "exits": exits, "cleans": cleans}[wrapper]
