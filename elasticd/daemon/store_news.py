"""News of single keys, from the watches of the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elasticd.core.ports import Entry, Listing, Seen, Store


def news_of(key: str, seen: Seen) -> Sequence[Entry]:
    """Return the news of the key. A listing without the key says that the key does not exist."""
    entries = [entry for entry in seen.entries if entry.key == key]
    if isinstance(seen, Listing) and not entries:
        return [Entry(key, None, seen.revision, 0)]
    return entries


def read_once(store: Store, scope: str, found: Callable[[Listing], None], *, prefix: bool = False) -> None:
    """Pass on the present entry of a key, or the entries below a prefix. ``found`` runs on the store's
    thread, once."""
    ends: list[Callable[[], None]] = []
    is_read = False

    def seen(news: Seen) -> None:
        nonlocal is_read
        if isinstance(news, Listing) and not is_read:
            is_read = True
            found(news)
            for end in ends:
                end()

    ends.append(store.watch(scope, seen, prefix=prefix))
    if is_read:  # the listing came before there was a watch to end
        ends[0]()
