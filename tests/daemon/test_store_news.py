"""What a watch tells about one key, and reads that end their watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from elasticd.core.ports import Changes, Entry, Listing, Seen, Store
from elasticd.daemon.store_news import news_of, read_once
from tests.core.build import node

KNOWN = Entry("nodes/a", node("a"), 7, 5)


def test_a_listing_without_the_key_says_that_the_key_does_not_exist() -> None:
    assert [*news_of("nodes/a", Listing((KNOWN,), 9))] == [KNOWN]
    assert [*news_of("nodes/b", Listing((KNOWN,), 9))] == [Entry("nodes/b", None, 9, 0)]
    assert [*news_of("nodes/b", Changes((KNOWN,)))] == []


class OneWatch:
    """Stands in for the store. ``at_once``: the listing comes before ``watch`` returns."""

    def __init__(self, at_once: bool) -> None:
        self.at_once, self.watched = at_once, True

    def watch(self, scope: str, seen: Callable[[Seen], None], *, prefix: bool = False) -> Callable[[], None]:
        self.tell = seen
        if self.at_once:
            seen(Listing((KNOWN,), 9))
        return self._end

    def _end(self) -> None:
        self.watched = False


@pytest.mark.parametrize("at_once", [False, True])
def test_a_read_passes_on_one_listing_and_leaves_no_watch(at_once: bool) -> None:
    store, found = OneWatch(at_once), list[Listing]()
    read_once(cast(Store, store), "nodes/", found.append, prefix=True)
    for _ in range(2):
        store.tell(Listing((KNOWN,), 9))
        store.tell(Changes((KNOWN,)))
    assert found == [Listing((KNOWN,), 9)] and not store.watched
