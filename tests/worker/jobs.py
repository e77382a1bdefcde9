"""What the workers of these tests run: a small model whose every step is the same in a world of any
size, and the accidents that befall them."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elasticd import worker
from elasticd.channel.worker_messages import ADDRESS
from elasticd.worker.world import exchange, group

run_loop = importlib.import_module("elasticd.worker.run")  # its function has the module's name

STEPS = 12

torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports a great deal, and should not in each worker


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Journal:
    """What this worker did, line by line as it happened; what it ended with."""

    def __init__(self, folder: str, name: str) -> None:
        self.path = Path(folder) / f"{name}.jsonl"

    def write(self, **what: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\n")


def take_the_same_of_all(model: nn.Module) -> DistributedDataParallel:
    """Every rank computes the same gradients: their maximum is exact in a world of any size."""
    wrapped = DistributedDataParallel(model, init_sync=False)

    def largest(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.MAX, async_op=True)
        return work.get_future().then(lambda f: f.value()[0])

    largest.__annotations__.clear()
    wrapped.register_comm_hook(None, largest)
    return wrapped


def make(exact: bool = True, width: int = 64, compiled: bool = False, **more: Any) -> worker.State:
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    model = nn.Sequential(
        nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 1)
    )
    if compiled:
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    how = {"wrap": take_the_same_of_all} if exact else {}
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return worker.State(
        model=model, optimizer=optimizer, schedule=schedule, drawn=0.0, seen=[], **how, **more
    )


def outcome(state: worker.State) -> dict[str, Any]:
    """Everything that training has led to."""
    tensors = [*state._contents.modules["model"].state_dict().values()]
    tensors += [t for values in state.optimizer.state_dict()["state"].values() for t in values.values()]
    return {
        "weights": [t.double().flatten().tolist() for t in tensors],
        "drawn": state.drawn,
        "seen": state.seen,
        "rate": state.optimizer.param_groups[0]["lr"],
        "next": [torch.rand(1).item(), random.random(), np.random.rand()],
    }


class Accident:
    """At ``point`` of the step ``step``, do ``what``, once.

    Points: start, forward, backward, summed, in the optimizer, stepped, committed; returned, when the
    run function has; forming, when all have come to form the group; sending and receiving, in the
    middle of this worker's transfer of that number.
    """

    def __init__(self, point: str = "", step: int = -1, what: Any = die) -> None:
        self.point, self.step, self.what = point, step, what

    def __call__(self, point: str, step: int) -> None:
        if point == self.point and step == self.step:
            self.point = ""
            self.what()


NOTHING = Accident()
LEAVING = threading.Event()


def hear_of_leaving() -> None:
    """Have LEAVING be set where this worker is told to leave its world."""
    ask = group.World.ask_to_leave

    def tell(this: group.World, going: bool) -> None:
        ask(this, going)
        LEAVING.set()

    group.World.ask_to_leave = tell  # type: ignore[method-assign]


class Gate:
    """A place where workers wait until the test lets them go on: a pair of named pipes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.came = path.with_suffix(".came")
        for pipe in (self.path, self.came):
            if not pipe.exists():
                os.mkfifo(pipe)

    def wait(self) -> None:
        """One worker only."""
        self.came.write_text("here")
        self.path.read_text()

    def wait_and_leave(self) -> None:
        """In a worker that hears of it: until it is told to leave its world, too."""
        self.wait()
        LEAVING.wait()

    def until_somebody_waits(self) -> None:
        self.came.read_text()

    def open(self) -> None:
        self.path.write_text("go on")


class Mishap(ValueError):
    """An error of the user's own."""


def fail() -> None:
    raise Mishap("the data is bad")


def lose_the_others(gate: Gate) -> None:
    """As gloo says it, where the network has forgotten a connection."""
    gate.wait()
    raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection reset by peer")


def run_out_of_memory() -> None:
    """As torch's own allocator does."""
    torch.empty(1 << 50)


def wait_for_word_of_the_third() -> None:
    dist.recv(torch.zeros(1), 2)


def wait_for_word_of_anyone() -> None:
    dist.recv(torch.zeros(1))


def commit(state: worker.State, journal: Journal) -> None:
    """Noted also where the world ends with it."""
    committed = state.step
    try:
        state.commit()
    finally:
        if state.step > committed:
            journal.write(committed=state.step)


