"""The memory of those who trained here before, which the node's saver has kept."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from elasticd.checkpoint import handover
from elasticd.checkpoint.handover import Gone, Paper
from elasticd.checkpoint.manifest import BadCheckpoint, Index, decode_index
from elasticd.checkpoint.reading import Wish
from elasticd.core.facts import Checkpoint


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


def known(saver: str, url: str) -> tuple[Checkpoint, bool] | None:
    """What the saver of that name says is committed at ``url``, and whether by this job; None where there
    is no saver. Raises BadCheckpoint where it cannot tell."""
    if not saver:
        return None
    try:
        line = handover.connect(saver)
    except Gone:
        return None
    try:
        line.send({"is": "known", "path": url})
        heard = line.receive()
    except Gone:
        return None
    finally:
        line.close()
    if heard is None:
        return None
    message, files = heard
    if not files:
        raise BadCheckpoint(str(message.get("why", "the saver cannot tell what is committed")))
    [file] = files
    try:
        return msgspec.json.decode(Paper.of(file).index, type=Checkpoint), bool(message["own"])
    finally:
        os.close(file)


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
