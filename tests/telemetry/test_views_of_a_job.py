"""What the views show of one job: the live view, ``top``, ``status`` and the status page."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.text import Text

from elasticd.core.facts import Laggard, Limits
from elasticd.telemetry import footer, statuspage, statustext
from elasticd.telemetry.nodenames import short_names
from elasticd.telemetry.status import (
    CheckpointStatus,
    FailureStatus,
    JobStatus,
    NodeStatus,
    Note,
    SlotState,
    SlotStatus,
)
from tests.telemetry.madeup import AT, agent, job, node, running


class Read(HTMLParser):
    """The text that a browser would show of a page, and the addresses that it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.feed(re.sub("<style>.*?</style>", "", page, flags=re.DOTALL))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [
            value or ""
            for name, value in attrs
            if name in ("src", "srcset") or (tag, name) == ("link", "href")
        ]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08words"


def plain(lines: list[str]) -> str:
    return "\n".join(Text.from_ansi(line).plain for line in lines)


def screen(s: JobStatus, width: int = 240, height: int = 48) -> str:
    """Return what ``elasticd top`` draws."""
    status = replace(s, agent=None)
    return plain(footer.render(status, width, 2 * height, rows_max=height, fold=True))


VIEWS: dict[str, Callable[[JobStatus], str]] = {
    "live": lambda s: plain(footer.render(s, 240, 48)),
    "top": screen,
    "status": lambda s: "\n".join(statustext.lines(s)),
    "page": lambda s: " ".join(Read(statuspage.render(s)).text),
}
FAILURE = FailureStatus("b", 1, AT - 100, 3, -9, "it broke\nbadly", "Traceback", "/logs/3")
SAVED = CheckpointStatus("s", 1200, AT + 55, 45.0, 1_000)
SLOW = (Laggard("a", 1, 1, 1.31), Laggard("a", 0, 0, 0.0, "its driver reports XID 79"))
STRAINED = (Laggard("a", 1, 1, 0.0, "its memory is nearly full", strained=True),)
STATES = node("a", *(SlotStatus(n, state) for n, state in enumerate(SlotState)))


KILLED = "rank 3 (slot 1 on b) was killed by SIGKILL (perhaps out of memory: see `dmesg`): it broke"
UNKNOWN = replace(FAILURE, rank=None, code=None)
IDLE = node("a", running(0), time={"productive": 1.0, "hung": 1.0})
LEAVES = agent(unready="this node is leaving the job")
OVER: dict[str, Any] = {"phase": "ended", "outcome": "failed", "why": "the budget is spent"}
WAITS = {"waiting": "waiting for 1 more worker"}
HELD_BACK = (node("a", running(0), SlotStatus(1, SlotState.STARTING, 1, until_gone=4711)),)
OUT = (
    node(
        "a",
        running(0),
        SlotStatus(
            1, SlotState.QUARANTINED, quarantined_until=AT + 130, why="its GPU is strained: it is hot"
        ),
        state="draining",
        why="`elasticd drain` asked for it",
    ),
)
SHARDED = (node("a", running(0, shard_bytes=3 * 10**9, copies_bytes=12 * 10**9)),)
AWAITS = "starting, waits for process 4711 to be taken down by the kernel"
UNSTEPPED = {"step": None, "steps_per_s": None}