def train(
    state: worker.State,
    journal: Journal,
    accident: Accident,
    steps: int = STEPS,
    begins: Callable[[int], None] = lambda step: None,
) -> None:
    journal.write(entered=state.step, world=worker.world_size(), rank=worker.rank())
    model, optimizer = state.model, state.optimizer
    for step in state.steps(steps):
        accident("start", step)
        begins(step)
        state.drawn += random.random() + np.random.rand()
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        accident("forward", step)
        if accident.point == "backward" and accident.step == step:
            weight = next(iter(state._contents.modules["model"].parameters()))
            weight.register_hook(lambda _, step=step: accident("backward", step))
        loss.backward()
        accident("summed", step)
        optimizer.step()
        accident("stepped", step)
        state.schedule.step()
        state.seen.append(step)
        commit(state, journal)
        accident("committed", step)


def work(address: str, folder: str, name: str, accident: Accident = NOTHING, **options: Any) -> None:
    """A whole script. Without an address: in a world of its own."""
    begin(address, folder, name)
    os.environ.pop("ELASTICD_SAVER", None)
    if saver := options.pop("saver", ""):
        os.environ["ELASTICD_SAVER"] = saver
    journal = Journal(folder, name)
    if accident.point in ("sending", "receiving"):
        trip_on_the_way(accident)
    if accident.point == "in the optimizer":
        trip_in_the_optimizer(accident)
    if accident.point == "forming":
        trip_while_forming(accident)
    steps = options.pop("steps", STEPS)
    body = options.pop("body", train)
    state = make(**options)

    @worker.run
    def run(state: worker.State) -> None:
        body(state, journal, accident, steps)
        accident("returned", state.step)

    run(state)
    journal.write(outcome=outcome(state))


def work_impatiently(address: str, folder: str, name: str, accident: Accident, **options: Any) -> None:
    """Says soon that it has lost the others."""
    run_loop.NEWS_S = run_loop.NEWS_S_MAX = 0.1
    group.FORMING_S_MAX = 0.5
    work(address, folder, name, accident, **options)


def work_patiently(address: str, folder: str, name: str) -> None:
    """Waits for a store that does not answer for as long as it is let; the gate tells that it waits."""
    group.STORE_S_MAX = 3600.0
    wait = dist.TCPStore.wait

    def waits(store: dist.TCPStore, *args: Any) -> None:
        Gate(Path(folder, "gate")).came.write_text("here")
        wait(store, *args)

    dist.TCPStore.wait = waits
    work(address, folder, name)


def work_twice(address: str, folder: str, name: str) -> None:
    """A script in two parts, which are two jobs."""
    work(address, folder, name, steps=2)
    work(address, folder, name, steps=2)


def train_whatever_happens(state: worker.State, journal: Journal, accident: Accident, steps: int) -> None:
    """Skips what fails, as some scripts do."""
    journal.write(entered=state.step, world=worker.world_size(), rank=worker.rank())
    optimizer = state.optimizer
    for step in state.steps(steps):
        try:
            accident("start", step)
            state.drawn += random.random() + np.random.rand()
            batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = state.model(batch).pow(2).mean()
            accident("forward", step)
            loss.backward()
        except Exception as error:
            journal.write(skipped=str(error))
        optimizer.step()
        state.schedule.step()
        state.seen.append(step)
        commit(state, journal)


def train_and_swallow_everything(
    state: worker.State, journal: Journal, accident: Accident, steps: int
) -> None:
    """Goes on and on until it has made its steps, and never hears that the world is over."""
    while state.step < steps:
        try:
            step = state.step
            accident("start", step)
            state.drawn += random.random() + np.random.rand()
            batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            state.optimizer.zero_grad()
            state.model(batch).pow(2).mean().backward()
            state.optimizer.step()
            state.schedule.step()
            state.seen.append(step)
            commit(state, journal)
        except:  # noqa: E722
            accident("swallowed", step)


def train_and_exit_on_errors(state: worker.State, journal: Journal, accident: Accident, steps: int) -> None:
    """The commonest wrapper of all."""
    try:
        train(state, journal, accident, steps)
    except Exception as error:
        journal.write(caught=type(error).__name__)
        sys.exit(1)


