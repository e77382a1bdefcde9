"""The memory of those who trained here before, which the node's saver has kept."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from elasticd.checkpoint import handover
from elasticd.checkpoint.handover import Gone, Paper
from elasticd.checkpoint.manifest import Index, decode_index
from elasticd.checkpoint.reading import Wish


@dataclass(frozen=True, slots=True)
class Recalled:
    """All shards of one state. They were handed over whole, so they are of one step."""

    name: str
    round: int
    step: int
    index: Index
    shards: dict[int, int]  # open files, by rank

    def fill(self, wishes: Iterable[Wish]) -> None:
        """Read, not mapped: mapping so many pages to read them once costs as much as the copy."""
        for wish in wishes:
            into, at = wish.into, wish.at
            while into:
                read = os.preadv(self.shards[wish.file], [into], at)
                into, at = into[read:], at + read

    def close(self) -> None:
        for fd in self.shards.values():
            os.close(fd)


def recall(saver: str, url: str) -> Recalled | None:
    """What the saver of that name holds of the checkpoints at ``url``; None unless it is a whole
    state, as it is where the world was on this node alone."""
    if not saver:
        return None
    found: Recalled | None = None
    try:
        line = handover.connect(saver)
    except Gone:
        return None
    try:
        line.send({"is": "recall", "path": url})
        while heard := line.receive():
            message, files = heard
            if message["is"] != "held":
                break
            memory, paper = files
            if found is None:
                index = decode_index(Paper.of(paper).index)
                found = Recalled(message["name"], message["round"], message["step"], index, {})
            os.close(paper)
            found.shards[message["rank"]] = memory
    except Gone:
        pass  # what is missing is seen below
    finally:
        line.close()
    if found is not None and len(found.shards) != len(found.index.files):
        found.close()
        return None
    return found
