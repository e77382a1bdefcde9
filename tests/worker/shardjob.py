"""A script that shards its model (FSDP2). Each step's loss and gradients are those of one global batch, which
the workers share evenly. So within rounding they are the same in a world of 1, 2, 3 or 4 workers."""

from __future__ import annotations

import functools
import gc
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # importing this module also finds parts of DTensors
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from elasticd import worker
from elasticd.channel.worker_messages import Enter
from elasticd.data.auditnotes import EVERY, FOLDER, VARIABLE
from elasticd.worker.joining import shard_agreement
from elasticd.worker.sharding import sharded_state
from elasticd.worker.sharding.host_shards import HostShard
from elasticd.worker.sharding.parts import Cut, parts_of_ranks
from elasticd.worker.steps import Step
from elasticd.worker.world.group import World, WorldChanged
from tests.worker.jobs import NOTHING, Accident, begin, commit, hear_of_leaving
from tests.worker.step_samples import StepSamples, noise

STEPS = 8
BATCH = 12
batch_of = functools.partial(noise, BATCH)


class Body(nn.Linear):
    """A layer with code of its own: torch does not compile a layer of torch by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Net(nn.Module):
    """A model with rows that no world divides evenly, parameters that two layers share, a frozen layer, and a
    buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body(4, 5)
        self.inner = nn.Linear(5, 5, bias=False)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Linear(5, 7).requires_grad_(False)
        self.head = nn.Linear(7, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.scale = 1.0
        self.recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        x = checkpoint(self.middle, x, use_reentrant=False) if self.recomputes else self.middle(x)
        return self.head(self.frozen(x)) * self.scale

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.tied(self.inner(torch.tanh(self.body(x)))))


def shard(model: Net, mesh: DeviceMesh, feature: str = "") -> None:
    """Shard the model. ``feature``: what else FSDP2 or torch does with the model."""
    options: dict[str, Any] = {}
    if feature == "mixed":  # rounding is that of float32
        options["mp_policy"] = MixedPrecisionPolicy(torch.float32, torch.float64)
    if feature == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if feature == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if feature == "compiled":
        model.body.compile(backend=count_graphs)
    if feature == "left out":  # a parameter that two layers share, and a bias, are replicated
        options["ignored_params"] = {model.inner.weight, model.head.bias}
    fully_shard(model.body, mesh=mesh, **options)
    if feature != "layers only":  # else all but one layer is replicated
        fully_shard(model, mesh=mesh, **options)


graphs: list[torch.fx.GraphModule] = []  # the graphs that this process has compiled


def count_graphs(graph: torch.fx.GraphModule, _: Any) -> Any:
    graphs.append(graph)
    return graph.forward


def make(feature: str = "", **options: Any) -> worker.State:
    torch.manual_seed(3)
    model = Net().double()
    if feature.startswith("bare"):
        options["init"] = {
            "bare": functools.partial(copy_from, model),
            "bare, own seed": draw_with_own_seed,
        }[feature]
        with torch.device("meta"):
            model = Net().double()
    model.recomputes = feature == "recomputed"
    if feature == "wrapped":
        model.body = checkpoint_wrapper(model.body)
    if feature == "compiled before":
        model.body = torch.compile(model.body, backend=count_graphs)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.02
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    options = {"shard": functools.partial(shard, feature=feature), **options}
    return worker.State(model=model, optimizer=optimizer, schedule=schedule, drawn=0.0, **options)


def copy_from(known: nn.Module, name: str, module: nn.Module) -> None:
    """Give a module of a model on the meta device the values of another model's."""
    its = known.get_submodule(name)
    for mine, value in zip(module.parameters(recurse=False), its.parameters(recurse=False), strict=True):
        mine.copy_(value)
    for mine, value in zip(module.buffers(recurse=False), its.buffers(recurse=False), strict=True):
        mine.copy_(value)


def draw_with_own_seed(name: str, module: nn.Module) -> None:
    """Give a module other values in each worker."""
    seeded = torch.Generator().manual_seed(os.getpid())
    for parameter in module.parameters(recurse=False):
        parameter.normal_(generator=seeded)
    for buffer in module.buffers(recurse=False):
        buffer.zero_()