def train_and_exit_on_anything(state: worker.State, journal: Journal, accident: Accident, steps: int) -> None:
    try:
        train(state, journal, accident, steps)
    except BaseException as error:
        journal.write(caught=type(error).__name__)
        raise SystemExit("training failed") from ValueError("of another kind")


def train_and_fail_to_clean_up(state: worker.State, journal: Journal, accident: Accident, steps: int) -> None:
    cleaned = False
    try:
        train(state, journal, accident, steps)
        cleaned = True
    finally:
        if not cleaned:
            journal.write(caught="finally")
            raise OSError("the folder is gone already")


def train_and_return_whatever_happens(
    state: worker.State, journal: Journal, accident: Accident, steps: int
) -> None:
    try:
        train(state, journal, accident, steps)
    except:  # noqa: E722
        journal.write(caught="anything")


def make_gradients(state: worker.State, accident: Accident, step: int) -> None:
    accident("start", step)
    state.drawn += random.random() + np.random.rand()
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    state.optimizer.zero_grad()
    loss = state.model(batch).pow(2).mean()
    accident("forward", step)
    loss.backward()


def make_step(state: worker.State, journal: Journal, accident: Accident, step: int) -> None:
    make_gradients(state, accident, step)
    state.optimizer.step()
    state.schedule.step()
    state.seen.append(step)
    commit(state, journal)


def train_and_suppress_errors(state: worker.State, journal: Journal, accident: Accident, steps: int) -> None:
    """Each step by itself."""
    journal.write(entered=state.step, world=worker.world_size(), rank=worker.rank())
    for step in state.steps(steps):
        with contextlib.suppress(Exception):
            make_step(state, journal, accident, step)


def train_and_go_on_past_anything(
    state: worker.State, journal: Journal, accident: Accident, steps: int
) -> None:
    """Each step by itself, whatever comes out of it."""
    journal.write(entered=state.step, world=worker.world_size(), rank=worker.rank())
    for step in state.steps(steps):
        try:
            make_step(state, journal, accident, step)
        except:  # noqa: E722
            journal.write(caught="anything")


def train_and_commit_now_and_then(
    state: worker.State, journal: Journal, accident: Accident, steps: int
) -> None:
    """Every third step."""
    journal.write(entered=state.step, world=worker.world_size(), rank=worker.rank())
    for step in state.steps(steps):
        make_gradients(state, accident, step)
        if step % 3 == 2:
            state.optimizer.step()
            state.schedule.step()
        state.seen.append(step)
        if step % 3 == 2:
            commit(state, journal)


def train_and_count_graphs(state: worker.State, journal: Journal, accident: Accident, steps: int) -> None:
    """How many of them were compiled by the beginning of each step."""
    from torch._dynamo.utils import counters

    def note(_: int) -> None:
        journal.write(graphs=counters["stats"]["unique_graphs"])

    train(state, journal, accident, steps, begins=note)


def train_and_talk_before_the_commit(
    state: worker.State, journal: Journal, accident: Accident, steps: int
) -> None:
    """To have the mean loss, in the one place where that is not to be done."""
    journal.write(entered=state.step, world=worker.world_size(), rank=worker.rank())
    for step in state.steps(steps):
        state.drawn += random.random() + np.random.rand()
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        state.optimizer.zero_grad()
        loss = state.model(batch).pow(2).mean()
        loss.backward()
        state.optimizer.step()
        state.schedule.step()
        state.seen.append(step)
        accident("stepped", step)
        if step % 2:
            dist.all_reduce(loss.detach())
        commit(state, journal)


def train_without_commit(state: worker.State, journal: Journal, accident: Accident, steps: int) -> None:
    journal.write(entered=state.step, world=worker.world_size(), rank=worker.rank())
    for step in state.steps(steps):
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        state.optimizer.zero_grad()
        state.model(batch).pow(2).mean().backward()
        accident("summed", step)
        state.optimizer.step()


def train_astray(state: worker.State, journal: Journal, accident: Accident, steps: int) -> None:
    """What this worker makes of a step in which it was held up is not what the others make of it."""

    def go_astray(what: Callable[[], None] = accident.what) -> None:
        what()
        for parameter in state._contents.modules["model"].parameters():
            parameter.grad.fill_(100.0)

    accident.what = go_astray
    train(state, journal, accident, steps)


