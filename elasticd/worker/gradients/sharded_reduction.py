"""Consistent mode for a sharded model (FSDP2): a step computes the same bits as for a model that each worker
holds whole, in a world of any size.

fully_shard would average the gradients of a backward pass over the workers, in an order that depends on their
number. So this module takes each gradient as soon as the backward pass has computed it, and fully_shard finds
none. The gradients are added up as in elasticd.worker.gradients.owned_sums.

These sums and fully_shard's gathering of parameters are collectives of one process group, and all workers
must call them in one order. So gradients are sent where fully_shard would reduce them. The arrival of the
last gradient does not mark that place, since a virtual rank may use only some of the parameters.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel.distributed import _find_tensors

from elasticd.data.dealing import Portion
from elasticd.data.summing import plan_sums
from elasticd.worker.gradients import whole_norms
from elasticd.worker.gradients.buffers import Buffers
from elasticd.worker.gradients.consistent import BETWEEN, TWICE, add_earlier, copies_of_gradients
from elasticd.worker.gradients.owned_sums import OwnedSums, owned, turns_of
from elasticd.worker.sharding.moves import replicas
from elasticd.worker.sharding.parts import Spans
from elasticd.worker.sharding.sharded_model import laid_out_like
from elasticd.worker.values import randomness
from elasticd.worker.world.group import World, device

UNDER_WAY = 2  # exchanges in flight
_OUTSIDE = (
    "a gradient was computed outside of step.backward(loss), and fully_shard would average it, so that its "
    "bits depend on the number of workers: compute gradients by step.backward(loss) only, or give Data "
    "consistent=False"
)

Hook = TypeVar("Hook", bound=Callable[..., Any])


def _not_compiled(hook: Hook) -> Hook:
    """Have torch.compile leave this function out of what it compiles, as it leaves out fully_shard's own."""
    vars(hook).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=None)
    return hook


class _Unit(NamedTuple):
    """A module that ``fully_shard`` gathers as one, or the whole model with the parameters outside of such
    modules. ``places``: where modules have its parameters: module, name, and the parameter's number."""

    module: nn.Module
    places: list[tuple[nn.Module, str, int]]


class _Exchange(NamedTuple):
    sums: OwnedSums
    arrived: list[torch.Tensor]
    work: dist.Work | None


