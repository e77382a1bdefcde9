"""Compare the values of a State that must be the same in all workers, except parameters."""

from __future__ import annotations

import hashlib
import logging
import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from elasticd.checkpoint.client.collectives import world_group
from elasticd.core.page_layout import Fatal
from elasticd.worker.agent_link import agentpage
from elasticd.worker.gradients.buffers import SMALL
from elasticd.worker.values.contents import Contents
from elasticd.worker.values.plaindata import number_of, plain_key
from elasticd.worker.values.randomness import GeneratorState
from elasticd.worker.world.group import World, or_over

FEW = 4096  # the number of elements of a large tensor that are compared
NUMBERS_MAX = 2 * SMALL  # how many numbers of a value may differ by rounding; the rest must be equal
EXACT_MAX = 1 << 53  # a double represents every integer up to this one exactly
SHOWN_MAX = 40  # the most characters of a value in a message
ROUNDING = 1e-4  # smaller relative differences come from rounding, which differs between kinds of machines


class ValueSummary(NamedTuple):
    """A summary of a value. ``digest``: of the whole value. ``shown``: the value as text, if it is short.
    ``numbers``: the value's first ``NUMBERS_MAX`` numbers, as doubles. ``counts``: the positions of the
    integers in ``numbers``. ``coarse``: a digest of the value without ``numbers``. The last three are empty
    if only the digest is needed."""

    digest: int = 0
    shown: str = ""
    coarse: int = 0
    numbers: bytes = b""
    counts: tuple[int, ...] = ()

    def is_close(self, other: ValueSummary) -> bool:
        """Whether the values are equal except for the rounding of floating-point numbers. Integers must be
        equal, even if one value has the integer as a floating-point number."""
        mine, its = array("d", self.numbers), array("d", other.numbers)
        counts = {*self.counts, *other.counts}
        alike = self.coarse == other.coarse and len(mine) == len(its) and len(mine) > 0
        return alike and all(
            a == b
            or (math.isnan(a) and math.isnan(b))
            or (
                math.isclose(a, b, rel_tol=ROUNDING, abs_tol=1e-12)
                and not (at in counts and a.is_integer() and b.is_integer())
            )
            for at, (a, b) in enumerate(zip(mine, its, strict=True))
        )


Summary = dict[str, ValueSummary]  # the summary of each value, by name
_NOTHING = ValueSummary()
_log = logging.getLogger(__name__)


class Unlike(RuntimeError):
    """The workers have different values where all must have the same. The message names the value."""


class Shared:
    """The shared values of a State: plain data, objects with ``state_dict``, optimizers' settings."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._began: Summary = {}
        self.digest_of_beginning = _digest_of(self._began)
        self._warned = False

    def begin(self) -> None:
        """Note the script's initial values, without the contents of tensors and without objects. Both may
        depend on parameters, which are not the same in all workers yet."""
        contents = self._contents
        drawn = {n: s.state_dict() for n, s in contents.stateful.items() if isinstance(s, GeneratorState)}
        plain = contents.shared(contents.plain)
        begins = {n: _summary_of(v, contents=False, numbers=True) for n, v in plain.items()}
        self._began = begins | {n: _summary_of(s) for n, s in contents.shared(drawn).items()}
        self.digest_of_beginning = _digest_of(self._began)

    def digest(self) -> int:
        return _digest_of(self._summary())

    def _summary(self, *, numbers: bool = False) -> Summary:
        """Return the summary of the present values."""
        contents = self._contents
        settings = {
            f"{name}.param_groups": [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
            for name, o in contents.optimizers.items()
        }
        stateful = {n: s.state_dict() for n, s in contents.shared(contents.stateful).items() if n[0] != "_"}
        shared = {**contents.shared(contents.plain), **stateful, **settings}
        return {name: _summary_of(value, numbers=numbers) for name, value in shared.items()}

    def compare(self, world: World | None, ranks: Sequence[int], *, exact: bool = False) -> None:
        """Compare the present values, after the digests of these ranks were found to differ. All workers call
        it together. Raises Unlike, and WorldChanged. ``exact``: all bits must be equal. Otherwise
        floating-point numbers may differ by rounding, with one warning."""
        heard = _heard(self._summary(numbers=True), world)
        if differs := difference(heard, ranks, exact=exact):
            raise _unlike(
                f"{differs}. A State's values are sent from worker to worker: make them the same in all, as "
                "by dist.all_reduce, or give State worker.Local(...), which each worker keeps for itself"
            )
        self._warn_of(difference(heard, ranks))

    def _warn_of(self, differs: str) -> None:
        if differs and not self._warned:
            self._warned = True
            _log.warning(
                "%s, by rounding. A State's values are sent from worker to worker: where a decision depends "
                "on the last digits, make the value the same in all workers, as by dist.all_reduce",
                differs,
            )

    def compare_beginning(self, world: World, source: int, *, fresh: bool, exact: bool = False) -> str:
        """Compare the initial values, after their digests were found to differ. All workers call it together.

        Return in words how this worker's values differ from those of the worker ``source``. Raises Unlike if
        all workers begin now (``fresh``), and WorldChanged.
        """
        heard = _heard(self._began, world)
        if fresh and (differs := difference(heard, range(world.size), exact=exact)):
            raise _unlike(
                f"{differs}, as they begin. All would get the value of worker {source}: give State the same "
                "value in each worker, or worker.Local(...), which each worker keeps for itself"
            )
        return difference(heard, [source, world.rank])


def _unlike(sentence: str) -> Unlike:
    agentpage.fatal(Fatal.BAD_DATA)  # a restart would end the same way
    return Unlike(sentence)


def _heard(mine: Summary, world: World | None) -> list[Summary]:
    """Return each worker's summary, by rank. All workers must call it."""
    with or_over(world):
        said = world_group().gather(msgspec.json.encode(mine))
    return [msgspec.json.decode(raw, type=Summary) for raw in said]


