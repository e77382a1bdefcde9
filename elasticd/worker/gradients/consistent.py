"""Consistent mode: a step computes the same bits in a world of any size.

Nothing depends on the world's size. Virtual ranks decide in its place: on the order in which gradients are
added up (elasticd.data.summing), on the random numbers for a part of the batch, and on the buffers before and
after the part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from elasticd.data.dealing import Portion, deal
from elasticd.worker.gradients.buckets import Bucket, Exchange, fill
from elasticd.worker.gradients.buffers import Buffers
from elasticd.worker.values import randomness
from elasticd.worker.world.group import World

UNDER_WAY = 4  # buckets in flight; with fewer, workers wait for each other in the backward pass
BETWEEN = -1  # used as virtual rank to seed the random numbers between two steps
TWICE = (
    "consistent mode needs each parameter's gradient at once, and one came twice in a backward pass: use "
    "checkpoint(..., use_reentrant=False)"
)


class ConsistentReduction:
    """The Reduction of consistent mode in one world. Call ``close`` at the world's end.

    ``modules``: the modules to train, not wrapped. ``place``: returns numbers that identify a step, the same
    in any world. ``world``: None where the world cannot change. ``generators``: the script's own, which are
    seeded for each virtual rank as torch's is.

    The gradient of each virtual rank is computed separately, and added up as in elasticd.data.summing. For n
    virtual ranks a worker thus holds up to log2(n) gradients. The worker sends the gradients, bucket by
    bucket, during its last backward pass.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        virtual_ranks: int,
        seed: int,
        place: Callable[[], Sequence[int]],
        world: World | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._modules, self._seed, self._place, self._world = modules, seed, place, world
        self._generators = generators
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        blocks = deal(virtual_ranks, size)
        self._block = blocks[rank]
        self._exchange = Exchange(blocks, rank, virtual_ranks)
        self._buffers = Buffers(modules, rank, size, source=size - 1)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._parameters: list[nn.Parameter] = []
        self._under_way = False
        self.loss: torch.Tensor | None = None  # the loss of the last global batch

    # ------------------------------------------------------------ the Reduction protocol

    def begin(self, left_out: Callable[[], int]) -> None:
        """Do nothing: the order of the sums does not depend on the models that a step calls."""

    @contextlib.contextmanager
    def part(self, part: Portion) -> Iterator[None]:
        if not self._under_way:
            self._begin()
        if part.opens:
            self._skip_to(part.virtual_rank)
            if self._block.index(part.virtual_rank) > 0:
                self._buffers.put_back()
            self._loss = None
            self._reseed(part.virtual_rank)
        yield
        if part.closes and part.virtual_rank != self._block[-1]:
            self._add(range(len(self._buckets)))
            self._loss = None

    def backward(self, loss: torch.Tensor, part: Portion) -> None:
        weighted = loss * part.weight
        mine = weighted.detach()
        self._loss = mine if self._loss is None else self._loss + mine
        self._is_last = part.closes and part.virtual_rank == self._block[-1]
        weighted.backward()  # type: ignore[no-untyped-call]

    def finish(self, parts: list[Portion]) -> None:
        if not self._under_way:
            self._begin()
        self._is_last = False
        with torch.no_grad():
            if self._block:
                self._skip_to(self._block[-1])
            for _ in range(self._sent, len(self._buckets)):
                self._send_next()
            # NCCL needs one order of calls on all ranks, and some ranks have sent all buckets by now.
            self._buffers.send_round()
            for bucket in self._buckets[-UNDER_WAY:]:
                bucket.add_up()
            for bucket in self._buckets:
                bucket.gather()
            self._hand_over()
        self._under_way = False
        if self._world is not None:
            self._world.sums += 1
        self._reseed(BETWEEN)

    def _reseed(self, turn: int) -> None:
        randomness.seed_all(self._seed, *self._place(), turn, generators=self._generators)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # ------------------------------------------------------------ the beginning of a step

    def _begin(self) -> None:
        trained = {id(p): p for module in self._modules for p in module.parameters() if p.requires_grad}
        if list(trained) != [id(p) for p in self._parameters]:
            self._lay_out(list(trained.values()))
        if self._world is not None:
            self._world.sums_begun += 1
        self._under_way = True
        self._sent = 0
        self._missing = [len(members) for members in self._members]
        self._seen = bytearray(len(self._parameters))
        self._next = self._block.start  # the next virtual rank to add
        self._loss = None
        self._is_last = False
        self._earlier = copies_of_gradients(self._parameters)
        self._used = bytearray(len(self._parameters))
        for parameter in self._parameters:
            parameter.grad = None
        self._buffers.note()
        if len(self._block) > 1:
            self._buffers.keep()

    def _lay_out(self, parameters: list[nn.Parameter]) -> None:
        """Lay out buckets for these parameters, the last parameter first, as the backward pass does."""
        self.close()
        self._parameters = parameters
        # Notes of a virtual rank: its loss, the parameters it used, and the buffers it changed. The notes are
        # sent as one more gradient, in the last bucket.
        count = len(parameters)
        self._notes = torch.zeros(1 + count + self._buffers.large, device=parameters[0].device)
        likes = [*(p.detach() for p in parameters), self._notes]
        buckets = fill(likes, [*reversed(range(count)), count])
        self._buckets = [Bucket(members, [likes[i] for i in members], self._exchange) for members in buckets]
        assert buckets[-1][-1] == count
        self._members = [[i for i in members if i < count] for members in buckets]
        self._bucket_of = {i: bucket for bucket, members in enumerate(self._members) for i in members}
        rooms: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}
        for number, (bucket, members) in enumerate(zip(self._buckets, buckets, strict=True)):
            like = likes[members[0]]
            kind = number % UNDER_WAY, like.dtype, like.device
            if kind not in rooms or len(rooms[kind]) < bucket.arrival_elements:
                rooms[kind] = like.new_empty(bucket.arrival_elements)
        self._rooms = [
            rooms[n % UNDER_WAY, likes[m[0]].dtype, likes[m[0]].device] for n, m in enumerate(buckets)
        ]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, i))  # type: ignore[no-untyped-call]
            for i, parameter in enumerate(parameters)
        ]

    # ------------------------------------------------------------ virtual ranks

    def _skip_to(self, virtual_rank: int) -> None:
        """Add zeros for the virtual ranks before this one that have no samples."""
        while self._next < virtual_rank:
            self._add(range(len(self._buckets)))

    def _add(self, buckets: Sequence[int]) -> None:
        """Add the gradients of the virtual rank that has just ended to these buckets."""
        for bucket in buckets:
            gradients: list[torch.Tensor | None] = []
            for i in self._members[bucket]:
                gradient = self._parameters[i].grad
                gradients.append(gradient)
                self._used[i] = gradient is not None
                self._parameters[i].grad = None
            if bucket == len(self._buckets) - 1:
                gradients.append(self._noted())
                self._next += 1
            self._buckets[bucket].add(gradients)

    def _noted(self) -> torch.Tensor:
        count = len(self._parameters)
        self._notes.zero_()
        if self._loss is not None:
            self._notes[0] = self._loss
            self._notes[1 : 1 + count] = torch.frombuffer(self._used, dtype=torch.uint8)
            if self._buffers.large:
                self._notes[1 + count :] = torch.tensor(self._buffers.changed(), device="cpu")
        return self._notes

    def _arrived(self, number: int, parameter: torch.Tensor) -> None:
        """Note that the backward pass has reached this parameter."""
        if not self._is_last:
            return
        if self._seen[number]:
            raise RuntimeError(TWICE)
        self._seen[number] = 1
        self._missing[self._bucket_of[number]] -= 1
        while self._sent < len(self._buckets) and not self._missing[self._sent]:
            self._send_next()

    def _send_next(self) -> None:
        """Send the next bucket, and add up an earlier bucket, which has probably arrived."""
        number = self._sent
        self._sent += 1
        if self._block:
            self._add([number])
        if number >= UNDER_WAY:
            self._buckets[number - UNDER_WAY].add_up()
        self._buckets[number].hand_in(self._rooms[number])

    # ------------------------------------------------------------ the end of a step

    def _hand_over(self) -> None:
        """Give each parameter its sum, or no gradient if no virtual rank used it."""
        for bucket, members in zip(self._buckets, self._members, strict=True):
            for i, total in zip(members, bucket.sums, strict=False):
                self._parameters[i].grad = total
        count = len(self._parameters)
        notes = self._buckets[-1].sums[-1]
        self.loss = notes[0].clone()
        used = notes[1 : 1 + count]
        if not used.all():
            for i in (used == 0).nonzero().flatten().tolist():
                self._parameters[i].grad = None
        self._buffers.arrive((notes[1 + count :] > 0).tolist())
        add_earlier(self._parameters, self._earlier)
        self._earlier = []


