"""Report values of a training to the agent's metrics: loss, samples, and values that the script names.

The values are written to the page of shared memory that the worker shares with its agent: a few stores, no
blocking call. Without an agent (torchrun, plain ``python``) they go nowhere.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from elasticd.core import page
from elasticd.core.page import Fatal

P = ParamSpec("P")
T = TypeVar("T")

_PAGE = "ELASTICD_PAGE"
_POLICY = "ELASTICD_ON_NONFINITE"


class NotFinite(ArithmeticError):
    """A loss or a gradient is NaN or infinite, and the job runs with ``--on-nonfinite`` stop or rollback. Do
    not catch it."""


class _Page:
    """This process's page. Outside an agent's worker it is memory that no process reads."""

    def __init__(self, path: str | None) -> None:
        self._memory: Any = self._open(path) if path else None
        if self._memory is None:
            self._memory = bytearray(page.WORDS * 8)
        whole = memoryview(self._memory)[: page.WORDS * 8]
        self.words = whole.cast("Q")
        self.doubles = whole.cast("d")
        self.bytes = whole
        self.names: dict[str, int] = {}

    @staticmethod
    def _open(path: str) -> mmap.mmap | None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            memory = mmap.mmap(fd, 4096, **({"trackfd": False} if sys.version_info >= (3, 13) else {}))
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)
        with memoryview(memory)[: page.WORDS * 8] as whole, whole.cast("Q") as words:
            mine = words[page.PID] == os.getpid()
        return memory if mine else None  # a child of the worker inherits only the variable

    def add(self, word: int, amount: int) -> None:
        self.words[word] += amount

    def value(self, name: str, value: float) -> None:
        at = self.names.get(name)
        if at is None:
            text = name.encode()
            room = page.NAME_WORDS * 8
            if len(self.names) >= page.VALUES_MAX:
                raise ValueError(
                    f"{name!r} is one name too many: a script may tell {page.VALUES_MAX} values of its own"
                )
            if not name.isidentifier() or len(text) > room:
                raise ValueError(f"{name!r} cannot be told: a name is a Python name of at most {room} bytes")
            at = self.names[name] = page.VALUES + len(self.names) * page.VALUE_WORDS
            self.doubles[at + page.NAME_WORDS] = value
            self.bytes[at * 8 : at * 8 + room] = text.ljust(room, b"\0")
        self.doubles[at + page.NAME_WORDS] = value


@functools.cache
def _page_of(pid: int) -> _Page:
    return _Page(os.environ.get(_PAGE))


def _page() -> _Page:
    return _page_of(os.getpid())


# ---------------------------------------------------------------- what scripts use


def report(*, loss: Any = None, samples: int = 0, **values: Any) -> None:
    """Report the loss of this step, its number of samples, and values by names of your own (at most 12).

    The agent exports them as metrics: ``worker.report(loss=loss, samples=len(batch), accuracy=hits /
    len(batch))``. Samples of a ``worker.Data`` are counted automatically.

    Values are numbers, or tensors of one element. Tensors on a GPU are copied without waiting, and reported
    once they have arrived. Raises ValueError for too many names. Raises NotFinite for a value that is NaN or
    infinite, if the job runs with ``--on-nonfinite=stop`` or ``rollback``.
    """
    there = _page()
    if samples:
        there.add(page.SAMPLES, int(samples))
    told = {"loss": loss, **values} if loss is not None else values
    known = {name: value for name, value in told.items() if value is not None}
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in known.values()):
        known = _ripe(known)
    _tell(there, {name: _number(value) for name, value in known.items()})


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _tell(there: _Page, known: dict[str, float]) -> None:
    for name, value in known.items():
        if name == "loss":
            there.doubles[page.LOSS] = value
            there.add(page.LOSSES, 1)
        else:
            there.value(name, value)
    wrong = [name for name, value in known.items() if not math.isfinite(value)]
    if wrong:
        not_finite(", ".join(f"{name} is {known[name]:g}" for name in wrong))


_pending: list[tuple[dict[str, Any], Any]] = []


def _ripe(known: dict[str, Any]) -> dict[str, Any]:
    """Return the newest earlier values that have arrived from the GPU, and start to copy the present ones."""
    arrived: dict[str, Any] = {}
    while _pending and _pending[0][1].query():
        arrived = _pending.pop(0)[0]
    if len(_pending) < 16:  # a loop far ahead of its GPU reports some values only
        copies = {
            name: value.detach().to("cpu", torch.float64, non_blocking=True)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in known.items()
        }
        fetched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        fetched.record()
        _pending.append((copies, fetched))
    return arrived


# ---------------------------------------------------------------- what the library uses


def policy() -> str:
    """Return what to do about a step that is not finite: "ignore", "stop" or "rollback"."""
    return os.environ.get(_POLICY, "ignore")


def not_finite(what: str) -> None:
    """Count a step that is not finite. Raises NotFinite unless the policy is "ignore"."""
    there = _page()
    there.add(page.NONFINITE, 1)
    act = policy()
    if act == "ignore":
        return
    said = f"after step {there.words[page.COMMITTED] - 1}: {what}" if there.words[page.COMMITTED] else what
    if act == "rollback" and _Checkpoints.there:
        base = there.words[page.BASE] - there.words[page.BASE_STEPS] if there.words[page.BASE] else 1
        there.words[page.ASTRAY] = base + there.words[page.STEPS]
        raise NotFinite(f"{said}; going back to the last checkpoint (--on-nonfinite=rollback)")
    fatal(Fatal.NOT_FINITE)
    if act == "rollback":
        raise NotFinite(
            f"{said}; --on-nonfinite=rollback needs a script that loads worker.Checkpoints, and this one "
            "has loaded none, so the job stops"
        )
    raise NotFinite(f"{said}; the job stops (--on-nonfinite=stop)")


def fatal(why: Fatal) -> None:
    """Tell the agent that this process ends now, and that the job is to end with it."""
    _page().words[page.FATAL] = page.FATALS.index(why)


def uses(what: page.Use) -> None:
    """Tell the agent that the script uses this part of the library."""
    _page().words[page.USES] |= what


def samples(number: int) -> None:
    """Count samples that were trained on."""
    _page().add(page.SAMPLES, number)


def committed(step: int) -> None:
    there = _page()
    there.words[page.COMMITTED] = 1 + step
    there.add(page.COMMITS, 1)


def begins_after(step: int) -> None:
    """Tell the agent that this worker continues after this step of the job."""
    there = _page()
    there.words[page.BASE_STEPS] = there.words[page.STEPS]
    there.words[page.BASE] = 1 + step


@contextmanager
def held_up() -> Iterator[None]:
    """Count the time of a ``with`` block as training held up by a checkpoint."""
    began = time.monotonic_ns()
    try:
        yield
    finally:
        there = _page()
        there.add(page.HELD_NS, time.monotonic_ns() - began)
        there.add(page.HELD, 1)


class _Checkpoints:
    there = False  # this script has checkpoints to go back to


def has_checkpoints() -> None:
    """Note that this script loads its checkpoints when it is restarted."""
    _Checkpoints.there = True


def goes_on(load: Callable[P, int | None]) -> Callable[P, int | None]:
    """Decorate a load function: note the step that it returns, None for the beginning."""

    @functools.wraps(load)
    def noted(*args: P.args, **kwargs: P.kwargs) -> int | None:
        step = load(*args, **kwargs)
        has_checkpoints()
        begins_after(step or 0)
        return step

    return noted


def holds_up(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function: count its time as training held up by a checkpoint."""

    @functools.wraps(function)
    def held(*args: P.args, **kwargs: P.kwargs) -> T:
        with held_up():
            return function(*args, **kwargs)

    return held
