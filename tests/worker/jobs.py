"""The jobs that the workers of these tests run: a small model whose steps are the same in a world of any
size, and the accidents that happen to the workers."""

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
from elasticd.checkpoint.client import levels
from elasticd.checkpoint.client.collectives import TwoLevelGroup, rank_group
from elasticd.worker.joining import exchange, transfer
from elasticd.worker.world import connecting, group

run_loop = importlib.import_module("elasticd.worker.run")  # the module has a function of its own name

STEPS = 12

torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports many modules: once, before workers are forked


def is_rehearsing() -> bool:
    """Whether this worker forms a world alone, before it has a round."""
    return any(world.number == 0 for world in group._present)


def begin(address: str, folder: str, name: str, saver: str = "") -> Journal:
    """Begin a worker's script. Without an address the script runs in a world of its own. The worker's errors
    go to NAME.err."""
    torch.set_num_threads(1)
    sys.stderr = (Path(folder) / f"{name}.err").open("w", buffering=1)
    os.environ.pop("ELASTICD_SAVER", None)
    if address:
        os.environ |= {ADDRESS: address, "ELASTICD_ROUND": "0"}
    if saver:
        os.environ["ELASTICD_SAVER"] = saver
    return Journal(folder, name)


class Journal:
    """What a worker did, one line of JSON for each event."""

    def __init__(self, folder: str, name: str) -> None:
        self.path = Path(folder) / f"{name}.jsonl"

    def write(self, **what: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\n")


def reads(folder: Path, name: str, what: str) -> list[Any]:
    """Return everything that the worker wrote into its journal under the key ``what``."""
    path = folder / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry[what] for entry in map(json.loads, lines) if what in entry]


# ---------------------------------------------------------------- accidents


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Accident:
    """At ``point`` of the step ``step``, call ``what``, once. The accident ``then`` can happen after that.

    Points: start, forward, backward, summed, in the optimizer, stepped, committed. Further points: returned,
    when the run function has returned; forming, when all workers have come to form the group; sending and
    receiving, in the middle of this worker's transfer of that number.
    """

    def __init__(
        self, point: str = "", step: int = -1, what: Any = die, then: Accident | None = None
    ) -> None:
        self.point, self.step, self.what, self.then = point, step, what, then

    def __call__(self, point: str, step: int) -> None:
        if point == self.point and step == self.step:
            self.point, what = "", self.what
            if self.then:
                self.__dict__.update(vars(self.then))
            what()


NOTHING = Accident()
TENSORS_FIRST = 0  # the pieces of tensors that a transfer has sent when it meets an accident
LEAVING = threading.Event()


def hear_of_leaving() -> None:
    """Set LEAVING when this worker is told to leave its world."""
    ask = group.World.ask_to_leave

    def tell(this: group.World, going: bool) -> None:
        ask(this, going)
        LEAVING.set()

    group.World.ask_to_leave = tell  # type: ignore[method-assign]


class Gate:
    """A place where a worker waits until the test opens it: a pair of named pipes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.came = path.with_suffix(".came")
        for pipe in (self.path, self.came):
            with contextlib.suppress(FileExistsError):  # the worker and the test both try to make the pipes
                os.mkfifo(pipe)

    def wait(self) -> None:
        """Wait for ``open``. Only one worker can wait."""
        self.came.write_text("here")
        self.path.read_text()

    def wait_and_leave(self) -> None:
        """Wait for ``open``, and then until this worker is told to leave its world. See
        ``hear_of_leaving``."""
        self.wait()
        LEAVING.wait()

    def until_somebody_waits(self) -> None:
        self.came.read_text()

    def open(self) -> None:
        self.path.write_text("go on")


class Mishap(ValueError):
    """An error of the user's code."""


def fail() -> None:
    raise Mishap("the data is bad")


def lose_the_others(gate: Gate) -> None:
    """Raise what gloo raises after a connection was lost."""
    gate.wait()
    raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection reset by peer")


def run_out_of_memory() -> None:
    """Raise what torch's allocator raises."""
    torch.empty(1 << 50)


def wait_for_word_of_the_third() -> None:
    dist.recv(torch.zeros(1), 2)


def wait_for_word_of_anyone() -> None:
    dist.recv(torch.zeros(1))