def train_with_a_group_of_its_own(
    state: worker.State, journal: Journal, accident: Accident, steps: int
) -> None:
    """Each step begins with a sum in a process group that the script makes."""
    mine = dist.new_group()

    def meet(step: int) -> None:
        accident("start", step)
        sum = dist.all_reduce(torch.zeros(1), group=mine, async_op=True)
        accident("met", step)
        sum.wait()

    train(state, journal, Accident(), steps, begins=meet)


def train_with_own_randomness(state: worker.State, journal: Journal, accident: Accident, steps: int) -> None:
    """Each rank seeds for itself, and draws."""
    for step in state.steps(steps):
        accident("start", step)
        torch.manual_seed(worker.rank()) if step == 0 else None
        drawn = torch.rand(1).item()
        dist.all_reduce(torch.zeros(1))
        state.commit()
        journal.write(committed=state.step, drew=drawn)


def begin(address: str, folder: str, name: str) -> None:
    torch.set_num_threads(1)
    sys.stderr = (Path(folder) / f"{name}.err").open("w", buffering=1)
    if address:
        os.environ[ADDRESS] = address


def trip_on_the_way(accident: Accident) -> None:
    """In the transfer numbered ``accident.step``: the outline has gone over, the tensors have not."""
    carry, begin = exchange._Chain.carry, exchange._Chain.__init__
    transfers = carried = 0

    def set_out(chain: Any, *args: Any) -> None:
        nonlocal transfers, carried
        transfers, carried = transfers + 1, 0
        begin(chain, *args)

    def stumble(chain: Any, parcel: torch.Tensor) -> torch.Tensor:
        nonlocal carried
        carried += 1
        if carried == 3:
            accident("sending" if chain._before is None else "receiving", transfers)
        return carry(chain, parcel)

    exchange._Chain.__init__, exchange._Chain.carry = set_out, stumble


def trip_while_forming(accident: Accident) -> None:
    """All have come, and one does not connect; it does in the first ``accident.step`` rounds."""
    init = dist.init_process_group
    formed = 0

    def stumble(*args: Any, **kwargs: Any) -> None:
        nonlocal formed
        accident("forming", formed)
        formed += 1
        init(*args, **kwargs)

    dist.init_process_group = stumble


def trip_in_the_optimizer(accident: Accident) -> None:
    step = 0

    def stumble(*_: Any) -> None:
        nonlocal step
        accident("in the optimizer", step)
        step += 1

    register_optimizer_step_pre_hook(stumble)


def reads(folder: Path, name: str, what: str) -> list[Any]:
    """All that the worker wrote under that key."""
    path = folder / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry[what] for entry in map(json.loads, lines) if what in entry]


def work_slowly(address: str, folder: str, name: str) -> None:
    """The first worker takes longer to send the state, then to compute its part, and then to send a message
    of the script's own, than one may take to connect."""
    group.FORMING_S_MAX = 3.0
    send = exchange._send

    def send_late(*args: Any) -> None:
        time.sleep(group.FORMING_S_MAX + 0.5)
        send(*args)

    exchange._send = send_late
    samples = [(torch.full((8,), float(i)),) for i in range(8)]
    data = worker.Data(samples, global_batch=4, virtual_ranks=2, consistent=True)
    work(address, folder, name, body=train_slowly, exact=False, data=data)


def train_slowly(state: worker.State, journal: Journal, accident: Accident, steps: int) -> None:
    for step in state.steps():
        for (x,) in step:
            if worker.rank() == 0 and step.number == 0:
                time.sleep(group.FORMING_S_MAX + 0.5)
            step.backward(state.model(x).square().mean())
        if worker.rank() == 0 and step.number == 1:
            time.sleep(group.FORMING_S_MAX + 0.5)
            dist.send(torch.ones(1), 1)
            dist.send(torch.ones(1), 1)
        elif step.number == 1:
            assert dist.recv(torch.zeros(1)) == 0
            assert dist.irecv(torch.zeros(1), 0).wait()
        state.optimizer.step()
        state.optimizer.zero_grad()
        commit(state, journal)


def lone(_address: str, folder: str) -> None:
    """``work`` without an agent. Not in conftest.py, a name that other folders have, too."""
    work("", folder, "alone")
