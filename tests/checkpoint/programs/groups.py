"""Eight processes on nodes of several sizes agree in flat groups and in groups of several levels.

Usage: groups.py FOLDER.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from elasticd.checkpoint.client import levels
from elasticd.checkpoint.client.collectives import FlatGroup, OneRank, RankGroup, TwoLevelGroup, rank_group
from elasticd.worker.world.destroying import sockets

FOLDER = Path(sys.argv[1])
SIZE = 8
UNEVEN = "AABCBBAB"  # the node of each rank
levels.FLAT_MAX = 4
peers: list[int] = []
for RANK in (*range(1, SIZE), 0):  # forked, so that torch is imported only once
    if RANK == 0:
        break
    if not (pid := os.fork()):
        peers.clear()
        break
    peers.append(pid)


def connections() -> set[tuple[str, str]]:
    """Return both ends of each TCP connection of this process."""
    found = set()
    for descriptor, _ in sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                found.add((str(one.getsockname()[:2]), str(one.getpeername()[:2])))
    return found


def connected(before: set[tuple[str, str]]) -> list[set[int]]:
    """Return the ranks that each rank has connected to since it had the connections ``before``."""
    made: list[set[tuple[str, str]]] = [set()] * SIZE
    dist.all_gather_object(made, connections() - before)
    # By both ends: the kernel may give two ranks the same port for connections to different ends.
    rank_of = {pair: rank for rank, mine in enumerate(made) for pair in mine}
    return [{rank_of[other, own] for own, other in mine} for mine in made]


def same_answers(ranks: RankGroup) -> None:
    """Check all answers of the ranks against what the ranks have given."""
    assert (ranks.rank, ranks.size, ranks.over) == (RANK, SIZE, False)
    assert ranks.minimum([RANK, -RANK, 7]) == [0, 1 - SIZE, 7]
    for low in range(SIZE):
        assert ranks.minimum([int(low != RANK)]) == [0]
    answer = ranks.begin_minimum([5 - RANK])
    assert answer() == [6 - SIZE]
    own = [f"rank {rank}".encode() * (1 + 1000 * (rank % 3)) for rank in range(SIZE)]
    by_node = [node.encode() for node in UNEVEN]
    for each in (
        [b"same"] * SIZE,
        [b""] * SIZE,
        own,
        by_node,
        [b"", *own[1:]],
        [b"odd", *[b"even"] * (SIZE - 1)],
    ):
        collected = ranks.collect(each[RANK])
        assert collected == (each if RANK == 0 else [])
        assert len(set(map(id, collected))) == len(set(collected))
        assert ranks.to_first(each[RANK]) == (each if RANK == 0 else [])
        assert ranks.gather(each[RANK]) == each
        assert ranks.from_first(each[RANK]) == each[0]
        assert ranks.hand_out(each if RANK == 0 else ()) == each[RANK]


def uneven_nodes() -> None:
    os.environ["GROUP_RANK"] = UNEVEN[RANK]
    before = connections()
    with levels.unchecked():
        flat = FlatGroup(dist.new_group(backend="gloo"))
    same_answers(flat)
    everyone = set(range(SIZE))
    assert connected(before) == [everyone - {rank} for rank in range(SIZE)]
    dist.new_group([0, 3], backend="gloo")  # a script's group: not all ranks are in equally many groups
    for _ in range(2):  # a script may have several Checkpoints in one world
        before = connections()
        ranks = rank_group()
        assert isinstance(ranks, TwoLevelGroup)
        same_answers(ranks)
        a, b, c = {0, 1, 6}, {2, 4, 5, 7}, {3}
        firsts = {0, 2, 3}
        expected = [(a, b, c)["ABC".index(node)] for node in UNEVEN]
        for rank in firsts:
            expected[rank] = expected[rank] | firsts
        assert connected(before) == [its - {rank} for rank, its in enumerate(expected)]


def many_nodes() -> None:
    """Check that the nodes' first ranks are grouped again."""
    os.environ["GROUP_RANK"] = "AABCDEFG"[RANK]
    before = connections()
    ranks = rank_group()
    assert isinstance(ranks, TwoLevelGroup)
    same_answers(ranks)
    a, b, c, d, heads = {0, 1}, {0, 2, 3}, {4, 5, 6}, {7}, {0, 4, 7}
    expected = [a | b | heads, a, b, b, c | heads, c, c, d | heads]
    assert connected(before) == [its - {rank} for rank, its in enumerate(expected)]


def levels_that_do_not_pay() -> None:
    os.environ["GROUP_RANK"] = "A"
    ranks = rank_group()
    assert isinstance(ranks, FlatGroup)
    same_answers(ranks)
    os.environ["GROUP_RANK"] = UNEVEN[RANK]
    levels.FLAT_MAX = SIZE
    assert isinstance(rank_group(), FlatGroup)
    levels.FLAT_MAX = 4


def worlds(number: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store{number}", rank=RANK, world_size=SIZE)
    before = rank_group() if number else None
    for check in (uneven_nodes, many_nodes) if number == 0 else (levels_that_do_not_pay, many_nodes):
        check()
    dist.barrier()
    dist.destroy_process_group()
    assert before is None or before.over


assert isinstance(rank_group(), OneRank)
worlds(0)
worlds(1)
if RANK == 0:
    print("done", flush=True)
for peer in peers:
    _, status = os.waitpid(peer, 0)
    assert status == 0, f"a peer ended with {os.waitstatus_to_exitcode(status)}"
os._exit(0)
