"""The values of a State that are the same in all workers, besides parameters, and the values that are a
worker's own."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import torch
from torch.optim import Optimizer

from elasticd.core.page import Fatal
from elasticd.worker import told
from elasticd.worker.buffers import SMALL
from elasticd.worker.chance import Drawn
from elasticd.worker.plain import plain_key
from elasticd.worker.together import Together
from elasticd.worker.world import World

T = TypeVar("T")
FEW = 4096  # elements of a large tensor that are compared
SHOWN_MAX = 40  # characters of a shown value
Summary = dict[str, tuple[int, str]]  # by name: a digest, and the value if it can be shown
_NOTHING = (0, "")


@dataclass(frozen=True, slots=True)
class Local(Generic[T]):
    """A value of each worker's own, given to a State in place of a shared one.

    Example: ``State(..., losses=worker.Local([]))``, then ``state.losses``. The value is restored when a step
    is abandoned, like all others. It is never sent to another worker, and is in no checkpoint: each process
    begins with the value given here.
    """

    value: T


class Unlike(RuntimeError):
    """The workers have different data where they must have the same. The message says which."""


class Shared:
    """The shared values of a State: plain data, objects with ``state_dict``, optimizers' settings. ``own``:
    the names of each worker's own values."""

    def __init__(
        self,
        plain: Mapping[str, Any],
        stateful: Mapping[str, Any],
        optimizers: Mapping[str, Optimizer],
        own: Set[str],
    ) -> None:
        self._plain, self._stateful, self._optimizers, self._own = plain, stateful, optimizers, own
        self._began: Summary = {}

    def begin(self) -> None:
        """Note the script's initial values. Left out are the contents of tensors, which may depend on
        parameters that are not the same yet, and objects, which may contain such tensors."""
        drawn = {n: s.state_dict() for n, s in self._stateful.items() if isinstance(s, Drawn)}
        begins = {n: _summary_of(v, contents=False) for n, v in self._plain.items() if n not in self._own}
        self._began = begins | {n: _summary_of(s) for n, s in drawn.items() if n not in self._own}

    def digest_of_beginning(self) -> int:
        return _digest(repr(sorted(self._began.items())).encode())

    def digest(self) -> int:
        return _digest(repr(sorted(self._summary().items())).encode())

    def _summary(self) -> Summary:
        """Return the summary of the present values."""
        settings = {
            f"{name}.param_groups": [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
            for name, o in self._optimizers.items()
        }
        shared = {**self._plain, **{n: s.state_dict() for n, s in self._stateful.items()}, **settings}
        return {n: _summary_of(v) for n, v in shared.items() if n not in self._own and not n.startswith("_")}

    def compare(self, world: World | None, ranks: Sequence[int]) -> None:
        """Compare the present values on all workers together, when the digests of these ranks differ. Raises
        Unlike, and WorldChanged."""
        if differs := difference(_heard(self._summary(), world), ranks):
            raise _unlike(
                f"{differs}. What a State keeps goes from worker to worker: make it the same in all, as by "
                "dist.all_reduce, or give State worker.Local(...), which each worker keeps for itself"
            )

    def compare_beginning(self, world: World, source: int, *, fresh: bool) -> str:
        """Compare the initial values on all workers together, when their digests differ.

        Return how this worker's differ from those of ``source``, in words. Raises Unlike if all workers begin
        now, and WorldChanged.
        """
        heard = _heard(self._began, world)
        if fresh and (differs := difference(heard, range(world.size))):
            raise _unlike(
                f"{differs}, as they begin. All would get what worker {source} has: have the script give the "
                "same in each, or worker.Local(...), which each worker keeps for itself"
            )
        return difference(heard, [source, world.rank])


def _unlike(sentence: str) -> Unlike:
    told.fatal(Fatal.BAD_DATA)  # a restart would end the same way
    return Unlike(sentence)


def _heard(mine: Summary, world: World | None) -> list[Summary]:
    """Return each worker's summary, by rank. All workers must call it."""
    with world.or_over() if world is not None else contextlib.nullcontext():
        said = Together(in_step=True).gather(msgspec.json.encode(mine))
    return [msgspec.json.decode(raw, type=Summary) for raw in said]


def difference(heard: Sequence[Summary], ranks: Sequence[int]) -> str:
    """Return the first difference between these ranks, in words; empty if there is none."""
    for name in sorted({name for rank in ranks for name in heard[rank]}):
        its = {rank: heard[rank].get(name, _NOTHING) for rank in ranks}
        digests = [digest for digest, _ in its.values()]
        usual = max(digests, key=digests.count)
        if others := [rank for rank in ranks if its[rank][0] != usual]:
            first = next(rank for rank in ranks if its[rank][0] == usual)
            one, other = (
                f"worker {rank}" + (f" ({its[rank][1]})" if its[rank][1] else "")
                for rank in (first, others[0])
            )
            return f"State's {name} is not the same in {one} and {other}"
    return ""


def _summary_of(value: Any, *, contents: bool = True) -> tuple[int, str]:
    found = hashlib.blake2b(digest_size=8)
    _feed(found, value, contents)
    shown = repr(value) if isinstance(value, int | float | str | None) else ""
    if len(shown) > SHOWN_MAX:
        shown = f"{shown[:SHOWN_MAX]}..."
    return int.from_bytes(found.digest(), "little") >> 1, shown


def _feed(summary: hashlib.blake2b, value: Any, contents: bool) -> None:
    """Feed the value into the digest. Equal data gives equal digests, wherever it came from."""
    if isinstance(value, torch.Tensor):
        summary.update(f"{value.dtype} {[*value.shape]};".encode())
        if contents:
            flat = value.detach().reshape(-1)
            few = flat if len(flat) <= SMALL else flat[:: len(flat) // FEW]
            plain = few.cpu().resolve_conj().resolve_neg().contiguous()
            summary.update(plain.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        summary.update(f"dict {len(value)};".encode())
        items = {plain_key(key, "it"): item for key, item in value.items()}
        for key in sorted(items, key=repr):
            summary.update(f"{key!r}:".encode())
            _feed(summary, items[key], contents)
    elif isinstance(value, list | tuple):
        summary.update(f"{type(value).__name__} {len(value)};".encode())
        for item in value:
            _feed(summary, item, contents)
    elif isinstance(value, set):
        summary.update(f"set {sorted(map(repr, value))};".encode())
    else:
        summary.update(f"{type(value).__name__} {value!r};".encode())


def _digest(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 1
