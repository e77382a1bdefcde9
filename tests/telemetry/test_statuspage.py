from html.parser import HTMLParser

from elasticd.core.facts import Limits
from elasticd.telemetry.snapshot import Event, SlotLine, SlotState, Snapshot
from elasticd.telemetry.statuspage import render

AT = 1_767_225_600.0  # midnight


class Read(HTMLParser):
    """What a browser would show, and what it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [
            value or ""
            for name, value in attrs
            if name in ("src", "srcset") or (tag, name) == ("link", "href")
        ]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def snapshot(**more: object) -> Snapshot:
    slots = (
        SlotLine("a", 0, SlotState.RUNNING, 0, 4711, 1234, 9.5),
        SlotLine("a", 1, SlotState.QUARANTINED),
    )
    fields = {"slots": slots, "events": (Event(AT + 61, "round 7 formed"),), "restarts": 2, "budget_left": 8}
    return Snapshot("job", "a", 7, "live", 1, Limits(1, 2), **(fields | more))  # type: ignore[arg-type]


def test_the_page_says_how_the_job_is_and_needs_nothing_else() -> None:
    page = render(snapshot(), "", AT, "1.2.3")
    read = Read(page)
    text = " ".join(read.text)
    for said in (
        "job",
        "live",
        "1 to 2",
        "1,234",
        "9.50",
        "running",
        "quarantined",
        "4711",
        "00:01:01",
        "round 7 formed",
        "1.2.3",
    ):
        assert said in text, said
    assert not read.fetched and "script" not in read.tags and "http" not in page.replace("http-equiv", "")


def test_the_page_says_what_became_of_the_time() -> None:
    assert "This node: 9 % &amp; rising." in render(snapshot(), "", AT, "1", "9 % & rising")
    assert "This node" not in render(snapshot(), "", AT, "1")


def test_what_is_waited_for_is_said_first() -> None:
    page = render(snapshot(waiting="waiting for 1 more worker"), "this node is leaving the job", AT, "1")
    assert page.index("leaving") < page.index("waiting for 1 more worker") < page.index("Slots")


def test_the_last_failure_stays_to_be_read() -> None:
    text = "rank 1 (slot 1 on b) was killed by elasticd: hung: rank 1 on node b is in job.py:88"
    page = render(snapshot(last_failure=Event(AT + 7, text)), "", AT, "1")
    assert f"<p class=note>Last failure, at 00:00:07: {text}</p>" in page
    assert "Last failure" not in render(snapshot(), "", AT, "1")


def test_who_does_not_know_what_is_left_of_the_budget_does_not_say() -> None:
    assert "restarts (8 left)" in render(snapshot(), "", AT, "1")
    page = render(snapshot(budget_left=None), "", AT, "1")
    assert "<b>2</b><span>restarts</span>" in page


def test_names_cannot_bring_markup_of_their_own() -> None:
    page = render(snapshot(waiting="<script>alert(1)</script>"), "<b>", AT, "1")
    assert "\x1b" not in render(snapshot(waiting="\x1b]0;x\x07wait"), "\x1b[2J", AT, "1", "\x1b[31m")
    assert "<script" not in page and "<b>&" not in page and "&lt;script&gt;" in page
