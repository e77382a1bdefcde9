"""The status page as a browser shows it, served as an agent serves it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.core.facts import Limits
from elasticd.daemon.http_pages import Pages, Published
from elasticd.telemetry.http import HttpServer, Site
from elasticd.telemetry.metrics import Metrics
from elasticd.telemetry.status import FailureStatus, JobStatus, Note, SlotState, SlotStatus
from tests.browser import Browser, needs_chromium
from tests.telemetry.madeup import agent, job, node

pytestmark = needs_chromium

LONG = "gpu-worker-0123.training.cluster.example"


def crowded(name: str) -> JobStatus:
    """A status with everything that the page can show at once, and with the longest names."""
    now = time.time()
    slots = [SlotStatus(n, state, n, 4_194_000 + n, 1_234_567, 9.53) for n, state in enumerate(SlotState)]
    idle = [SlotStatus(n, SlotState.IDLE) for n in range(3)]
    spent = {"productive": 7000.0, "restarting": 150.0, "rendezvous": 65.0}
    told = (
        "this node joined the job",
        "round 7 formed: 6 workers on 2 nodes, as a worker failed",
        f"rank 3 (slot 3 on {name}) was killed by SIGKILL, which is charged to the restart budget",
        f"rank 2 on node {name} is in train_gpt.py:188, data loading; the other 7 wait for it in all_reduce",
        "see " + "/home/somebody/.local/state/elasticd/a-job-of-a-long-name" * 3,
    )
    events = tuple(Note(now + 60 * n - 300, text) for n, text in enumerate(told))
    waiting = "waiting for 2 more workers: 6 are there, 8 are needed at least"
    unready = "this node is not registered in etcd"
    return job(
        node(name, *slots, time=spent),
        node("b", *idle),
        job="pretrain-2026-11",
        at=now,
        phase="waiting",
        world_size=1000,
        limits=Limits(8, 1024),
        step=1_234_567,
        waiting=waiting,
        last_failure=FailureStatus(name, 2, now - 4000, 2, -9, "hung: " + told[3], hung=True),
        agent=agent(node=name, ready=False, unready=unready, events=events),
    )


@pytest.fixture
def server() -> Iterator[HttpServer]:
    pages = Pages(time.time)
    pages.publish(Published(crowded(LONG), Metrics().copy()))
    with HttpServer("127.0.0.1", 0, Site(pages.by_path())) as server:
        yield server


def test_the_page_fits_any_window_and_fetches_nothing_and_logs_no_error(
    server: HttpServer, tmp_path: Path
) -> None:
    with Browser(tmp_path / "profile") as browser:
        for width, dark in ((400, False), (1280, False), (400, True), (1280, True)):
            picture = tmp_path / f"status-{width}{'-dark' if dark else ''}.png"
            seen = browser.look(server.url, width, dark=dark, picture=picture)
            assert seen.title == "pretrain-2026-11: waiting"
            assert (seen.inner_px, seen.content_px) == (width, width), "nothing is beside the window"
            assert not seen.scrolling
            assert seen.asked == [server.url] and not seen.complaints
            for said in (
                "quarantined",
                "1,234,567",
                "not registered",
                "waiting for 2 more",
                "Last failure, at",
            ):
                assert said in seen.text
            assert picture.read_bytes().startswith(b"\x89PNG") and len(picture.read_bytes()) > 20_000


def test_a_page_that_fetches_or_complains_or_is_too_wide_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<title>x</title><img src=http://127.0.0.1:1/none.png><div style='width:700px'>wide</div>"
        "<script>console.error('oh')</script>"
    )
    with Browser(tmp_path / "profile") as browser:
        seen = browser.look(page.as_uri(), 400)
    assert seen.content_px > 400 and any("none.png" in url for url in seen.asked)
    assert any("oh" in said for said in seen.complaints)