def trip_on_the_way(accident: Accident) -> None:
    """Fail in the transfer numbered ``accident.step``. By messages, the list of tensors was sent and
    ``TENSORS_FIRST`` pieces of them, and the other tensors were not. Through memory, this worker is about to
    read the first tensor, or the source to hear of the first reader."""
    carry, begin = transfer._Chain._carry, transfer._Chain.__init__
    show, read, has_read = transfer._show, transfer.PeerMemory.read, transfer._has_read
    transfers = carried = 0

    def set_out(chain: Any, *args: Any) -> None:
        nonlocal transfers, carried
        transfers, carried = transfers + 1, 0
        begin(chain, *args)

    def stumble(chain: Any, piece: torch.Tensor) -> None:
        nonlocal carried
        if carried == 2 + TENSORS_FIRST:
            accident("sending" if chain._before is None else "receiving", transfers)
        carried += 1
        carry(chain, piece)

    def set_out_to_show(*args: Any) -> None:
        nonlocal transfers
        transfers += 1
        show(*args)

    def stumble_at_a_reader(reader: int) -> bool:
        accident("sending", transfers)
        return has_read(reader)

    def stumble_at_a_tensor(memory: Any, number: int, place: torch.Tensor) -> None:
        nonlocal transfers
        if number == 0:
            transfers += 1
            accident("receiving", transfers)
        read(memory, number, place)

    transfer._Chain.__init__, transfer._Chain._carry = set_out, stumble
    transfer._show, transfer._has_read = set_out_to_show, stumble_at_a_reader
    transfer.PeerMemory.read = stumble_at_a_tensor  # type: ignore[method-assign]


def trip_while_forming(accident: Accident) -> None:
    """Fail before connecting, though all workers have come. This happens in the first ``accident.step``
    rounds. A rehearsal is not counted."""
    init = dist.init_process_group
    formed = 0

    def stumble(*args: Any, **kwargs: Any) -> None:
        nonlocal formed
        if not is_rehearsing():
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


TRIPS: dict[str, Callable[[Accident], None]] = {
    "sending": trip_on_the_way,
    "receiving": trip_on_the_way,
    "forming": trip_while_forming,
    "in the optimizer": trip_in_the_optimizer,
}


# ---------------------------------------------------------------- the script


def take_the_same_of_all(model: nn.Module) -> DistributedDataParallel:
    """Wrap the model. All ranks compute the same gradients; their maximum is exact in a world of any size."""
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
    """Return all values that training has led to."""
    tensors = [*state._contents.modules["model"].state_dict().values()]
    tensors += [t for values in state.optimizer.state_dict()["state"].values() for t in values.values()]
    return {
        "weights": [t.double().flatten().tolist() for t in tensors],
        "drawn": state.drawn,
        "seen": state.seen,
        "rate": state.optimizer.param_groups[0]["lr"],
        "next": [torch.rand(1).item(), random.random(), np.random.rand()],
    }


def make_gradients(state: worker.State, accident: Accident, step: int) -> torch.Tensor:
    """Make a step's gradients, and return its loss."""
    accident("start", step)
    state.drawn += random.random() + np.random.rand()
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    state.optimizer.zero_grad()
    loss = state.model(batch).pow(2).mean()
    accident("forward", step)
    if (accident.point, accident.step) == ("backward", step):
        weight = next(iter(state._contents.modules["model"].parameters()))
        weight.register_hook(lambda _: accident("backward", step))
    loss.backward()
    accident("summed", step)
    return loss


def update(state: worker.State, accident: Accident, step: int) -> None:
    state.optimizer.step()
    accident("stepped", step)
    state.schedule.step()
    state.seen.append(step)


def commit(state: worker.State, journal: Journal) -> None:
    """Commit. Write the commit down even if the world ends with it."""
    committed = state.step
    try:
        state.commit()
    finally:
        if state.step > committed:
            journal.write(committed=state.step)


def make_step(state: worker.State, journal: Journal, accident: Accident, step: int) -> None:
    make_gradients(state, accident, step)
    update(state, accident, step)
    commit(state, journal)
    accident("committed", step)