def gradients(state: worker.State, step: Step | int, accident: Accident) -> float:
    """Compute this step's gradients. Return the loss of the global batch."""
    model, many = state.model, BATCH // worker.world_size()
    number = step if isinstance(step, int) else step.number
    accident("start", number)
    drawn = torch.rand(1, dtype=torch.float64).item()
    state.drawn += drawn
    total = torch.zeros((), dtype=torch.float64)
    if isinstance(step, int):
        mine = batch_of(step)[worker.rank() * many : (worker.rank() + 1) * many]
        loss = (model(mine) - drawn).square().mean()
        accident("forward", step)
        loss.backward()
        total += loss.detach() / worker.world_size()
    else:
        for turn, samples in enumerate(step):
            # Without consistent mode the model counts one call a step, however many batches a worker has.
            model.train(turn == 0 or state.data.consistent)
            loss = (model(samples) - drawn).square().mean()
            accident("forward", number)
            total += loss.detach() * step.weight
            step.backward(loss)
        model.train()
    accident("summed", number)
    if isinstance(step, Step) and step.loss is not None:  # in consistent mode
        return step.loss.item()
    dist.all_reduce(total)
    return total.item()


def train(
    address: str,
    folder: str,
    name: str,
    accident: Accident = NOTHING,
    *,
    saver: str = "",
    node: str = "",
    virtual_ranks: int = 0,
    accumulate: int = 1,
    consistent: bool = False,
    copies_first: bool = False,
    **options: Any,
) -> None:
    """Run the whole script. Without an address: in a world of its own. ``node``: the name of the saver's
    node, if savers have copies of each other's shards. ``virtual_ranks``: 0, or the number of
    virtual ranks if the samples come from worker.Data, each rank in ``accumulate`` batches, and are noted for
    an audit. ``consistent``: in consistent mode. ``copies_first``: go on only once copies are here."""
    journal = begin(address, folder, name, saver)
    os.environ["ELASTICD_HOLDER"] = node
    hear_of_leaving()
    trip(accident)
    if copies_first:
        await_copies()
    if virtual_ranks:
        os.environ |= {VARIABLE: str(Path(folder) / FOLDER), EVERY: "4"}
        cut = {"global_batch": BATCH, "virtual_ranks": virtual_ranks, "accumulate": accumulate}
        samples = StepSamples(STEPS, BATCH, batch_of)
        options["data"] = worker.Data(samples, shuffle=False, consistent=consistent, **cut)
    state = make(**options)
    beginning = weakref.ref(state._committed.shards.generations[0].own)

    @worker.run
    def run(state: worker.State) -> None:
        journal.write(entered=state.step, world=worker.world_size())
        journal.write(mesh=[*state.model.body.weight.device_mesh.shape])
        for begun in state.steps(STEPS):
            step = begun if isinstance(begun, int) else begun.number
            state.model.scale = 1.0 + 0.01 * step
            loss = gradients(state, begun, accident)
            norm = update(state, step, accident)
            commit(state, journal)
            journal.write(keeps_beginning=beginning() is not None)
            journal.write(losses=[step, loss, norm])
            if accident.point == "saved" and state.step == accident.step:
                state._committed.saves.checkpoints.wait()
            accident("saved", state.step)
        journal.write(outcome=outcome(state), graphs=len(graphs))

    run(state)


def update(state: worker.State, step: int, accident: Accident) -> float:
    """Make the optimizer's step. Return the norm of the gradients."""
    norm = clip(state.model, 0.5)
    state.optimizer.step()
    accident("stepped", step)
    state.optimizer.zero_grad()
    state.schedule.step()
    return whole(norm).item()


