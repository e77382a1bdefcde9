"""A module that is laid out for each world anew by the script's function, which calls ``fully_shard``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from elasticd.checkpoint.client.tensors import is_plain, local_of, require_copyable
from elasticd.worker.sharding.expected_state import expected_slots
from elasticd.worker.sharding.host_shards import HostShard, Kinds, TensorKind
from elasticd.worker.sharding.initial_values import Init, InitialValues, Sums, is_bare
from elasticd.worker.sharding.parts import NOTHING, WHOLE, Cut, Part, Shapes
from elasticd.worker.values.contents import Contents, parameters_of
from elasticd.worker.values.plaindata import copied, with_tensors
from elasticd.worker.values.randomness import Sources
from elasticd.worker.world.group import device, world_size
from elasticd.worker.world.round_mesh import RoundMesh

Shard = Callable[[nn.Module, DeviceMesh], Any]
Slots = dict[str, dict[int, dict[str, Any]]]  # by optimizer, by the parameter's number, and by name
_NAME = "model"
_FSDP = "torch.distributed.fsdp."
_SIMPLE = (bool, int, float, str, type(None))


class ShardedModel:
    """The model of a State, and the optimizers that train it.

    torch has no function that undoes ``fully_shard``. So the script's module becomes a template without
    memory, on the meta device (see ``empty``). For each world a copy of the template is sharded, and the
    optimizers are given the copy's parameters. Between worlds the optimizers have the template's parameters,
    and no state.

    The mesh is made anew for each world (see ``RoundMesh``), so ``shard`` must use the mesh that it is given.

    ``unit``: the number of workers that hold one model together; 1: all workers. ``init``: see
    ``InitialValues``.
    """

    def __init__(self, contents: Contents, shard: Shard, unit: int = 1, init: Init | None = None) -> None:
        _refuse(contents)
        self._contents, self._shard, self.unit = contents, shard, unit
        self._template = template = contents.modules[_NAME]
        self._mesh = RoundMesh()
        self.names = [name for name, _ in template.named_parameters()]
        self._parameters: list[torch.Tensor] = [*template.parameters()]
        self.shapes = Shapes.of(self._parameters)
        self._groups = self._numbered_groups()
        self._refuse_parameters_elsewhere()
        self._initial = InitialValues(template, init) if is_bare(template) else None
        if init is not None and self._initial is None:
            raise TypeError(
                "init= gives values to a model on the meta device, and this model has values: leave out init="
            )

    def empty(self) -> tuple[HostShard, Slots]:
        """Free the memory of the script's module. Return what the module and the optimizers had: a copy of
        their tensors, whole, and the rest of the optimizers' state (see ``slots``). Of a module on the meta
        device, the copy has no element (see ``begin``)."""
        if self._initial is not None:
            self._refuse_slots()
            self._initial.make_buffers()
            return HostShard(self.kinds(), NOTHING, self.shapes), self.slots()
        had, slots = HostShard(self.kinds(), WHOLE, self.shapes), self.slots()
        self.copy_to(had)
        self._make_template()
        return had, slots

    @property
    def makes_beginning(self) -> bool:
        """Whether each worker makes the initial values itself, by ``begin``."""
        return self._initial is not None

    def begin(self, shard: HostShard, random: Sources) -> list[Sums]:
        """Make the initial values of a model on the meta device. Copy the shard's part of them. Return the
        sums of each parameter's values. ``random``: the random numbers to draw, the same in all workers."""
        assert self._initial is not None
        sums = [Sums(0.0, 0.0)] * len(self.shapes.sizes)
        for parameter, values in self._initial.parameters(random):
            span = shard.spans[parameter]
            for number in shard.of_parameter[parameter]:
                shard.tensor(number).copy_(values.reshape(-1)[span.first : span.end])
            sums[parameter] = Sums.of(values)
        return sums

    # ------------------------------------------------------------ worlds

    def lay_out(self, trainable: list[bool], round: int) -> None:
        """Shard a copy of the template for the present world. The contents of its parameters are undefined,
        and the optimizers have no state. ``trainable``: which parameters are not frozen. Raises TypeError."""
        mesh = self._mesh.make(round, *_shape_of_mesh(world_size(), self.unit))
        for parameter, trains in zip(self._template.parameters(), trainable, strict=True):
            parameter.requires_grad_(trains)
        model = copy.deepcopy(self._template)
        returned = self._shard(model, mesh)
        self._refuse_result(model, returned, mesh)
        on_device: dict[int, torch.Tensor | None] = {}  # fully_shard moves those of its own modules only
        buffers = [
            (m._buffers, name, on_device.setdefault(id(b), b if b is None else b.to(device())))
            for m in model.modules()
            for name, b in m._buffers.items()
        ]
        model.to_empty(device=device())
        for owner, name, buffer in buffers:
            owner[name] = buffer
        _share_again(model, self._template)
        self._use(model)

    def leave(self) -> None:
        """Drop the sharded copy with its process groups. Keep simple attributes that the script has set."""
        live = self._contents.modules[_NAME]
        if live is self._template:
            return
        for ours, its in zip(self._template.modules(), live.modules(), strict=True):
            now = {k: v for k, v in vars(its).items() if type(v) in _SIMPLE and not k.startswith("_")}
            vars(ours).update({k: now[k] for k, v in vars(ours).items() if type(v) in _SIMPLE and k in now})
        self._groups = self._numbered_groups()  # the script may have added groups
        _let_go_of_groups(live)
        self._use(self._template)
        self._mesh.forget()

    def _numbered_groups(self) -> dict[str, list[list[int]]]:
        """Return the numbers of each optimizer's parameters, by group."""
        numbers = {id(p): n for n, p in enumerate(self._parameters)}
        return {
            name: [[numbers[id(p)] for p in group["params"]] for group in optimizer.param_groups]
            for name, optimizer in self._contents.optimizers.items()
        }

    def _use(self, model: nn.Module) -> None:
        self._contents.modules[_NAME] = model
        self._parameters = [*model.parameters()]
        for name, optimizer in self._contents.optimizers.items():
            for group, numbers in zip(optimizer.param_groups, self._groups[name], strict=True):
                group["params"][:] = [self._parameters[n] for n in numbers]
            optimizer.state.clear()

    # ------------------------------------------------------------ values

    @property
    def trainable(self) -> list[bool]:
        """For each parameter, whether it is not frozen."""
        return [p.requires_grad for p in self._parameters]

    @property
    def is_in_host_memory(self) -> bool:
        """Whether the model is in the host's memory, also where a GPU computes. Between worlds, whether the
        computing device is the host."""
        where = {p.device.type for p in self._parameters}
        return where == {"cpu"} or (where == {"meta"} and device().type == "cpu")

    def part(self) -> Part:
        """Return the part that this rank has in the present world. Raises RuntimeError if torch has cut the
        parameters in another way than ``Cut`` says."""
        sharded: Any = next(p for p in self._parameters if _is_sharded(p))
        mesh: DeviceMesh = sharded.device_mesh
        uncut = tuple(n for n, p in enumerate(self._parameters) if not _is_sharded(p))
        part = Part(Cut(mesh.size(mesh.ndim - 1), uncut), mesh.get_local_rank(mesh.ndim - 1))
        for number, span in enumerate(self.shapes.spans(part)):
            local, offsets = local_of(self._parameters[number].detach())
            first = offsets[0] * self.shapes.row[number] if offsets else 0
            if local.numel() != span.size or (span.size and first != span.first):
                raise RuntimeError(
                    f"torch {torch.__version__} gives rank {dist.get_rank()} another part of "
                    f"{self.names[number]} than State expects: use a release that elasticd supports"
                )
        return part

    @property
    def replicated(self) -> list[torch.Tensor]:
        """The parameters that each worker has whole, since ``shard`` leaves them out."""
        return [p for p in self._parameters if not _is_sharded(p)]

    def kinds(self) -> Kinds:
        """Return the tensors of the present state that have the shapes of parameters."""
        return tuple(TensorKind(n, optimizer, slot, t.dtype) for n, optimizer, slot, t in self._tensors())

    def in_order(self, kinds: Kinds) -> Kinds:
        """Return the tensors of a commit in the order of the present layout: another may shard others."""
        return tuple(sorted(kinds, key=lambda kind: self._place(kind.parameter)))

    def expected_kinds(self) -> Kinds:
        """Return the tensors of the state once the optimizers have made a step, as far as they are known."""
        kinds = set(self.kinds())
        numbers = {id(p): number for number, p in enumerate(self._parameters)}
        for name, optimizer in self._contents.optimizers.items():
            for group in optimizer.param_groups:
                slots: dict[tuple[torch.dtype, int], dict[str, torch.dtype]] = {}
                for p in group["params"]:
                    if p.requires_grad and p not in optimizer.state:
                        like = p.dtype, p.dim()
                        if like not in slots:
                            slots[like] = expected_slots(optimizer, group, p)
                        found = slots[like].items()
                        kinds |= {TensorKind(numbers[id(p)], name, slot, dtype) for slot, dtype in found}
        return tuple(kinds)

    def slots(self) -> Slots:
        """Return a copy of the optimizers' state that is not sharded, by the parameter's number and by name.
        These are numbers, and tensors of one number, which are the same in all workers. Raises TypeError for
        other tensors."""
        found: Slots = {}
        for name, optimizer in self._contents.optimizers.items():
            of = found[name] = {}
            for number, parameter in enumerate(self._parameters):
                if parameter in optimizer.state:
                    state = optimizer.state[parameter].items()
                    rest = {slot: value for slot, value in state if not _is_laid_out(slot, value, parameter)}
                    self._refuse_tensors(rest, name, number)
                    of[number] = copied(rest, f"State's {name}.state")
        return found

    @torch.no_grad()
    def copy_to(self, shard: HostShard) -> None:
        """Copy this rank's part of the present state."""
        for room, (_, _, _, tensor) in zip(shard.tensors, self._tensors(), strict=True):
            room.copy_(_local(tensor).reshape(-1))

    @torch.no_grad()
    def fill(self, shard: HostShard, slots: Slots) -> None:
        """Give the model and the optimizers this state."""
        optimizers = self._contents.optimizers
        for name, of in slots.items():
            optimizers[name].state.clear()
            for number, rest in of.items():
                optimizers[name].state[self._parameters[number]] = self._placed(name, number, rest)
        for number, kind in enumerate(shard.kinds):
            parameter, values = self._parameters[kind.parameter], shard.tensor(number)
            if kind.optimizer:
                state = optimizers[kind.optimizer].state[parameter]
                state[kind.slot] = laid_out_like(parameter, values.to(parameter.device, copy=True))
            else:
                local = _local(parameter.detach())
                local.copy_(values.view(local.shape))

    def _placed(self, name: str, number: int, rest: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of one parameter's small state, with tensors where the optimizer wants them."""
        groups = zip(self._contents.optimizers[name].param_groups, self._groups[name], strict=True)
        group = next(group for group, numbers in groups if number in numbers)
        on_device = group.get("capturable") or group.get("fused")
        where = self._parameters[number].device if on_device else torch.device("cpu")
        return {
            slot: value.to(where) if isinstance(value, torch.Tensor) else value
            for slot, value in copied(rest, name).items()
        }

    def _tensors(self) -> Iterator[tuple[int, str, str, torch.Tensor]]:
        """Yield the tensors of the shapes of parameters, with the parameter's number, the optimizer and the
        slot."""
        for number in sorted(range(len(self._parameters)), key=self._place):
            parameter = self._parameters[number]
            yield number, "", "", parameter  # not detached, since each view of a DTensor takes 20 µs
            for name, optimizer in sorted(self._contents.optimizers.items()):
                for slot, value in sorted(optimizer.state.get(parameter, {}).items()):
                    if _is_laid_out(slot, value, parameter):
                        yield number, name, slot, value

    def _place(self, number: int) -> tuple[bool, int]:
        """Return a parameter's place in the order of tensors. Those that are sharded come first (see
        ``ShardedState``)."""
        return not _is_sharded(self._parameters[number]), number

    # ------------------------------------------------------------ what is refused

    def _refuse_parameters_elsewhere(self) -> None:
        """Raise TypeError for an optimizer that keeps parameters outside of its groups."""
        for name, optimizer in self._contents.optimizers.items():
            parameters = {id(p) for p in parameters_of(optimizer)}
            lists = [id(group["params"]) for group in optimizer.param_groups]
            for key, value in vars(optimizer).items():
                items = [*value.values()] if isinstance(value, dict) else value
                if key in ("param_groups", "state") or id(value) in lists:
                    continue
                if isinstance(items, list | tuple | set) and any(id(item) in parameters for item in items):
                    raise TypeError(
                        f"{name} keeps parameters in its attribute {key}, where State cannot replace them: "
                        "with shard= an optimizer may keep parameters in param_groups only"
                    )

    def _refuse_slots(self) -> None:
        """Raise TypeError for an optimizer that has tensors for parameters that have no values yet."""
        for kind in self.kinds():
            if kind.optimizer:
                name = self.names[kind.parameter]
                raise TypeError(
                    f"{kind.optimizer} has made {kind.slot} for {name}, which is on the meta device: use an "
                    "optimizer that makes its state in its first step, or build the model on the CPU"
                )

    def _refuse_tensors(self, rest: dict[str, Any], name: str, number: int) -> None:
        """Raise TypeError for a tensor that is more than one number."""

        def refuse(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() or hasattr(tensor, "to_local"):
                raise TypeError(
                    f"{name} keeps a tensor of the shape {list(tensor.shape)} for {self.names[number]}, of "
                    f"the shape {list(self._parameters[number].shape)}: with shard= an optimizer may keep "
                    "numbers, and tensors that are sharded like their parameters"
                )
            return tensor

        with_tensors(rest, refuse)

    def _refuse_result(self, model: nn.Module, returned: Any, mesh: DeviceMesh) -> None:
        if returned is not None and returned is not model:
            raise TypeError("shard= must shard the module that it is given, and return that module or None")
        if [name for name, _ in model.named_modules()] != [n for n, _ in self._template.named_modules()]:
            raise TypeError(
                "shard= gives the model other modules: wrap or compile parts of the model before State gets "
                "it, and have shard= call fully_shard only"
            )
        if [name for name, _ in model.named_parameters()] != self.names:
            raise TypeError(
                "shard= gives modules that share a parameter a parameter each: call fully_shard on a module "
                "that has all of them"
            )
        sharded: list[tuple[str, Any]] = [(n, p) for n, p in model.named_parameters() if _is_sharded(p)]
        if not sharded:
            raise TypeError("shard= shards no parameter: call fully_shard(module, mesh=mesh)")
        for name, parameter in sharded:
            if parameter.device_mesh != mesh:
                raise TypeError(
                    f"shard= lays {name} out over another mesh than the one that it is given: call "
                    "fully_shard(module, mesh=mesh)"
                )
            *outer, last = parameter.placements
            if not last.is_shard(0) or not all(placement.is_replicate() for placement in outer):
                raise TypeError(
                    f"shard= lays {name} out as {parameter.placements}: State keeps parameters that are "
                    "sharded by their first dimension"
                )

    # ------------------------------------------------------------

    def _make_template(self) -> None:
        """Free the memory of the script's module. Parameters that modules share stay shared."""
        bare = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in self._template.parameters()
        }
        for module in self._template.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = bare[id(parameter)]
        self._use(self._template)


def _share_again(model: nn.Module, template: nn.Module) -> None:
    """Have the modules share whole parameters as in the template. ``to_empty`` has given each module its
    own."""
    shared: dict[int, nn.Parameter | None] = {}
    for ours, its in zip(model.modules(), template.modules(), strict=True):
        for name, parameter in its._parameters.items():
            ours._parameters[name] = shared.setdefault(id(parameter), ours._parameters[name])


def _let_go_of_groups(model: Any) -> None:
    """Clear the references of FSDP's objects to their process groups. The objects refer to each other, so
    they stay until a garbage collection. If they kept the groups of an ended world, the worker would have to
    collect garbage before the next world. A collection takes longer than all other work between two
    worlds."""
    left: list[Any] = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    seen: set[int] = set()
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        for name, value in [*vars(thing).items()]:
            if isinstance(value, dist.ProcessGroup):
                setattr(thing, name, None)
            each = value if isinstance(value, list) else [value]
            left += [of for of in each if type(of).__module__.startswith(_FSDP) and hasattr(of, "__dict__")]


def _shape_of_mesh(size: int, unit: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the shape of the mesh of a world, and the names of its dimensions. A world that is no multiple
    of the unit shards the model over all its workers."""
    if unit > 1 and size % unit == 0:
        return (size // unit, unit), ("replicate", "unit")
    return (size,), ("all",)


def _refuse(contents: Contents) -> None:
    """Raise TypeError or ValueError for a State that cannot be sharded."""
    if [*contents.modules] != [_NAME]:
        raise TypeError("with shard=, State keeps one module, which is given as model=")
    for name, parameter in contents.modules[_NAME].named_parameters():
        if not (is_plain(parameter) or parameter.is_meta):
            raise TypeError(
                f"{name} has no values yet, or is sharded: give State a model with its initial values or on "
                "the meta device, and have shard= call fully_shard"
            )
    require_copyable(contents.modules[_NAME], "shard")
    if not contents.parameters():
        raise TypeError("with shard=, State needs a model that has parameters")


def _is_laid_out(slot: str, value: Any, parameter: torch.Tensor) -> bool:
    """Whether a value of an optimizer's state is laid out like the parameter: both are whole, or both are
    sharded. The number of steps is not, even if the parameter is a number too."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    if not value.dim() and slot == "step":
        return False
    return getattr(value, "placements", None) == getattr(parameter, "placements", None)


def laid_out_like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is laid out like a parameter. ``local``: this rank's elements, which are not
    copied if they are on the parameter's device and the parameter is contiguous."""
    from torch.distributed.tensor import DTensor  # imported late, since only sharded models need it

    if not _is_sharded(parameter):
        laid = local.view(parameter.shape).to(parameter.device)
        return laid if parameter.is_contiguous() else torch.empty_like(parameter).copy_(laid)
    like = parameter.to_local()
    return DTensor.from_local(
        local.view(like.shape).to(like.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "placements")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