def train(state, journal, accident, steps=STEPS, begins=lambda step: None):
    """Train: the body of most scripts. All bodies have these first four parameters."""
    journal.write(entered=state.step)
    for step in state.steps(steps):
        begins(step)
        make_step(state, journal, accident, step)


def work(address: str, folder: str, name: str, accident: Accident = NOTHING, **options: Any) -> None:
    """Run a whole script. ``body``, ``steps`` and ``saver`` are options; all others go to ``make``."""
    journal = begin(address, folder, name, options.pop("saver", ""))
    hear_of_leaving()
    for point in {each.point for each in (accident, accident.then) if each} & TRIPS.keys():
        TRIPS[point](accident)
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
    """Run a worker that soon reports that it has lost the others."""
    run_loop.NEWS_S = run_loop.NEWS_S_MAX = 0.1
    group.FORMING_S_MAX = 0.5
    work(address, folder, name, accident, **options)


def work_in_a_large_world(
    address: str, folder: str, name: str, accident: Accident = NOTHING, **options: Any
) -> None:
    """Run a worker that takes each world for a very large one."""
    connecting.MOST_AT_ONCE = 1
    work(address, folder, name, accident, **options)


def work_by_messages(
    address: str, folder: str, name: str, accident: Accident = NOTHING, **options: Any
) -> None:
    """Run a worker that cannot read the other workers' memory."""
    exchange.reach = lambda: 0
    work(address, folder, name, accident, **options)


def work_tensor_by_tensor(
    address: str, folder: str, name: str, accident: Accident = NOTHING, **options: Any
) -> None:
    """Run a worker that sends and takes each tensor by itself, in a message."""
    global TENSORS_FIRST
    transfer.ALONE_BYTES, TENSORS_FIRST = 32, 3
    work_by_messages(address, folder, name, accident, **options)


def work_with_torchs_checks(address: str, folder: str, name: str, accident: Accident, **options: Any) -> None:
    """Run a script as with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    work(address, folder, name, accident, **options)


def work_where_the_default_device_has_no_memory(
    address: str, folder: str, name: str, accident: Accident, *, sharded: bool
) -> None:
    """Run a script that names the device of each of its tensors, since it has set another default device."""
    journal = begin(address, folder, name)
    model = nn.Linear(8, 8)
    samples = [(torch.full((8,), float(i)),) for i in range(4 * STEPS)]
    how: dict[str, Any] = {"data": worker.Data(samples, global_batch=4, virtual_ranks=2, consistent=True)}
    if sharded:
        from torch.distributed.fsdp import fully_shard  # most scripts do without

        how |= {"shard": lambda model, mesh: fully_shard(model, mesh=mesh), "redundancy": 1}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.set_default_device("meta")

    @worker.run
    def run(state: worker.State) -> None:
        for step in state.steps(STEPS):
            for (x,) in step:
                step.backward(state.model(x).square().mean())
            accident("backward", step.number)
            optimizer.step()
            optimizer.zero_grad()
            commit(state, journal)

    run(worker.State(model=model, optimizer=optimizer, **how))


def work_patiently(address: str, folder: str, name: str) -> None:
    """Run a worker that waits without a limit for a store that does not answer. The gate tells that the
    worker waits."""
    group.STORE_S_MAX = 3600.0
    wait = dist.TCPStore.wait

    def waits(store: dist.TCPStore, *args: Any) -> None:
        Gate(Path(folder, "gate")).came.write_text("here")
        wait(store, *args)

    dist.TCPStore.wait = waits
    work(address, folder, name)


def work_twice(address: str, folder: str, name: str) -> None:
    """Run a script in two parts, which are two jobs."""
    work(address, folder, name, steps=2)
    work(address, folder, name, steps=2)


# ---------------------------------------------------------------- other bodies


def train_whatever_happens(state, journal, accident, steps):
    """Skip steps that fail, as some scripts do."""
    journal.write(entered=state.step)
    for step in state.steps(steps):
        try:
            make_gradients(state, accident, step)
        except Exception as error:
            journal.write(skipped=str(error))
        update(state, accident, step)
        commit(state, journal)


def train_and_swallow_everything(state, journal, accident, steps):
    """Go on until all steps are made. Never notice that the world is over."""
    while (step := state.step) < steps:
        try:
            make_step(state, journal, accident, step)
        except:  # noqa: E722
            accident("swallowed", step)


def train_and_exit_on_anything(state, journal, accident, steps):
    try:
        train(state, journal, accident, steps)
    except BaseException:
        raise SystemExit("training failed") from ValueError("of another kind")


def train_and_return_whatever_happens(state, journal, accident, steps):
    with contextlib.suppress(BaseException):
        train(state, journal, accident, steps)


def train_and_go_on_past_anything(state, journal, accident, steps):
    """Suppress everything that a step raises."""
    journal.write(entered=state.step)
    for step in state.steps(steps):
        with contextlib.suppress(BaseException):
            make_step(state, journal, accident, step)


def train_and_commit_now_and_then(state, journal, accident, steps):
    """Commit every third step."""
    journal.write(entered=state.step)
    for step in state.steps(steps):
        make_gradients(state, accident, step)
        state.seen.append(step)
        if step % 3 == 2:
            state.optimizer.step()
            state.schedule.step()
            commit(state, journal)


def train_and_count_graphs(state, journal, accident, steps):
    """Note at each step how many graphs have been compiled."""
    from torch._dynamo.utils import counters

    train(
        state,
        journal,
        accident,
        steps,
        begins=lambda _: journal.write(graphs=counters["stats"]["unique_graphs"]),
    )


def train_and_talk_before_the_commit(state, journal, accident, steps):
    """Add the losses up between the optimizer's step and the commit, where no script may."""
    journal.write(entered=state.step)
    for step in state.steps(steps):
        loss = make_gradients(state, accident, step)
        update(state, accident, step)
        if step % 2:
            dist.all_reduce(loss.detach())
        commit(state, journal)


