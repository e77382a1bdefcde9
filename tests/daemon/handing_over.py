"""A worker that hands a checkpoint over to a saver, without torch and without a state."""

from __future__ import annotations

import os

import msgspec

from elasticd.checkpoint import protocol
from elasticd.checkpoint.format.layout import Holding, StateForm, encode_shares
from elasticd.checkpoint.protocol import (
    OpenWorld,
    PlanShard,
    SaverChannel,
    SaveShard,
    ShareBuffer,
    memory_file,
)
from elasticd.checkpoint.shared_memory import Memory
from elasticd.core.checkpoint_names import folder_name

# Of a world of one rank, which has nothing to save.
NO_SHARES = encode_shares([msgspec.json.encode(StateForm(()))], [msgspec.json.encode(Holding((), {}))], [b""])


def hands_over(saver: str, store: str, round: int, step: int, *, last: int = 3) -> SaverChannel:
    """Save a step as the only worker of its world. ``last``: how many checkpoints are kept."""
    line = protocol.connect(saver)
    line.send(OpenWorld(store, f"{step:08x}", 0, 1, round, round, (0,), holder="", last=last, every=0))
    layout = memory_file(NO_SHARES)
    line.send(PlanShard(1, 64), (layout,))
    memory = Memory.make(64)
    line.send(ShareBuffer(1, 0), (memory.fd,))
    os.close(layout)
    hands_over_more(line, round, step)
    return line


def hands_over_more(line: SaverChannel, round: int, step: int) -> None:
    name = folder_name(step, round, f"{step:08x}", 1)
    line.send(SaveShard(1, 0, step, name, at=1.0))
