"""Follows a job's round, and reads the members of a large round from their parts. The simulator uses the same
code.

``core.round_parts`` says what the parts are. A round reaches the agent once the members that the agent
needs are read. The leader deletes the parts of a round when it writes the next. So an agent that finds no
part waits for the next round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from elasticd.core import round_parts
from elasticd.core.facts import Member, MemberPart, Round
from elasticd.core.ports import Changes, Entry, Listing, Seen, Store


class RoundWatch:
    """Watches the round until ``end``. ``seen`` gets news of the key ``round``, as of any watch. ``node``: of
    the members in parts, only those in the part of this node are read; None: all."""

    def __init__(self, store: Store, seen: Callable[[Seen], None], node: str | None = None) -> None:
        self._store = store
        self._seen = seen
        self._node = node
        self._held: Entry | None = None  # the round, while its members are not read yet
        self._reading = ""  # the key of the part, or the prefix of the keys of all parts
        self._parts: dict[str, MemberPart] = {}  # the parts that were read, by key
        self._members: tuple[Member, ...] = ()  # of these parts, once all were read
        self._end_reading: Callable[[], None] | None = None
        self._ended = False
        self._end_round = store.watch("round", self._round_seen)

    def end(self) -> None:
        self._ended = True
        self._end_round()
        self._stop_reading()

    # All that follows runs where the store calls back, one call at a time.

    def _round_seen(self, news: Seen) -> None:
        entries = [entry for entry in news.entries if entry.key == "round"]
        if isinstance(news, Listing) and not entries:
            self._forget()
            self._seen(news)
        for entry in entries:
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        round = entry.fact
        if not isinstance(round, Round) or not round_parts.has_parts(round):
            self._forget()
            self._seen(Changes((entry,)))
            return
        assert round.extent is not None
        own = round_parts.part_of(self._node, round.extent.parts) if self._node is not None else None
        key = round_parts.part_key(round, own)
        self._held = entry
        if key != self._reading:
            self._read(key)
        self._join(round)

    def _read(self, key: str) -> None:
        self._stop_reading()
        self._reading, self._parts, self._members = key, {}, ()
        end = self._store.watch(key, partial(self._part_seen, key), prefix=self._node is None)
        self._end_reading = end
        if self._ended:
            end()

    def _part_seen(self, key: str, news: Seen) -> None:
        if key != self._reading or self._held is None:
            return
        parts = ((e.key, e.fact) for e in news.entries)
        self._parts.update((name, part) for name, part in parts if isinstance(part, MemberPart))
        if isinstance(self._held.fact, Round):
            self._join(self._held.fact)

    def _join(self, round: Round) -> None:
        """Pass the held round on, if the parts are there. Its next phase has the same members."""
        assert round.extent is not None
        if not self._members:
            if len(self._parts) < (1 if self._node is not None else round.extent.parts):
                return
            self._stop_reading()
            joined = round_parts.join(round, self._parts.values())
            if self._node is None and not round_parts.fits(joined):
                return
            self._members = joined.members
        if self._held is not None:
            held, self._held = self._held, None
            self._seen(Changes((replace(held, fact=replace(round, members=self._members)),)))

    def _forget(self) -> None:
        self._stop_reading()
        self._held, self._reading, self._parts, self._members = None, "", {}, ()

    def _stop_reading(self) -> None:
        """End the watch of the parts. What it has read is kept."""
        end, self._end_reading = self._end_reading, None
        if end is not None:
            end()
