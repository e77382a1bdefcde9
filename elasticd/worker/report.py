"""Report to the agent: values of a training for its metrics, and checkpoints that the script writes itself.
Act on values that are not finite."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import torch

from elasticd.channel.codec import ChannelClosed
from elasticd.channel.framing import Channel, close_all, connect
from elasticd.channel.worker_messages import (
    ADDRESS,
    AGENT_TO_WORKER,
    WORKER_TO_AGENT,
    Checkpointed,
    Leave,
)
from elasticd.core import page_layout as layout
from elasticd.core.page_layout import Fatal, Use
from elasticd.worker.agent_link.agentpage import AgentPage, fatal, own_page, uses
from elasticd.worker.agent_link.link import own_link

_POLICY = "ELASTICD_ON_NONFINITE"
_TOLD_AT_ONCE = 10  # how often the agent is told of the same path at once
_TOLD_AGAIN_S = 1.0  # after that, the time between two messages about the path


class NotFinite(ArithmeticError):
    """A loss or a gradient is NaN or infinite, and the job runs with ``--on-nonfinite`` stop or rollback. Do
    not catch it."""


def report(*, loss: Any = None, samples: int = 0, **values: Any) -> None:
    """Report the loss of this step, its number of samples, and values by names of your own (at most 12).

    The agent exports them as metrics: ``worker.report(loss=loss, samples=len(batch), accuracy=hits /
    len(batch))``. Samples of a ``worker.Data`` are counted automatically.

    Values are numbers, or tensors of one element. Tensors on a GPU are copied without waiting, and reported
    once they have arrived. Raises ValueError for too many names. Raises NotFinite for a value that is NaN or
    infinite, if the job runs with ``--on-nonfinite=stop`` or ``rollback``.
    """
    page = own_page()
    if samples:
        page.add(layout.SAMPLES, int(samples))
    given = {"loss": loss, **values} if loss is not None else values
    known = {name: value for name, value in given.items() if value is not None}
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in known.values()):
        known = _arrived(known)
    _write(page, {name: _number(value) for name, value in known.items()})


def checkpointed(path: str | os.PathLike[str] = "") -> None:
    """Tell the agent that the script has written a whole checkpoint.

    Call ``torch.save(...)``, then ``worker.checkpointed(path)``. If several workers write the checkpoint,
    call it in one of them, once all have written.

    If the world is about to grow or shrink, or if a node leaves, the change has waited for this call. It
    happens now, and no step is lost. The worker is then stopped in this call. The call returns only if the
    script handles SIGTERM itself. Without a change, or without an agent, it returns at once.

    The agent's answer takes one or two milliseconds. So if a script calls this many times a second with the
    same path, the agent is told of the first ten calls, and then of one call a second.
    """
    address = os.environ.get(ADDRESS)
    if not address or not is_news(os.fspath(path), time.monotonic()):
        return
    uses(Use.CHECKPOINTED)
    message = Checkpointed(os.fspath(path))
    if own_link.cache_info().currsize:  # a worker that keeps its process leaves worlds only at commits
        own_link(address).send(message)
        return
    try:
        with closing(Channel(connect(address), WORKER_TO_AGENT, AGENT_TO_WORKER)) as agent:
            agent.send(message)
            while True:  # until the agent closes, or asks a worker to end whose script handles SIGTERM
                answer, files = agent.receive()
                close_all(files)
                if isinstance(answer, Leave) and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                    return
    except ChannelClosed:
        return  # the agent has exited, or lets this worker continue


_told: dict[str, tuple[int, float]] = {}  # the last path that the agent was told, how often, and when last


def is_news(path: str, now: float) -> bool:
    """Whether the agent is to be told of a checkpoint with this path. ``now``: seconds of any clock."""
    times, last = _told.get(path, (0, 0.0))
    if times >= _TOLD_AT_ONCE and now < last + _TOLD_AGAIN_S:
        return False
    _told.clear()
    _told[path] = times + 1, now
    return True


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _write(page: AgentPage, known: dict[str, float]) -> None:
    for name, value in known.items():
        if name == "loss":
            page.doubles[layout.LOSS] = value
            page.add(layout.LOSSES, 1)
        else:
            page.value(name, value)
    wrong = [name for name, value in known.items() if not math.isfinite(value)]
    if wrong:
        not_finite(", ".join(f"{name} is {known[name]:g}" for name in wrong))


_pending: list[tuple[dict[str, Any], Any]] = []


def _arrived(known: dict[str, Any]) -> dict[str, Any]:
    """Return the newest earlier values that have arrived from the GPU, and start to copy the present ones."""
    arrived: dict[str, Any] = {}
    while _pending and _pending[0][1].query():
        arrived = _pending.pop(0)[0]
    if len(_pending) < 16:  # if the script is far ahead of its GPU, only some values are reported
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


def policy() -> str:
    """Return the policy for a step that is not finite: "ignore", "stop" or "rollback"."""
    return os.environ.get(_POLICY, "ignore")


def not_finite(what: str) -> None:
    """Count a step that is not finite. Raises NotFinite unless the policy is "ignore"."""
    page = own_page()
    page.add(layout.NONFINITE, 1)
    act = policy()
    if act == "ignore":
        return
    said = f"after step {page.words[layout.COMMITTED] - 1}: {what}" if page.words[layout.COMMITTED] else what
    if act == "rollback" and page.has_checkpoints:
        base = page.words[layout.BASE] - page.words[layout.BASE_STEPS] if page.words[layout.BASE] else 1
        page.words[layout.ASTRAY] = base + page.words[layout.STEPS]
        raise NotFinite(f"{said}; going back to the last checkpoint (--on-nonfinite=rollback)")
    fatal(Fatal.NOT_FINITE)
    if act == "rollback":
        raise NotFinite(
            f"{said}; --on-nonfinite=rollback needs a script that loads worker.Checkpoints, and this one "
            "has loaded none, so the job stops"
        )
    raise NotFinite(f"{said}; the job stops (--on-nonfinite=stop)")


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(largest.isfinite().all()) for largest in _largest(tensors))


def any_nan(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any value is NaN. Infinite values are allowed, since masks contain them."""
    return any(bool(largest.isnan().any()) for largest in _largest(tensors))


def _largest(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield for each device the largest magnitude of each tensor. The maximum norm is used, since a sum of
    squares could overflow."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        # Torch has no norm for narrower types.
        wide = tensor.is_floating_point() and tensor.element_size() > 1
        if (wide or tensor.is_complex()) and tensor.numel() and tensor.layout is torch.strided:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if local.numel():
                found.setdefault(local.device, []).append(local)
    for on_device in found.values():
        yield torch.stack(torch._foreach_norm(on_device, ord=float("inf")))
