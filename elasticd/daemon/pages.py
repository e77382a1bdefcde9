"""What the agent shows over HTTP, all from the last value that was published: no lock, no etcd, no
disk, so that whoever looks cannot hold up the agent."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elasticd import __version__
from elasticd.telemetry import describe, statuspage
from elasticd.telemetry.http import Answer, Page
from elasticd.telemetry.lines import clean
from elasticd.telemetry.metrics import Measured
from elasticd.telemetry.snapshot import Snapshot

SCHEMA = 1
STUCK_AFTER_S = 60.0  # the agent publishes every second; a machine may be very busy


@dataclass(frozen=True, slots=True)
class Published:
    """``spent``: what the time of this node's slots went to, in seconds by kind. ``unready``: why this node
    neither trains nor could, or empty. ``at``: seconds since the epoch."""

    snapshot: Snapshot
    measured: Measured
    spent: Mapping[str, float]
    unready: str
    at: float


class Pages:
    """``publish`` replaces what is shown; ``by_path`` are the pages, for any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: Published | None = None

    def publish(self, published: Published) -> None:
        self._last = published

    def by_path(self) -> dict[str, Page]:
        return {
            "/": self._status_page,
            "/metrics": self._metrics,
            "/status": self._status,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
        }

    def _metrics(self, headers: Mapping[str, str]) -> Answer:
        last = self._last
        if last is None:
            return _starting()
        from elasticd.telemetry.exposition import expose

        s = last.snapshot
        return Answer(*expose(last.measured, s.job, s.node, self._clock(), headers.get("accept", "")))

    def _healthz(self, _: Mapping[str, str]) -> Answer:
        """Whether the agent itself goes on. Training that does not is no fault that starting the agent
        anew would mend."""
        last = self._last
        silent_s = self._clock() - last.at if last else 0.0
        if silent_s > STUCK_AFTER_S:
            return Answer(f"the agent has been stuck for {silent_s:.0f} s\n".encode(), status=503)
        return Answer(b"ok\n")

    def _readyz(self, _: Mapping[str, str]) -> Answer:
        last = self._last
        if last is None:
            return _starting()
        return (
            Answer(f"{clean(last.unready)}\n".encode(errors="replace"), status=503)
            if last.unready
            else Answer(b"ok\n")
        )

    def _status(self, _: Mapping[str, str]) -> Answer:
        last = self._last
        if last is None:
            return _starting()
        body = json.dumps(as_json(last)).encode()
        return Answer(body, "application/json")

    def _status_page(self, _: Mapping[str, str]) -> Answer:
        last = self._last
        if last is None:
            return _starting()
        told = describe.spent(last.spent)
        text = statuspage.render(last.snapshot, last.unready, last.at, __version__, told)
        return Answer(text.encode(errors="replace"), "text/html; charset=utf-8")


def as_json(published: Published) -> dict[str, Any]:
    """The snapshot's fields, beside ``schema``, ``version``, ``at``, ``unready``, ``time``: what this node's
    slots spent it on, in seconds by kind, and ``checkpoint_memory``: bytes by kind. Fields may be added,
    never renamed or removed, while ``schema`` stays the same."""
    s = published.snapshot
    return {
        "schema": SCHEMA,
        "version": __version__,
        "at": published.at,
        "ready": not published.unready,
        "unready": published.unready,
        **asdict(s),
        "step": s.step,
        "steps_per_s": s.steps_per_s,
        "time": dict(published.spent),
        "checkpoint_memory": checkpoint_memory(published.measured),
    }


def checkpoint_memory(measured: Measured) -> dict[str, int]:
    """On this node, in bytes by kind."""
    held = measured.values.get("elasticd_checkpoint_memory_bytes", {})
    return {kind: int(size) for (kind,), size in held.items() if isinstance(size, int | float)}


def _starting() -> Answer:
    return Answer(b"the agent is starting\n", status=503)