def copies_of_gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
    """Return copies of the gradients that the parameters have before a step; None where there is none."""
    return [None if p.grad is None else p.grad.clone() for p in parameters]


def add_earlier(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add the gradients from before the step (``copies_of_gradients``) to those of the step, as
    ``backward`` does."""
    for parameter, earlier in zip(parameters, gradients, strict=True):
        if earlier is not None:
            if parameter.grad is None:
                parameter.grad = earlier
            else:
                parameter.grad += earlier


# ---------------------------------------------------------------- the same bits on other machines


_MEANINGS = {
    "torch": ("torch", "install the same version everywhere"),
    "cpu": ("the processor's instructions", "set ATEN_CPU_CAPABILITY to a value that all machines have"),
    "gpu": ("the GPU", "use GPUs of one kind"),
}


_BY_TENSOR = tuple(getattr(torch.optim, n) for n in ("Adafactor", "LBFGS", "Muon") if hasattr(torch.optim, n))


class Arithmetic:
    """The facts that decide how this machine rounds, kept in the State. A later worker must have the same,
    and uses as many threads."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""

    def state_dict(self) -> dict[str, Any]:
        return {
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "gpu": self._gpu,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use as many threads as the saved state. Raises ValueError if torch's version, the processor or the
        GPU differ, so that this worker would compute other bits."""
        mine = self.state_dict()
        for name, (meaning, remedy) in _MEANINGS.items():
            if mine[name] != state[name]:
                raise ValueError(
                    f"{meaning} is {mine[name] or 'none'} here and {state[name] or 'none'} where the "
                    f"training began, so that results would differ: {remedy}, or give Data consistent=False"
                )
        if mine["threads"] != state["threads"]:
            torch.set_num_threads(state["threads"])


def consistent_arithmetic(
    modules: Mapping[str, nn.Module], *, wraps: bool, device: torch.device | None = None
) -> Arithmetic:
    """Return the arithmetic of a State with these modules.

    ``wraps``: the script wraps modules itself. ``device``: by default that of the model. Raises TypeError,
    with a sentence, for modules that cannot give the same results in a world of another size.
    """
    if wraps:
        raise TypeError(
            "consistent mode adds gradients up itself, and calls the model as it is: leave out wrap=, or "
            "give Data consistent=False"
        )
    if "model" not in modules:
        raise TypeError("Data(consistent=True) needs a model: give State model=")
    for whole in modules.values():
        for name, module in whole.named_modules():
            where = f"{type(module).__name__} {name}".strip()
            if isinstance(module, nn.SyncBatchNorm):
                raise TypeError(
                    f"{where} adds up over the workers of the present world, so it cannot be consistent: "
                    "use BatchNorm, which is each virtual rank's own, or give Data consistent=False"
                )
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise TypeError(
                    f"{where} has sparse gradients, which consistent mode cannot add up: make it with "
                    "sparse=False, or give Data consistent=False"
                )
    return Arithmetic(device or next(modules["model"].parameters()).device)


def refuse_layouts(
    modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], device: torch.device
) -> None:
    """Raise TypeError, with a sentence, for what rounds by the layout of a sharded model, which differs in a
    world of another size."""
    for name, optimizer in optimizers.items():
        kind = type(optimizer).__name__
        if isinstance(optimizer, _BY_TENSOR):
            raise TypeError(
                f"{name} is of {kind}, whose step computes with whole tensors, so it cannot be consistent "
                "for a sharded model: use an optimizer whose step is elementwise, such as AdamW, or give "
                "Data consistent=False"
            )
        if device.type == "cpu" and any(group.get("fused") for group in optimizer.param_groups):
            raise TypeError(
                f"{name} is of {kind} with fused=True, which on CPUs rounds by the layout of a sharded "
                "model: leave out fused=True, or give Data consistent=False"
            )
    for whole in modules.values():
        for name, parameter in whole.named_parameters():
            if device.type == "cpu" and parameter.is_floating_point() and parameter.itemsize < 4:
                raise TypeError(
                    f"{name} is in {parameter.dtype}, in which optimizers on CPUs round by the layout of a "
                    "sharded model: keep parameters in torch.float32, and compute in a smaller type by "
                    "MixedPrecisionPolicy(param_dtype=...), or give Data consistent=False"
                )
