"""Compare the values that must be the same in all workers: parameters and a State's shared values."""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from elasticd.checkpoint.client.collectives import world_group
from elasticd.checkpoint.client.tensors import is_plain
from elasticd.core.page_layout import Fatal
from elasticd.worker.agent_link import agentpage
from elasticd.worker.commit.changes import SampledParameters
from elasticd.worker.commit.shared import Shared
from elasticd.worker.values.contents import Contents
from elasticd.worker.values.plaindata import number_of
from elasticd.worker.world.group import World, gathered

_log = logging.getLogger(__name__)
ULPS_MAX = 1000.0  # smaller differences come from rounding on different machines, not from other gradients
SHARE = 0.001  # comparisons take at most this share of the time
EXCHANGE_S = 0.0005  # about the time of one exchange of digests


class Diverged(RuntimeError):
    """The workers have different parameters. The message says which parameters of which workers."""


class Digests(NamedTuple):
    """Digests of 63 bits, equal in workers with equal values; 0 where nothing is compared.

    ``shared``: of the shared values, without parameters. ``began``: of the shared values when the script
    began.
    """

    parameters: int = 0
    shared: int = 0
    began: int = 0


class Comparison:
    """The comparison of a State's values with other workers'.

    ``compares``: whether anything is compared. ``exact``: all bits must be equal; otherwise differences by
    rounding are accepted. All workers call each method together, except ``follow``, ``begin``, ``enter``,
    ``leave`` and ``digests``.
    """

    def __init__(self, contents: Contents, *, compares: bool, exact: bool) -> None:
        self._compares, self._exact = compares, exact
        self.follow(contents)
        self._shared = Shared(contents)
        self._world: World | None = None
        self._every, self._next = 1, 0
        self._began = 0.0, 0

    def follow(self, contents: Contents) -> None:
        """Compare the parameters of these modules from now on: they are others for each world if the model is
        sharded. Parameters that are sharded are not compared."""
        self._parameters = _to_compare(contents) if self._compares else {}
        self._sampled = SampledParameters([*self._parameters.values()])

    def begin(self) -> None:
        """Note the script's initial values."""
        self._shared.begin()

    def enter(self, world: World | None, step: int) -> None:
        """Compare the workers of this world now and then, from the next commit on."""
        self._world = world if world is not None and world.size > 1 and self._compares else None
        self._every, self._next = 1, step + 1
        self._began = time.monotonic(), step

    def leave(self) -> None:
        self._world = None

    def digests(self) -> Digests:
        if not self._compares:
            return Digests()
        return Digests(self._digest(), self._shared.digest(), self._shared.digest_of_beginning)

    def after_commit(self, step: int) -> None:
        """Compare after this commit if a comparison is due, and agree with the other workers when the
        next one is due. Raises Diverged, Unlike, and WorldChanged."""
        if self._world is None or step < self._next:
            return
        now = time.monotonic()
        mine = self.digests()
        cost_s = time.monotonic() - now + EXCHANGE_S
        since, first = self._began
        each_s = max((now - since) / max(step - first, 1), 1e-6)
        heard = gathered([*mine, min(int(cost_s / (SHARE * each_s)), 1 << 40)], self._world)
        self.compare(self._world, range(self._world.size), [Digests(*each[:3]) for each in heard])
        self._every = max(1, min(2 * self._every, max(each[3] for each in heard)))
        self._next = step + self._every

    def compare(self, world: World | None, ranks: Sequence[int], digests: Sequence[Digests]) -> None:
        """Compare the present values of these ranks, if their digests differ. Raises Diverged, Unlike, and
        WorldChanged. ``digests``: of all ranks."""
        if world is not None and len({digests[rank].parameters for rank in ranks}) > 1:
            self._compare_parameters(world, ranks)
        if len({digests[rank].shared for rank in ranks}) > 1:
            self._shared.compare(world, ranks, exact=self._exact)

    def compare_beginnings(self, world: World, source: int, *, fresh: bool, joins: bool) -> None:
        """Compare the scripts' initial values. Raises Unlike if they differ and all workers begin now
        (``fresh``). A worker that ``joins`` takes the values of rank ``source``, with a warning. Raises
        WorldChanged."""
        differs = self._shared.compare_beginning(world, source, fresh=fresh, exact=self._exact)
        if differs and joins:
            _log.warning(
                "%s, as their scripts began: worker %d takes the others' values. Give State "
                "worker.Local(...) for a value that each worker is to keep for itself",
                differs,
                world.rank,
            )

    # ------------------------------------------------------------ parameters

    def _digest(self) -> int:
        values = b"".join(map(_bytes, self._sampled.sample.read()))
        return number_of(hashlib.blake2b(values, digest_size=8))

    def _compare_parameters(self, world: World, ranks: Sequence[int]) -> None:
        sample = self._sampled.sample
        mine = sample.read()
        with world.or_over():
            heard = world_group().gather(b"".join(map(_bytes, mine)))
        if len({len(packed) for packed in heard}) > 1:
            raise _diverged("the workers train different numbers of parameters")
        wrong: dict[int, list[int]] = {}
        slightly = False
        # Of several that are equally common, this is the one of the lowest rank.
        [(commonest, _)] = Counter(heard[rank] for rank in ranks).most_common(1)
        usual = _unpacked(commonest, mine)
        for rank in ranks:
            for number, ulps in sample.differing(usual, _unpacked(heard[rank], mine)).items():
                if self._exact or ulps > ULPS_MAX:
                    wrong.setdefault(number, []).append(rank)
                else:
                    slightly = True
        if wrong:
            first = min(wrong)
            name = [*self._parameters][first]
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            who = ", ".join(map(str, wrong[first]))
            raise _diverged(f"{name}{more} of worker {who} differs from the other workers'")
        if slightly and world.rank == 0:
            _say_slightly()


def _to_compare(contents: Contents) -> dict[str, nn.Parameter]:
    """Return the parameters that an optimizer trains, by name. Left out are parameters that
    DistributedDataParallel was told to ignore, since they need not be the same in all workers."""
    trained = contents.trained
    found: dict[str, nn.Parameter] = {}
    for name, module in contents.modules.items():
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        for key, parameter in module.named_parameters():
            if id(parameter) in trained and key not in ignored and is_plain(parameter):
                found[f"{name}.{key}"] = parameter
    return found


def _diverged(what: str) -> Diverged:
    agentpage.fatal(Fatal.BAD_DATA)  # a restart would end the same way
    return Diverged(
        f"the workers have different parameters: {what}. Call state.model, and other trained modules as "
        "state.NAME, for each forward pass, and change parameters in the same way in all workers. If the "
        "parameters are meant to differ, give State compare=False"
    )


def _unpacked(packed: bytes, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(
        torch.frombuffer(bytearray(packed), dtype=torch.uint8), [like.nbytes for like in likes]
    )
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