def clip(model: nn.Module, norm_max: float) -> torch.Tensor:
    """Clip the gradients. torch clips sharded and whole gradients apart, so that the norm is taken first."""
    sharded = [p for p in model.parameters() if hasattr(p, "full_tensor")]
    replicated = [p for p in model.parameters() if not hasattr(p, "full_tensor")]
    if not replicated:
        return nn.utils.clip_grad_norm_(sharded, norm_max)
    kinds = [[p for p in its if p.grad is not None] for its in (sharded, replicated)]
    norms = [whole(nn.utils.get_total_norm([p.grad for p in its])) for its in kinds]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for its in kinds:
        nn.utils.clip_grads_with_norm_(its, norm_max, norm)
    return norm


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train_in_halves(
    address: str, folder: str, name: str, accident: Accident = NOTHING, *, sums_once: bool, unit: int = 1
) -> None:
    """Train as ``train`` does, with two backward passes in each step. ``sums_once``: the script has FSDP2 add
    gradients up in the second only."""
    journal = begin(address, folder, name)
    hear_of_leaving()

    @worker.run
    def run(state: worker.State) -> None:
        loss = torch.zeros((), dtype=torch.float64)
        for half in state.steps(STEPS, accumulate=2):
            if half.turn == 0:
                accident("start", half.step)
                state.model.scale = 1.0 + 0.01 * half.step
                drawn = torch.rand(1, dtype=torch.float64).item()
                state.drawn += drawn
                loss.zero_()
            if sums_once:
                state.model.set_requires_gradient_sync(half.last)
            state.model.train(half.turn == 0)  # which counts the calls
            mine = batch_of(half.step).chunk(worker.world_size())[worker.rank()].chunk(2)[half.turn]
            part = (state.model(mine) - drawn).square().mean() / 2
            part.backward()
            loss += part.detach() / worker.world_size()
            if half.last:
                accident("summed", half.step)
                dist.all_reduce(loss)
                norm = update(state, half.step, accident)
                commit(state, journal)
                journal.write(losses=[half.step, loss.item(), norm])
        state.model.train()
        journal.write(outcome=outcome(state))

    run(make(unit=unit))


def outcome(state: worker.State) -> dict[str, Any]:
    """Return all values that training has led to, the same on all ranks."""
    model = state.model
    moments = [
        whole(state.optimizer.state[p][slot]).flatten().tolist()
        for p in model.parameters()
        if p in state.optimizer.state
        for slot in ("exp_avg", "exp_avg_sq")
    ]
    return {
        "weights": [whole(p).flatten().tolist() for p in model.parameters()],
        "moments": moments,
        "steps": [values["step"].item() for values in state.optimizer.state.values()],
        "calls": model.calls.item(),
        "tied": model.tied.weight is model.inner.weight,
        "frozen": [not p.requires_grad for p in model.parameters()],
        "rates": [group["lr"] for group in state.optimizer.param_groups],
        "drawn": state.drawn,
        "scale": model.scale,
    }


def trip(accident: Accident) -> None:
    """Have the accident happen while shards are on their way. ``copying``: after this worker has copied its
    own shard of that step. ``moving``: before this worker's parts are moved for that round."""
    if accident.point == "copying":
        send = sharded_state.copy_to_guardians
        sends = 0

        @functools.wraps(send)
        def stumble(*args: Any) -> Any:
            nonlocal sends
            accident("copying", sends - 1)  # the first one is at the beginning of the world
            sends += 1
            return send(*args)

        sharded_state.copy_to_guardians = stumble
    if accident.point == "moving":
        rounds = 0
        carry = shard_agreement.carry_out

        def fall(moves: Any, *args: Any) -> None:
            nonlocal rounds
            rounds += 1
            accident("moving", rounds)
            carry(moves, *args)

        shard_agreement.carry_out = fall


def await_copies() -> None:
    """Have a worker wait for copies when they begin, rather than at the next commit."""
    begin_to_send = sharded_state.copy_to_guardians

    def send(*args: Any) -> Any:
        copies = begin_to_send(*args)
        copies.await_arrival()
        return copies

    sharded_state.copy_to_guardians = send


# ---------------------------------------------------------------- without an agent