class ShardedReduction:
    """The Reduction of consistent mode for a sharded model in one world. Call ``close`` at the world's end.

    ``model``: as sharded for this world. ``spans``: the part of each parameter that each rank has. ``seed``,
    ``place``, ``world`` and ``generators``: as of ``ConsistentReduction``. The parts must be those of
    ``parts_in_turns``.

    A worker holds its pieces of up to log2(n) + 1 sums for n virtual ranks, and room for four whole gradients
    of the largest module that fully_shard gathers as one. If the samples of a virtual rank come in several
    parts, the worker also holds one whole gradient of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        spans: Sequence[Spans],
        virtual_ranks: int,
        seed: int,
        place: Callable[[], Sequence[int]],
        world: World | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._seed, self._place, self._world, self._generators = seed, place, world, generators
        self._virtual_ranks = virtual_ranks
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._turns = turns_of(virtual_ranks, self._size)
        self._buffers = Buffers([model], self._rank, self._size, source=(virtual_ranks - 1) % self._size)
        self._parameters: list[Any] = [*model.parameters()]
        self._pieces = owned(spans)
        self._group = replicas(spans)[self._rank]
        self._units = _units(model, self._parameters)
        self._hooks = [
            unit.module.register_forward_pre_hook(partial(self._before_forward, number), with_kwargs=True)
            for number, unit in enumerate(self._units)
        ]
        self._awaited = [0] * len(self._units)  # calls of the unit that the backward pass has yet to leave
        self._loss: torch.Tensor | None = None
        self._hooked: dict[int, tuple[torch.Tensor, torch.utils.hooks.RemovableHandle]] = {}
        mesh = next(p.device_mesh for p in self._parameters if isinstance(p, DTensor))
        self._end_norms = whole_norms.take_whole(mesh)
        self._trained: list[int] = []
        self._under_way = False
        self._computes = False  # ``backward`` computes gradients
        self.loss: torch.Tensor | None = None  # the loss of the last global batch

    # ------------------------------------------------------------ the Reduction protocol

    def begin(self, left_out: Callable[[], int]) -> None:
        """Do nothing: each worker has as many parts as the others."""

    @contextlib.contextmanager
    def part(self, part: Portion) -> Iterator[None]:
        if not self._under_way:
            self._begin()
        if part.opens:
            if self._passes:
                self._buffers.put_back()
            self._skip_to(part.virtual_rank // self._size)
            self._loss = None
            if part.counts:
                self._reseed(part.virtual_rank)
        self._passes += 1
        self._awaited = [0] * len(self._units)
        yield

    def backward(self, loss: torch.Tensor, part: Portion) -> None:
        weighted = loss * part.weight
        if part.counts:
            mine = weighted.detach()
            self._loss = mine if self._loss is None else self._loss + mine
        self._counts, self._closes, self._computes = part.counts, part.closes, True
        self._seen = bytearray(len(self._parameters))
        try:
            weighted.backward()  # type: ignore[no-untyped-call]
        finally:
            self._computes = False
        self._refuse_own_sums()
        if part.closes:
            with torch.no_grad():
                self._close_turn(part)

    def finish(self, parts: list[Portion]) -> None:
        with torch.no_grad():
            if not parts[-1].counts:
                self._buffers.put_back()
            self._skip_to(self._turns)
            self._buffers.send_round()
            self._add_up_all()
            self._hand_over()
        self._under_way = False
        if self._world is not None:
            self._world.sums += 1
        self._reseed(BETWEEN)

    def _reseed(self, turn: int) -> None:
        randomness.seed_all(self._seed, *self._place(), turn, generators=self._generators)

    def close(self) -> None:
        """Remove the hooks from the modules and their parameters."""
        self._end_norms()
        for hook in (*self._hooks, *(handle for _, handle in self._hooked.values())):
            hook.remove()
        self._hooks, self._hooked = [], {}

    # ------------------------------------------------------------ the beginning of a step

    def _begin(self) -> None:
        trained = [n for n, parameter in enumerate(self._parameters) if parameter.requires_grad]
        if trained != self._trained:
            self._lay_out(trained)
        if self._world is not None:
            self._world.sums_begun += 1
        self._under_way = True
        self._passes = 0
        self._held: dict[int, torch.Tensor] = {}  # the gradients of the present virtual rank
        self._begin_turn(0)
        self._exchanges: deque[_Exchange] = deque()
        self._exchanged = 0
        self._loss = None
        self._notes.zero_()
        self._earlier = copies_of_gradients(self._parameters)
        for parameter in self._parameters:
            parameter.grad = None
        self._buffers.note()
        self._buffers.keep()

    def _lay_out(self, trained: list[int]) -> None:
        """Lay out the sums of these parameters, in the order of the backward pass, which computes the
        gradient of a unit's first parameter last."""
        self._trained = trained
        self._sums: list[OwnedSums] = []
        members: dict[tuple[int, torch.dtype], list[int]] = {}
        for number, unit in enumerate(self._units):
            for parameter in sorted({place[2] for place in unit.places} & {*trained}):
                members.setdefault((number, self._parameters[parameter].dtype), []).append(parameter)
        self._places: list[list[int]] = [[] for _ in self._units]  # of each unit's sums, in ``_sums``
        for (number, dtype), its in sorted(members.items(), key=lambda item: -item[1][0]):
            pieces = [tuple(of_rank[parameter] for parameter in its) for of_rank in self._pieces]
            like = torch.empty(0, dtype=dtype, device=device())
            self._places[number].append(len(self._sums))
            self._sums.append(OwnedSums(its, pieces, self._rank, self._virtual_ranks, like))
        self._sums_of = {n: place for place, sums in enumerate(self._sums) for n in sums.members}
        self._rooms: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for sums in self._sums:
            self._make_room(sums)
        # Notes of each virtual rank: its loss, the parameters that it used, and the buffers that it changed.
        width = 1 + len(self._parameters) + self._buffers.large
        self._notes = torch.zeros(self._turns, width, device=device())

    def _make_room(self, sums: OwnedSums) -> None:
        """Make memory large enough for the data of these sums: to send, and to receive."""
        its = self._rooms.setdefault(sums.dtype, [])
        sent, arriving = (max([0, *(len(room[i]) for room in its)]) for i in (0, 1))
        sent, arriving = max(sent, sums.sent_elements), max(arriving, sums.arriving_elements)
        like = torch.empty(0, dtype=sums.dtype, device=device())
        its[:] = [(like.new_empty(sent), like.new_empty(arriving)) for _ in range(UNDER_WAY)]

    # ------------------------------------------------------------ backward passes

    @_not_compiled
    def _before_forward(self, number: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Watch the gradients of the parameters that fully_shard has gathered for this module, and the end of
        the module's backward pass."""
        if not torch.is_grad_enabled():
            return
        for module, name, parameter in self._units[number].places:
            whole: Any = module._parameters[name]
            if not whole.requires_grad or isinstance(whole, DTensor):
                continue
            known = self._hooked.get(parameter)
            if known is None or known[0] is not whole:
                hook = whole.register_post_accumulate_grad_hook(partial(self._arrived, parameter))
                self._hooked[parameter] = whole, hook
        if self._under_way and not self._computes:  # else the forward pass is computed again
            inputs = _find_tensors((args, kwargs))  # type: ignore[no-untyped-call]
            last = next((tensor.grad_fn for tensor in inputs if tensor.requires_grad), None)
            if last is not None:  # fully_shard's own node, which reduces the gradients
                self._awaited[number] += 1
                last.register_prehook(partial(self._passed, number))

    def _arrived(self, number: int, whole: torch.Tensor) -> None:
        """Take the gradient of a parameter."""
        if not self._computes:
            raise RuntimeError(_OUTSIDE)
        place = self._sums_of.get(number)
        if self._seen[number] or (place is not None and self._sent[place]):
            raise RuntimeError(TWICE)
        self._seen[number] = 1
        gradient, whole.grad = whole.grad, None
        if self._counts and gradient is not None:
            self._used[number] = 1
            self._hold(number, gradient)

    def _hold(self, number: int, gradient: torch.Tensor) -> None:
        """Add up the gradients of a virtual rank's parts, in the type of the parameter."""
        if (held := self._held.get(number)) is not None:
            held += gradient
        else:
            self._held[number] = gradient if self._closes else gradient.to(self._parameters[number].dtype)

    def _passed(self, number: int, *_: Any) -> None:
        """Note that the backward pass has left a call of the unit. After the last call, none of the unit's
        parameters gets a gradient any more."""
        if not self._computes:
            return
        self._awaited[number] -= 1
        if self._closes and not self._awaited[number]:
            with torch.no_grad():
                for place in self._places[number]:
                    self._send(place)

    def _refuse_own_sums(self) -> None:
        """Raise RuntimeError if a gradient is where fully_shard leaves its averages."""
        if any(parameter.grad is not None for parameter in self._parameters):
            raise RuntimeError(
                "fully_shard has averaged a gradient, whose bits depend on the number of workers: call each "
                "sharded module itself and not another of its methods, or give Data consistent=False"
            )

    def _send(self, place: int) -> None:
        """Begin the exchange of these sums, and add up an earlier one, which has probably ended."""
        sums = self._sums[place]
        self._sent[place] = 1
        if len(self._exchanges) == UNDER_WAY:
            self._add_up()
        sent, room = self._rooms[sums.dtype][self._exchanged % UNDER_WAY]
        self._exchanged += 1
        gradients = [self._held.pop(number, None) for number in sums.members]
        arrived, work = sums.hand_in(self._turn, gradients, sent, room)
        self._exchanges.append(_Exchange(sums, arrived, work))

    def _add_up(self) -> None:
        oldest = self._exchanges.popleft()
        if oldest.work is not None:
            oldest.work.wait()
        oldest.sums.add(oldest.arrived)

    def _add_up_all(self) -> None:
        while self._exchanges:
            self._add_up()

    # ------------------------------------------------------------ turns

    def _close_turn(self, part: Portion) -> None:
        for place in range(len(self._sums)):
            if not self._sent[place]:
                self._send(place)
        if part.counts and self._loss is not None:
            count = len(self._parameters)
            of_turn = self._notes[self._turn]
            of_turn[0] = self._loss
            of_turn[1 : 1 + count] = torch.frombuffer(self._used, dtype=torch.uint8)
            if self._buffers.large:
                of_turn[1 + count :] = torch.tensor(self._buffers.changed(), device="cpu")
        self._begin_turn(self._turn + 1)

    def _begin_turn(self, turn: int) -> None:
        self._turn, self._sent = turn, bytearray(len(self._sums))
        self._used = bytearray(len(self._parameters))

    def _skip_to(self, turn: int) -> None:
        """Add zeros for the turns before this one in which no virtual rank has samples."""
        while self._turn < turn:
            self._add_up_all()
            for sums in self._sums:
                sums.add_zeros(self._turn)
            self._begin_turn(self._turn + 1)

    # ------------------------------------------------------------ the end of a step

    def _hand_over(self) -> None:
        """Give each parameter its part of the sum, or no gradient if no virtual rank used it."""
        count = len(self._parameters)
        notes = self._noted()
        self.loss = notes[0].clone()
        used = (notes[1 : 1 + count] > 0).tolist()
        for sums in self._sums:
            for number, local in zip(sums.members, sums.gather(self._group), strict=True):
                if used[number]:
                    self._parameters[number].grad = laid_out_like(self._parameters[number], local)
        self._buffers.arrive((notes[1 + count :] > 0).tolist())
        add_earlier(self._parameters, self._earlier)
        self._earlier = []

    def _noted(self) -> torch.Tensor:
        """Return the sum of the notes of all virtual ranks, in the order of elasticd.data.summing."""
        heard = [torch.empty_like(self._notes) for _ in range(self._size)]
        dist.all_gather(heard, self._notes)
        rows = torch.stack(heard, dim=1).flatten(0, 1)[: self._virtual_ranks].unbind()
        plan = plan_sums((range(v, v + 1) for v in range(self._virtual_ranks)), self._virtual_ranks)
        stack: list[torch.Tensor] = []
        for row, halves in zip(rows, plan.sums, strict=True):
            stack.append(row)
            for _ in range(halves):
                upper = stack.pop()
                stack[-1] = stack[-1] + upper
        [total] = stack
        return total


def _units(model: nn.Module, parameters: Sequence[torch.Tensor]) -> list[_Unit]:
    """Return the whole model, and the modules that fully_shard gathers as one. A parameter that several of
    them have, which is then replicated, is the whole model's: its gradient arrives at the last of them."""
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    units = [_Unit(model, [])]

    def visit(module: nn.Module, unit: _Unit) -> None:
        if isinstance(module, FSDPModule) and module is not model:
            unit = _Unit(module, [])
            units.append(unit)
        its = module._parameters.items()
        unit.places.extend((module, name, numbers[id(p)]) for name, p in its if p is not None)
        for child in module.children():
            visit(child, unit)

    visit(model, units[0])
    owners: dict[int, set[int]] = {}
    for number, unit in enumerate(units):
        for place in unit.places:
            owners.setdefault(place[2], set()).add(number)
    for unit in units[1:]:
        units[0].places.extend(place for place in unit.places if len(owners[place[2]]) > 1)
        unit.places[:] = [place for place in unit.places if len(owners[place[2]]) == 1]
    return units