@pytest.mark.parametrize(
    ("views", "text", "what_is_so"),
    [
        ("live top", "train  world 2  (1..8)  round 7  live  step 1234  9.5 steps/s", {}),
        ("status", "train: round 7 live for 1 min 40 s, world 2 (1..8), step 1234, 9.50 steps/s", {}),
        ("page", "live phase 2 workers (1..8) 7 round 1,234 step 9.50 steps/s", {}),
        ("live top status page", "(2..8 in units of 2)", {"limits": Limits(2, 8, unit=2)}),
        ("live top status page", "(2, 4, 8)", {"limits": Limits(2, 8, sizes=(2, 4, 8))}),
        ("live top status", "step 1234 of this round", {"step_told": False}),
        ("page", "step of this round", {"step_told": False}),
        ("live top", "live  restarts 2", UNSTEPPED),
        ("page", "- step - steps/s", UNSTEPPED),
        ("live top", "restarts 2  (8 left)", {}),
        ("status", "restarts  2, 8 left", {}),
        ("page", "2 restarts (8 left)", {}),
        ("page", "2 restarts ", {"budget_left": None}),
        ("live top", "slot 1 rank 1 running 1234 9.5/s", {}),
        ("status", "slot 1  rank 1  running  step 1234  9.50/s  pid 4712", {}),
        ("page", "● running 1 1,234 9.50 4712", {}),
        *(("live top status page", state, {"nodes": (STATES,)}) for state in SlotState),
        ("live top", "slot 1 rank 1 starting, waits for process 4711", {"nodes": HELD_BACK}),
        ("status", f"slot 1  rank 1  {AWAITS}", {"nodes": HELD_BACK}),
        ("page", f"● {AWAITS} 1", {"nodes": HELD_BACK}),
        ("status", "slot 1  quarantined for another 30 s: its GPU is strained: it is hot", {"nodes": OUT}),
        ("top page", "slot 1 on a is left out for another 30 s: its GPU is strained", {"nodes": OUT}),
        ("status", "a at 10.0.0.97: draining (`elasticd drain` asked for it), 2 slots", {"nodes": OUT}),
        ("top page", "node a is draining: `elasticd drain` asked for it", {"nodes": OUT}),
        ("status", "pid 4711  3 GB of the model, 12 GB of copies", {"nodes": SHARDED}),
        ("live top page", "waiting for 1 more worker", WAITS),
        ("status", "waiting   for 1 more worker", WAITS),
        ("live top", "round 7  failed", OVER),
        ("status", "outcome   failed: the budget is spent", OVER),
        ("page", "failed phase", OVER),
        ("top", KILLED, {"last_failure": FAILURE}),
        ("status", f"failed    3 min 20 s ago: {KILLED}", {"last_failure": FAILURE}),
        ("status", "its log   /logs/3 (on b)", {"last_failure": FAILURE}),
        ("page", f"Last failure, at 00:00:00: {KILLED}", {"last_failure": replace(FAILURE, at=AT)}),
        ("status top page", "slot 1 on b failed", {"last_failure": UNKNOWN}),
        ("top", "step 1200 is the newest checkpoint, 45 s old", {"checkpoint": SAVED}),
        ("status", "saved     step 1200 is the newest checkpoint, 45 s old", {"checkpoint": SAVED}),
        ("top", "90.0 % productive of 16 min 40 s", {}),
        ("status", "goodput   90.0 % productive of 16 min 40 s", {}),
        ("page", "This node: 50.0 % productive of 2 s of worker time; lost: 1 s hung.", {"nodes": (IDLE,)}),
        ("top", "takes 31 % longer for a step than its peers; the GPU of rank 0", {"stragglers": SLOW}),
        ("status", "lags      rank 1 (slot 1 on a) takes 31 % longer", {"stragglers": SLOW}),
        ("top page", "the GPU of rank 1 (slot 1 on a) is strained: its memory", {"stragglers": STRAINED}),
        ("status", "lags      the GPU of rank 1 (slot 1 on a) is strained", {"stragglers": STRAINED}),
        ("top", "etcd is full: nothing is replaced", {"etcd_full": True}),
        ("status", "etcd      is full: nothing is replaced", {"etcd_full": True}),
        ("page", "this node is leaving the job", {"agent": LEAVES}),
        ("live", "round 7 formed", {}),
        ("page", "00:01:01 round 7 formed", {}),
        ("status", "stopping  somebody asked for it with `elasticd stop`", {"stopping": True}),
        ("status", "no node has joined", {"nodes": ()}),
    ],
)
def test_a_view_says(views: str, text: str, what_is_so: dict[str, Any]) -> None:
    status = replace(job(), **what_is_so)
    for view in views.split():
        assert text in VIEWS[view](status)


def test_a_view_says_nothing_of_what_is_not_so() -> None:
    plain_job = job(time=None)
    for word in ("checkpoint", "failed", "lags", "waiting", "This node", "stopping", "full"):
        assert not [view for view, shown in VIEWS.items() if word in shown(plain_job)]