def difference(heard: Sequence[Summary], ranks: Sequence[int], *, exact: bool = True) -> str:
    """Return the first difference between these ranks, in words; empty if there is none. ``exact``: all bits
    must be equal. Otherwise differences by rounding do not count."""
    for name in sorted({name for rank in ranks for name in heard[rank]}):
        its = {rank: heard[rank].get(name, _NOTHING) for rank in ranks}
        digests = [seen.digest for seen in its.values()]
        usual = max(digests, key=digests.count)
        first = next(rank for rank in ranks if its[rank].digest == usual)
        others = [rank for rank in ranks if its[rank].digest != usual]
        if not exact:
            others = [rank for rank in others if not its[rank].is_close(its[first])]
        if others:
            one, other = (
                f"worker {rank}" + (f" ({its[rank].shown})" if its[rank].shown else "")
                for rank in (first, others[0])
            )
            return f"State's {name} is not the same in {one} and {other}"
    return ""


def _summary_of(value: Any, *, contents: bool = True, numbers: bool = False) -> ValueSummary:
    """Return the summary of the value. ``numbers``: with the parts that ``ValueSummary.is_close`` needs."""
    found = hashlib.blake2b(digest_size=8)
    _feed(found, value, contents)
    shown = repr(value) if isinstance(value, int | float | str | None) else ""
    if len(shown) > SHOWN_MAX:
        shown = f"{shown[:SHOWN_MAX]}..."
    if not numbers:
        return ValueSummary(number_of(found), shown)
    coarse, apart = hashlib.blake2b(digest_size=8), _Numbers()
    _feed(coarse, value, contents, apart)
    return ValueSummary(
        number_of(found), shown, number_of(coarse), apart.doubles.tobytes(), tuple(apart.counts)
    )


class _Numbers:
    """Collects ``numbers`` and ``counts`` of a ``ValueSummary``."""

    def __init__(self) -> None:
        self.doubles = array("d")
        self.counts: list[int] = []

    def takes(self, number: float) -> bool:
        """Add a number. Return whether there was room for it, and it is exact as a double."""
        whole = isinstance(number, int)
        if len(self.doubles) >= NUMBERS_MAX or (whole and abs(number) > EXACT_MAX):
            return False
        if whole:
            self.counts.append(len(self.doubles))
        self.doubles.append(number)
        return True


def _feed(summary: hashlib.blake2b, value: Any, contents: bool, numbers: _Numbers | None = None) -> None:
    """Feed the value into the digest. Equal data gives equal digests in all processes. Numbers are equal if
    their values are, also if one is an int and the other a float or a numpy number.

    ``numbers``: collects numbers and the elements of floating-point tensors, which then do not go into the
    digest.
    """
    if type(value).__module__ == "numpy" and hasattr(value, "item") and value.shape == ():
        value = value.item()
    if numbers is not None and isinstance(value, int | float) and numbers.takes(value):
        summary.update(b"number;")
    elif isinstance(value, torch.Tensor):
        summary.update(f"{value.dtype} {[*value.shape]};".encode())
        if contents:
            flat = value.detach().reshape(-1)
            few = flat if len(flat) <= SMALL else flat[:: len(flat) // FEW]
            plain = few.cpu().resolve_conj().resolve_neg().contiguous()
            if numbers is not None and plain.is_floating_point():
                room = NUMBERS_MAX - len(numbers.doubles)
                numbers.doubles.extend(plain[:room].double().tolist())
                plain = plain[room:]
            summary.update(plain.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        summary.update(f"dict {len(value)};".encode())
        items = {plain_key(key, "it"): item for key, item in value.items()}
        for key in sorted(items, key=repr):
            summary.update(f"{key!r}:".encode())
            _feed(summary, items[key], contents, numbers)
    elif isinstance(value, list | tuple):
        summary.update(f"{type(value).__name__} {len(value)};".encode())
        for item in value:
            _feed(summary, item, contents, numbers)
    elif isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        summary.update(f"number {int(value)};".encode())
    elif isinstance(value, set):
        summary.update(f"set {sorted(map(repr, value))};".encode())
    else:
        summary.update(f"{type(value).__name__} {value!r};".encode())


def _digest_of(summary: Summary) -> int:
    raw = repr(sorted((name, seen.digest) for name, seen in summary.items())).encode()
    return number_of(hashlib.blake2b(raw, digest_size=8))