REFUSED = {
    "whole": "shard= shards no parameter: call fully_shard",
    "half of a pair": "shard= gives modules that share a parameter a parameter each",
    "other modules": "shard= gives the model other modules",
    "another model": "shard= must shard the module that it is given",
    "second dimension": "shard= lays body.weight out as (Shard(dim=1),): State keeps",
    "hybrid": "shard= lays body.weight out over another mesh",
    "no mesh": "shard= lays body.weight out over another mesh",
    "sparse": "body.weight has no values yet, or is sharded",
    "meta": "the model has no reset_parameters(), which would give it values: give State init=",
    "partly meta": "a part of the model is on the meta device, and other parameters are not",
    "buffer on meta": "a part of the model is on the meta device, and other parameters are not",
    "optimizer on meta": "optimizer has made sum for weight, which is on the meta device",
    "init": "init= gives values to a model on the meta device, and this model has values",
    "init alone": "init= is a function that gives a model on the meta device its values, for shard=",
    "no init of a buffer": "calls has got no values, or NaN: have init= write to all",
    "further module": "with shard=, State keeps one module",
    "redundancy": "redundancy is -1",
    "overlap": "overlap=True sends copies of shards while the next steps run: give shard= and",
    "overlap alone": "give shard= and redundancy=1 or more, or leave out overlap=",
    "undo": "State takes no undo= with shard=",
    "wrap": "State takes no wrap= with shard=",
    "restore": "State takes no restore= with shard=",
    "optimizer": "optimizer keeps a tensor of the shape [3] for body.weight, of the shape [5, 4]",
    "elsewhere": "optimizer keeps parameters in its attribute known",
    "compiled": "head was compiled by its compile(), which the copies that shard= is given",
}