def train_without_commit(state, journal, accident, steps):
    for step in state.steps(steps):
        make_gradients(state, accident, step)
        state.optimizer.step()


def train_astray(state, journal, accident, steps):
    """After the accident, make another step than the other workers make."""

    def go_astray(what: Callable[[], None] = accident.what) -> None:
        what()
        for parameter in state._contents.modules["model"].parameters():
            parameter.grad.fill_(100.0)

    accident.what = go_astray
    train(state, journal, accident, steps)


def train_with_a_group_of_its_own(state, journal, accident, steps):
    """Begin each step with a sum in a process group that the script makes."""
    mine = dist.new_group()

    def meet(step: int) -> None:
        accident("start", step)
        sum = dist.all_reduce(torch.zeros(1), group=mine, async_op=True)
        accident("met", step)
        sum.wait()

    train(state, journal, NOTHING, steps, begins=meet)


def train_and_agree_by_node(state, journal, accident, steps):
    """Begin each step with an agreement by node: each node has two ranks, but the last may have one."""
    os.environ["GROUP_RANK"] = str(worker.rank() // 2)
    levels.FLAT_MAX = 1
    accident("grouping", 0)
    ranks = rank_group()
    assert isinstance(ranks, TwoLevelGroup)

    def agree(step: int) -> None:
        answer = ranks.begin_minimum([step])
        accident("agreeing", step)
        assert answer() == [step]

    train(state, journal, NOTHING, steps, begins=agree)


def train_with_own_randomness(state, journal, accident, steps):
    """Seed each rank differently, and draw."""
    for step in state.steps(steps):
        accident("start", step)
        if step == 0:
            torch.manual_seed(worker.rank())
        drawn = torch.rand(1).item()
        dist.all_reduce(torch.zeros(1))
        state.commit()
        journal.write(committed=state.step, drew=drawn)


def work_slowly(address: str, folder: str, name: str) -> None:
    """Let the first worker be slow: to send the state, and then a message of the script's own, takes it
    longer than a worker may take to connect."""
    group.FORMING_S_MAX = 3.0
    send = exchange.send_snapshot

    def send_late(*args: Any) -> None:
        time.sleep(group.FORMING_S_MAX + 0.5)
        send(*args)

    exchange.send_snapshot = send_late
    samples = [(torch.full((8,), float(i)),) for i in range(8)]
    data = worker.Data(samples, global_batch=4, virtual_ranks=2, consistent=True)
    work(address, folder, name, body=train_slowly, exact=False, data=data)


def train_slowly(state, journal, accident, steps):
    for step in state.steps():
        for (x,) in step:
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