@pytest.mark.parametrize("view", ["live", "page"])
def test_nothing_in_a_status_reaches_a_terminal_or_a_page_but_as_text(view: str) -> None:
    failure = replace(FAILURE, message=EVIL, node=EVIL)
    evil = job(
        node(EVIL + "a", running(0), time={"productive": 1.0}),
        job=EVIL, phase=EVIL, waiting=EVIL, script=EVIL, last_failure=failure,
        agent=agent(unready=EVIL, events=(Note(AT, EVIL),)),
    )  # fmt: skip
    page = statuspage.render(evil) if view == "page" else "".join(footer.render(evil, 120, 60))
    assert not re.search(r"\x1b[^\[]|\x1b\[[^m]*[A-Za-ln-z]|[\x00-\x08\x0b-\x1a\x7f-\x9f]", page)
    assert "words" in page


def test_the_page_fetches_nothing_else() -> None:
    page = statuspage.render(job())
    read = Read(page)
    assert not read.fetched and "script" not in read.tags and "http" not in page.replace("http-equiv", "")


def test_the_page_says_first_what_is_waited_for() -> None:
    page = statuspage.render(job(**WAITS, agent=LEAVES))
    assert page.index("leaving") < page.index("waiting for 1 more worker") < page.index("Slots")


def test_markup_in_a_status_is_shown_as_it_is_written() -> None:
    page = statuspage.render(job(waiting="<script>alert(1)</script>", agent=agent(unready="<b>")))
    assert "<script" not in page and "<b>&" not in page and "&lt;script&gt;" in page


def many(nodes: int = 40) -> tuple[NodeStatus, ...]:
    return tuple(node(f"node-{n:02}", *(running(s, n * 8 + s) for s in range(8))) for n in range(nodes))


@pytest.mark.parametrize(("width", "height"), [(200, 50), (80, 24), (40, 10)])
def test_top_shows_all_nodes_as_far_as_the_terminal_has_room(width: int, height: int) -> None:
    shown = screen(job(*many(), world_size=320), width, height).split("\n")
    assert len(shown) <= height and all(len(line) < width for line in shown)
    text = "\n".join(shown)
    assert "train" in text and "world 320" in text
    assert "node-00/0" in text and "more slots" in text and "productive" in text


@pytest.mark.parametrize(("width", "height", "whole"), [(60, 20, True), (60, 7, False), (200, 7, True)])
def test_top_tells_what_happened_to_its_end_where_there_is_room(width: int, height: int, whole: bool) -> None:
    lost = {"productive": 900.0, "restarting": 60.0, "hung": 40.0}
    shown = screen(job(*many(1), time=lost), width, height)
    assert len(shown.split("\n")) <= height
    told = " ".join(shown.split())
    assert "90.0 % productive of 16 min 40 s of worker time" in told
    assert ("1 min starting and losing workers, 40 s hung" in told) == whole


def test_top_tells_a_long_event_to_its_end_beside_many_slots() -> None:
    hang = "rank 2 on node b is in train_gpt.py:188, data loading; the other 63 wait for it in all_reduce"
    crowded = job(node("a", *map(running, range(500))), agent=agent(events=(Note(0.0, hang),)))
    text = plain(footer.render(crowded, 80, 48, rows_max=23, fold=True))
    assert hang in " ".join(text.split()) and len(text.splitlines()) <= 24


def test_of_many_slots_those_in_trouble_are_shown() -> None:
    slots = [running(n) for n in range(500)]
    slots[321] = SlotStatus(321, SlotState.FAILED, 321)
    text = plain(footer.render(job(node("a", *slots)), 80, 24))
    assert "slot 321 rank 321 failed" in text and "more slots" in text


def test_a_narrow_terminal_shows_the_world_first() -> None:
    text = plain(footer.render(job(), 30, 10))
    assert "world 2" in text and "restarts" not in text


def test_nodes_are_told_apart_however_alike_their_names_are() -> None:
    nodes = {f"gpu-worker-{n:03d}.training.cluster.example" for n in range(12)}
    assert set(short_names(nodes).values()) == {f"gpu-worker-{n:03d}" for n in range(12)}
    alike = {f"a-pool-of-{n}-machines-of-the-third-kind.example" for n in range(12)}
    names = short_names(alike)
    assert len(set(names.values())) == 12 and max(map(len, names.values())) < 30
    for known in ({"10.0.0.1", "11.0.0.1"}, {"a.here", "a.there"}, {"a"}):
        assert short_names(known) == {name: name for name in known}, "the first part alone says nothing"
    text = screen(job(*(node(name, running(3, 5)) for name in sorted(alike))), 200, 60)
    assert len(set(re.findall(r"(\S+)/3 rank 5", text))) == 12