class Odd(torch.optim.SGD):
    """An optimizer that keeps a tensor of another shape for each parameter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = torch.zeros(3)


class Knowing(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.known = {"all": 0, **dict(enumerate(self.param_groups[0]["params"]))}


def partly_compiled() -> Net:
    net = Net()
    net.head.compile(backend="eager")
    return net


def by_columns(model: Net, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))


def wrapping(model: Net, mesh: DeviceMesh) -> None:
    model.body = nn.Sequential(model.body)
    shard(model, mesh)


def partly_bare() -> Net:
    net = Net()
    net.head.to("meta")
    return net


def buffer_bare() -> Net:
    net = Net()
    net.calls = net.calls.to("meta")
    return net


def sparse() -> Net:
    net = Net()
    net.body.weight = nn.Parameter(net.body.weight.detach().to_sparse())
    return net


def no_init(name: str, module: nn.Module) -> None:
    """Give the module no values."""


def one_of_two(model: Net, mesh: DeviceMesh) -> None:
    """Shard one of two modules that share a parameter."""
    fully_shard(model.tied, mesh=mesh)


def refusals() -> dict[str, str]:
    """Return the error message of each State that is refused, by name."""
    model, optimizer = Net, torch.optim.AdamW
    replicas = worker.mesh(1)
    given: dict[str, dict[str, Any]] = {
        "whole": {"shard": lambda model, mesh: None},
        "half of a pair": {"shard": one_of_two},
        "other modules": {"shard": wrapping},
        "another model": {"shard": lambda model, mesh: fully_shard(Net(), mesh=mesh)},
        "second dimension": {"shard": by_columns},
        "hybrid": {"shard": lambda model, mesh: fully_shard(model, mesh=replicas)},
        "no mesh": {"shard": lambda model, mesh: fully_shard(model)},
        "sparse": {"model": sparse},
        "meta": {"model": lambda: Net().to("meta")},
        "partly meta": {"model": partly_bare},
        "buffer on meta": {"model": buffer_bare},
        "optimizer on meta": {"model": lambda: nn.Linear(2, 2).to("meta"), "optimizer": torch.optim.Adagrad},
        "init": {"init": no_init},
        "init alone": {"init": no_init, "shard": None},
        "no init of a buffer": {"init": no_init, "model": lambda: Net().to("meta")},
        "further module": {"other": nn.Linear(2, 2)},
        "redundancy": {"redundancy": -1},
        "overlap": {"redundancy": 0, "overlap": True},
        "overlap alone": {"shard": None, "overlap": True},
        "undo": {"undo": True},
        "wrap": {"wrap": None},
        "restore": {"restore": lambda state: None},
        "optimizer": {"optimizer": Odd},
        "elsewhere": {"optimizer": Knowing},
        "compiled": {"model": partly_compiled},
    }  # fmt: skip
    said = dict.fromkeys(given, "nothing")
    for name, options in given.items():
        net = options.pop("model", model)()
        try:
            state = worker.State(
                net, options.pop("optimizer", optimizer)(net.parameters()), **{"shard": shard, **options}
            )
            of = state._committed.shards.model
            of.lay_out(of.trainable, 1)
            state.optimizer.step()
            of.slots()
        except (TypeError, ValueError) as error:
            said[name] = str(error)
    return said


def kept_alone() -> tuple[int, bool]:
    """Train in a world that cannot change. Return the number of kept commits, and whether no copy is kept."""
    state = make()

    @worker.run
    def run(state: worker.State) -> None:
        for step in state.steps(1):
            gradients(state, step, NOTHING)
            state.optimizer.step()
            state.commit()

    run(state)
    shards = state._committed.shards
    return len(shards.generations), shards._copies is None


def kept_while_a_world_ends() -> tuple[float, float]:
    """Make two commits of a buffer, and a third, before which a worker is lost. Return the buffer's values in
    the commits to which the workers may then go back."""
    state = make()

    @worker.run
    def run(state: worker.State) -> None:
        pass

    run(state)
    committed, shards = state._committed, state._committed.shards
    committed.world = World(Enter(2, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "", "MASTER_PORT": "0"}))
    shards.enter(0, ["here"], parts_of_ranks(Cut(1), 1))
    for step in range(1, 3):
        state.model.calls.fill_(step)
        committed._keep(step)

    def loses_a_worker(world: World) -> None:
        raise WorldChanged

    shards.complete = loses_a_worker
    state.model.calls.fill_(3)
    try:
        committed._keep(3)
    except WorldChanged:
        pass
    first, second = (of.small.kept["buffers"][0].item() for of in shards.generations)
    return first, second


def laid_out_twice() -> tuple[Any, Any, int]:
    """Return the values that must be the same before and after a change of layout. Also return how many
    references to the process group were added, without a garbage collection."""
    gc.disable()
    group = dist.group.WORLD
    references = sys.getrefcount(group)
    net = Net()
    state = worker.State(net, torch.optim.SGD(net.body.parameters(), lr=0.1), shard=shard)
    of, [initial] = state._committed.shards.model, state._committed.shards.generations
    found, trainable = [], of.trainable
    for turn in range(2):
        of.lay_out(trainable, turn)
        of.fill(initial.own, initial.small.slots)
        if turn == 0:
            state.model.scale, state.model.note = 1.5, "unknown to the template"
            state.optimizer.add_param_group({"params": [*state.model.frozen.parameters()], "lr": 0.5})
            state.model.head.requires_grad_(False)
        names = {id(p): name for name, p in state.model.named_parameters()}
        found.append(
            (
                [[names[id(p)] for p in group["params"]] for group in state.optimizer.param_groups],
                state.model.scale,
                state.model.tied.weight is state.model.inner.weight,
                [name for name, p in state.model.named_parameters() if p.requires_grad],
                [p.full_tensor().tolist() for p in state.model.parameters()],
            )
        )
        trainable = of.trainable
        state.model(torch.ones(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(state.model.parameters(), 0.5)
        of.leave()
    return found[0], found[1], sys.getrefcount(group) - references


class Unshardable(nn.Module):
    """A model with a parameter that is one number, and one that is not contiguous. Neither can be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
        self.last = nn.Linear(2, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).flatten(1)) * self.scale


def laid_out_with_odd_parameters() -> list[Any]:
    """Return the values and strides after a step, and after a change of layout."""
    net = Unshardable()
    options = {"shard": lambda model, mesh: fully_shard(model.last, mesh=mesh) and None}
    state = worker.State(net, torch.optim.AdamW(net.parameters()), **options)
    of, [initial] = state._committed.shards.model, state._committed.shards.generations
    of.lay_out(of.trainable, 1)
    of.fill(initial.own, initial.small.slots)
    state.model(torch.ones(1, 2, 2, 2)).sum().backward()
    state.optimizer.step()
    found = [values_of(state)]
    kept, slots = HostShard(of.kinds(), of.part(), of.shapes), of.slots()
    of.copy_to(kept)
    of.leave()
    of.lay_out(of.trainable, 2)
    of.fill(kept, slots)
    return [*found, values_of(state)]


def values_of(state: worker.State) -> list[Any]:
    tensors = [
        whole(tensor)
        for p in state.model.parameters()
        for tensor in (p.detach(), *(value for _, value in sorted(state.optimizer.state[p].items())))
    ]
    return [(tensor.stride(), tensor.tolist()) for tensor in tensors]
