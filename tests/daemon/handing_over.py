"""A worker that hands a checkpoint over to a saver, without torch and without a state."""

from __future__ import annotations

import os

from elasticd.checkpoint import protocol
from elasticd.checkpoint.format.manifest import Index, encode_index, shard_name
from elasticd.checkpoint.protocol import Layout, OpenWorld, PlanShard, SaverChannel, SaveShard, ShareBuffer
from elasticd.checkpoint.shared_memory import Memory
from elasticd.core.checkpoint_names import folder_name


def hands_over(saver: str, store: str, round: int, step: int, *, last: int = 3) -> SaverChannel:
    """Save a step as the only worker of its world. ``last``: how many checkpoints are kept."""
    line = protocol.connect(saver)
    line.send(OpenWorld(store, f"{step:08x}", 0, 1, round, round, (0,), holder="", last=last, every=0))
    layout = Layout(encode_index(Index([shard_name(0)], {}, {}, {}))).file()
    line.send(PlanShard(1, 64), (layout,))
    memory = Memory.make(64)
    line.send(ShareBuffer(1, 0), (memory.fd,))
    os.close(layout)
    hands_over_more(line, round, step)
    return line


def hands_over_more(line: SaverChannel, round: int, step: int) -> None:
    name = folder_name(step, round, f"{step:08x}", 1)
    line.send(SaveShard(1, 0, step, name, at=1.0))
