import re
from html.parser import HTMLParser

from elasticd.telemetry.statuspage import render
from tests.telemetry.madeup import agent, job


class Read(HTMLParser):
    """What a browser would show, and what it would fetch."""

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


def test_the_page_fetches_nothing_else() -> None:
    page = render(job())
    read = Read(page)
    assert not read.fetched and "script" not in read.tags and "http" not in page.replace("http-equiv", "")


def test_what_is_waited_for_is_said_first() -> None:
    page = render(
        job(waiting="waiting for 1 more worker", agent=agent(unready="this node is leaving the job"))
    )
    assert page.index("leaving") < page.index("waiting for 1 more worker") < page.index("Slots")
