"""Compare the workers' parameters, which are the same after the same sums of gradients."""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from elasticd.core.page_layout import Fatal
from elasticd.worker.agent import agentpage
from elasticd.worker.commit.changes import Few, Sampled, is_plain
from elasticd.worker.commit.shared import Shared
from elasticd.worker.world.group import World

_log = logging.getLogger(__name__)
ULPS_MAX = 1000.0  # smaller differences come from rounding on different machines, not from other gradients
SHARE = 0.001  # at most this share of the time is spent on comparing
EXCHANGE_S = 0.0005  # about the time of one exchange


class Diverged(RuntimeError):
    """The workers have different parameters. The message says which parameters of which workers."""


class Trained:
    """The trained parameters, by name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.names = [*parameters]
        self._sampled = Sampled([*parameters.values()])

    @property
    def few(self) -> Few:
        return self._sampled.few


def trained_of(modules: Mapping[str, nn.Module], chosen: set[int]) -> Trained:
    """Return the parameters that must be the same in all workers. Parameters that DistributedDataParallel
    ignores need not be. ``chosen``: the ids of an optimizer's parameters."""
    found: dict[str, nn.Parameter] = {}
    for name, module in modules.items():
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        for key, parameter in module.named_parameters():
            if id(parameter) in chosen and key not in ignored and is_plain(parameter):
                found[f"{name}.{key}"] = parameter
    return Trained(found)


def digest(trained: Trained) -> int:
    """Return 63 bits of a few elements of each parameter."""
    summary = hashlib.blake2b(digest_size=8)
    for few in trained.few.read():
        summary.update(_bytes(few))
    return int.from_bytes(summary.digest(), "little") >> 1


def compare(trained: Trained, world: World, ranks: Sequence[int], *, exact: bool) -> None:
    """Compare parameters on all workers together, when the digests of these ranks differ.

    Raises Diverged. ``exact``: to the bit. Otherwise the last bits may differ, with one warning.
    """
    few = trained.few
    mine = few.read()
    parts = [m.cpu().view(torch.uint8) for m in mine]
    packed = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
    with world.or_over():
        dist.all_gather(sizes, torch.tensor([len(packed)]))
        if len({int(size) for size in sizes}) > 1:
            raise _diverged("not all workers train as many parameters")
        heard = [torch.empty_like(packed) for _ in range(world.size)]
        dist.all_gather(heard, packed)
    wrong: dict[int, list[int]] = {}
    slightly = False
    usual = _unpacked(_commonest([heard[rank] for rank in ranks]), mine)
    for rank in ranks:
        for number, ulps in few.differing(usual, _unpacked(heard[rank], mine)).items():
            if exact or ulps > ULPS_MAX:
                wrong.setdefault(number, []).append(rank)
            else:
                slightly = True
    if wrong:
        first = min(wrong)
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        who = ", ".join(map(str, wrong[first]))
        raise _diverged(f"{trained.names[first]}{more} of worker {who} is not what the other workers have")
    if slightly and world.rank == 0:
        _say_slightly()


def _diverged(what: str) -> Diverged:
    agentpage.fatal(Fatal.BAD_DATA)  # a restart would end the same way
    return Diverged(
        f"the workers train apart: {what}. Call state.model, and what else of State's is trained by its name "
        "(state.head), for each forward pass, and change parameters alike in all workers. Where they shall "
        "differ, give State compare=False"
    )


class Alike:
    """Compare the workers of one world now and then, at commits. All workers agree on the next comparison."""

    def __init__(
        self, trained: Trained | None, shared: Shared, world: World, step: int, *, exact: bool
    ) -> None:
        self._trained, self._shared, self._world, self._exact = trained, shared, world, exact
        self._every, self._next = 1, step + 1
        self._began = time.monotonic(), step

    def passed(self, step: int) -> None:
        """Call it after each commit. Raises Diverged, Unlike, and WorldChanged."""
        if step < self._next:
            return
        began = time.monotonic()
        mine = digest(self._trained) if self._trained is not None else 0
        shared = self._shared.digest()
        cost_s = time.monotonic() - began + EXCHANGE_S
        since, first = self._began
        each_s = max((began - since) / max(step - first, 1), 1e-6)
        said = torch.tensor([mine, shared, min(int(cost_s / (SHARE * each_s)), 1 << 40)])
        heard = [torch.empty_like(said) for _ in range(self._world.size)]
        with self._world.or_over():
            dist.all_gather(heard, said)
        everybody = range(self._world.size)
        if self._trained is not None and len({int(h[0]) for h in heard}) > 1:
            compare(self._trained, self._world, everybody, exact=self._exact)
        if len({int(h[1]) for h in heard}) > 1:
            self._shared.compare(self._world, everybody, exact=self._exact)
        self._every = max(1, min(2 * self._every, max(int(h[2]) for h in heard)))
        self._next = step + self._every


def _commonest(heard: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the most common data; of several, the one with the lowest rank."""
    texts = [_bytes(h) for h in heard]
    return heard[max(range(len(texts)), key=lambda rank: (texts.count(texts[rank]), -rank))]


def _unpacked(packed: torch.Tensor, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(packed, [like.nbytes for like in likes])
    return [part.clone().view(like.dtype) for part, like in zip(parts, likes, strict=True)]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().view(torch.uint8).numpy().tobytes()


@functools.cache
def _say_slightly() -> None:
    """Warn once in a process."""
    _log.warning(
        "the workers' parameters differ in the last bits, as they do on machines of several kinds or with "
        "different OMP_NUM_THREADS: training goes on"
    )
