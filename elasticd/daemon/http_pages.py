"""The agent's HTTP pages. All are made from the last published status, without a lock, etcd or the disk, so a
request cannot delay the agent."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elasticd.telemetry import statuspage
from elasticd.telemetry.http import Answer, Page
from elasticd.telemetry.lines import clean
from elasticd.telemetry.metrics import Measured
from elasticd.telemetry.status import JobStatus

STUCK_AFTER_S = 60.0  # the agent publishes every second, but a machine may be busy


@dataclass(frozen=True, slots=True)
class Published:
    """The job's status as an agent knows it, and the agent's metrics."""

    status: JobStatus
    measured: Measured


class Pages:
    """``publish`` replaces the status. ``by_path`` returns the pages, which any thread may call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: Published | None = None

    def publish(self, published: Published) -> None:
        self._last = published

    def by_path(self) -> dict[str, Page]:
        return {
            "/": self._page(self._status_page),
            "/metrics": self._page(self._metrics),
            "/status": self._page(self._status),
            "/healthz": self._healthz,
            "/readyz": self._page(self._readyz),
        }

    def _page(self, answer: Callable[[Published, Mapping[str, str]], Answer]) -> Page:
        """Return a page that answers 503 until the first status is published."""

        def page(headers: Mapping[str, str]) -> Answer:
            last = self._last
            return answer(last, headers) if last else Answer(b"the agent is starting\n", status=503)

        return page

    def _healthz(self, _: Mapping[str, str]) -> Answer:
        """Whether the agent's loop goes on. Stopped training does not count: a restart of the agent would not
        help."""
        last = self._last
        silent_s = self._clock() - last.status.at if last else 0.0
        if silent_s > STUCK_AFTER_S:
            return Answer(f"the agent has been stuck for {silent_s:.0f} s\n".encode(), status=503)
        return Answer(b"ok\n")

    def _metrics(self, last: Published, headers: Mapping[str, str]) -> Answer:
        from elasticd.telemetry.exposition import expose

        agent = last.status.agent
        assert agent is not None
        accept = headers.get("accept", "")
        return Answer(*expose(last.measured, last.status.job, agent.node, accept))

    def _readyz(self, last: Published, _: Mapping[str, str]) -> Answer:
        agent = last.status.agent
        assert agent is not None
        if agent.ready:
            return Answer(b"ok\n")
        return Answer(f"{clean(agent.unready)}\n".encode(errors="replace"), status=503)

    def _status(self, last: Published, _: Mapping[str, str]) -> Answer:
        return Answer(json.dumps(last.status.as_json()).encode(), "application/json")

    def _status_page(self, last: Published, _: Mapping[str, str]) -> Answer:
        text = statuspage.render(last.status)
        return Answer(text.encode(errors="replace"), "text/html; charset=utf-8")
