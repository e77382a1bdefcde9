"""In a large group, two workers are connected when they first talk to each other."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elasticd.worker.world import connecting, destroying, group, waits
from elasticd.worker.world.destroying import sockets
from elasticd.worker.world.group import World, WorldChanged
from tests.worker.crew import Crew
from tests.worker.jobs import NOTHING, Accident, Gate, work_in_a_large_world
from tests.worker.test_survival import assert_exact
from tests.worker.test_world import a_world


@pytest.mark.parametrize(
    ("size", "asked", "late"),
    [
        (1024, None, False),
        (1025, None, True),
        (2, "1", True),
        (2, "Yes", True),
        (10_000, "0", False),
        (10_000, "false", False),
    ],
)
def test_only_workers_of_a_large_group_are_connected_late_unless_the_user_asked_otherwise(
    size: int, asked: str | None, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if asked is not None:
        monkeypatch.setenv(connecting.LATE, asked)
    assert connecting.is_late(size) is late
    with connecting.as_suits(size):
        assert os.environ.get(connecting.LATE) == (asked or ("1" if late else None))
    assert os.environ.get(connecting.LATE) == asked


class GroupsOfTwo:
    """Both members of a group, in this process. ``sums``: the sum that each has after ``add_up``."""

    def __init__(self, first: Callable[[Callable[[], None]], None]) -> None:
        """``first``: makes the first member's group, with the function that it is given."""
        store = dist.HashStore()
        self.groups: dict[int, dist.ProcessGroupGloo] = {}

        def join(rank: int) -> None:
            self.groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

        other = threading.Thread(target=join, args=(1,))
        other.start()
        first(lambda: join(0))
        other.join()

    def add_up(self) -> list[float]:
        sums = [torch.ones(1), torch.ones(1)]
        for work in [one.allreduce([mine]) for one, mine in zip(self.groups.values(), sums, strict=True)]:
            waits._wait_for_work(work, timedelta(0))  # torch's own, which another world's end does not end
        return [float(mine) for mine in sums]


@pytest.mark.parametrize("late", [False, True])
def test_members_of_a_group_that_is_connected_late_have_no_connection_before_they_talk(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "MOST_AT_ONCE", 1 if late else 2)
    before = set(sockets())
    with connecting.as_suits(2):
        both = GroupsOfTwo(lambda join: join())
    listening_and_connected = 2 if late else 4
    assert len(set(sockets()) - before) == listening_and_connected
    assert both.add_up() == [2.0, 2.0]
    assert len(set(sockets()) - before) == 4


def a_world_with_a_late_group(monkeypatch: pytest.MonkeyPatch) -> tuple[World, GroupsOfTwo]:
    """Return a world, and a group of the world whose members have talked."""
    monkeypatch.setenv(connecting.LATE, "1")
    world = a_world()

    def make(join: Callable[[], None]) -> None:
        with world._connecting():
            join()
        world._listeners.update(connecting.listening(world._connections))

    both = GroupsOfTwo(make)
    assert both.add_up() == [2.0, 2.0]
    return world, both


def test_a_world_that_ends_cuts_connections_that_were_made_after_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, both = a_world_with_a_late_group(monkeypatch)
    world.close()
    with pytest.raises(RuntimeError, match="gloo"):
        both.add_up()


def test_a_forked_process_keeps_no_connection_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else gloo ends the parent with SIGABRT when it destroys a late group."""
    group._spare_children()
    world, both = a_world_with_a_late_group(monkeypatch)
    monkeypatch.setattr(group, "_present", [world])
    of_the_world = world.connections()
    said, says = os.pipe()
    if not (child := os.fork()):
        os.write(says, str(len(of_the_world & set(sockets()))).encode())
        os._exit(0)
    assert os.read(said, 9) == b"0"
    os.waitpid(child, 0)
    os.close(said)
    os.close(says)
    assert of_the_world & set(sockets()) and both.add_up() == [2.0, 2.0]


def test_a_forked_process_keeps_no_connection_of_a_group_that_could_not_be_destroyed_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = socket.socketpair()
    with one, other:
        its = {each for each in sockets() if each[0] == one.fileno()}
        monkeypatch.setattr(destroying, "_dropping", [(threading.Thread(), 0.0, its)])
        destroying.let_go(destroying.left_behind())
        assert not its & set(sockets())
        with pytest.raises(BrokenPipeError):
            other.send(b"x")


TALKS: dict[str, Callable[[], object]] = {
    "send": lambda: dist.send(torch.zeros(1), 1),
    "receive": lambda: dist.recv(torch.zeros(1), 1),
    "add up": lambda: dist.all_reduce(torch.zeros(1)),
    "broadcast": lambda: dist.broadcast(torch.zeros(1), 1),
    "share a model's buffers": lambda: DistributedDataParallel(nn.BatchNorm1d(1), init_sync=False)(
        torch.zeros(2, 1)
    ),
}


@pytest.mark.parametrize("talk", TALKS)
def test_a_worker_that_waits_for_a_late_connection_learns_of_the_end_of_the_world(
    waits_end: None, talk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other worker has said that it is here, and then died."""
    monkeypatch.setattr(connecting, "MOST_AT_ONCE", 1)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.add("here", 1)
    world = a_world(server.port)
    world.form(0, timedelta(minutes=30))

    def end() -> None:
        while not waits._Ends.open:
            pass
        world.abort()

    ends = threading.Thread(target=end)
    ends.start()
    with pytest.raises(WorldChanged), world.or_over():
        TALKS[talk]()
    ends.join()
    world.forget()
    destroying.settle()


@pytest.mark.parametrize("point", ["start", "backward", "summed", "in the optimizer", "committed"])
def test_a_death_in_a_world_whose_workers_are_connected_late_is_survived(
    crew: Crew, tmp_path, undisturbed: dict, point: str
) -> None:
    accidents = [Accident(point, 4) if rank == 1 else NOTHING for rank in range(4)]
    crew.begin(tmp_path, *accidents, job=work_in_a_large_world)
    crew.all_ended()
    assert_exact(crew, tmp_path, {1}, undisturbed)


def test_a_newcomer_joins_workers_that_are_connected_late(crew: Crew, tmp_path, undisturbed: dict) -> None:
    gate = Gate(tmp_path / "gate")
    for name, accident in enumerate(
        (Accident("forward", 3), Accident("start", 4, gate.wait_and_leave), NOTHING)
    ):
        crew.start(work_in_a_large_world, str(tmp_path), str(name), accident)
    crew.all_waiting(*crew.hands)
    crew.form(*crew.hands[:2])
    crew.until(lambda: crew.round == 2)
    gate.until_somebody_waits()
    crew.close(planned=True)
    gate.open()
    crew.all_ended()
    assert_exact(crew, tmp_path, {0}, undisturbed)
