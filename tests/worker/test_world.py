"""Which failures end with a world, and which connections."""

from __future__ import annotations

import functools
import gc
import os
import queue
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from elasticd.channel.worker_messages import Enter, Holds, Waiting
from elasticd.worker.world import destroying, waits
from elasticd.worker.world import group as group_module
from elasticd.worker.world.group import World, WorldChanged, rehearse


def a_world(port: int = 0, size: int = 2) -> World:
    env = {"RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return World(Enter(1, env))


def lose_the_store() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    del server
    store.get("known")


def wait_in_vain() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.wait(["never set"], timedelta(milliseconds=10))


def lose_a_collective() -> None:
    in_a_group_of_two(lambda group: group.allreduce([torch.zeros(1)]).wait())


def lose_a_barrier_that_names_who_is_missing() -> None:
    in_a_group_of_two(lambda group: group.monitored_barrier(timedelta(milliseconds=10), True))


def in_a_group_of_two(
    act: Callable[[dist.ProcessGroupGloo], None], timeout_s: float = 0.01, *, answers: bool = False
) -> None:
    """Make a group of two in this process. The other member takes part only if it ``answers``."""
    store, groups = dist.HashStore(), {}

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join()
    groups[0]._set_default_timeout(timedelta(seconds=timeout_s))
    if answers:
        groups[1].allreduce([torch.ones(1)])
    try:
        act(groups[0])
    finally:
        del groups[1]  # ends threads that still wait in vain


def lose_a_sum_of_gradients() -> None:
    """Have a hook of DistributedDataParallel wait for a sum that fails. torch hides the class of the
    error."""
    waits.use_group_timeouts()
    asked: Future[list[torch.Tensor]] = Future()
    hooked = waits.until_end(asked).then(lambda done: done.value()[0])
    waits.end()
    hooked.wait()


def run_out_of_memory() -> None:
    torch.empty(1 << 50)


def run_out_of_threads() -> None:
    raise RuntimeError("can't start new thread")  # as threading calls the function


@pytest.mark.parametrize(
    "fail",
    [
        lose_the_store,
        wait_in_vain,
        lose_a_collective,
        lose_a_barrier_that_names_who_is_missing,
        lose_a_sum_of_gradients,
    ],
)
def test_what_the_group_or_its_store_fails_with_means_that_the_world_is_over(
    waits_end: None,
    fail: Callable[[], None],
) -> None:
    world = a_world()
    with pytest.raises(WorldChanged), world.or_over():
        fail()
    assert world.broken is not None


@pytest.mark.parametrize("fail", [run_out_of_memory, run_out_of_threads])
def test_what_one_worker_lacks_is_its_own_error_unless_the_world_is_over_anyway(
    fail: Callable[[], None],
) -> None:
    world = a_world()
    with pytest.raises(RuntimeError, match="can't"), world.or_over():
        fail()
    assert world.broken is None
    world.close()
    with pytest.raises(WorldChanged), world.or_over():
        fail()


def test_a_world_that_is_over_once_all_have_come_makes_no_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All workers have agreed that all are here, so no worker can announce any more that another one has
    left."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.add("here", 1)
    world = a_world(server.port)
    wait = dist.TCPStore.wait

    def and_then_the_agent_speaks(*args: object) -> None:
        wait(*args)
        world.abort()

    monkeypatch.setattr(dist.TCPStore, "wait", and_then_the_agent_speaks)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("it connects"))
    with pytest.raises(WorldChanged):
        world.form(0, timedelta(seconds=60))
    world.close()


def test_a_worker_alone_forms_its_world_and_waits_in_it_without_a_server(waits_end: None) -> None:
    world = a_world(port=0, size=1)  # nobody can listen at port 0
    world.form(0, timedelta(seconds=60))
    try:
        world.set_value("known", "by itself")
        assert world.wait_for_value("known") == "by itself"
        world.ask_to_leave(going=False)
        assert not world.ends_with_commit(0) and world.ends_with_commit(1)
        end = threading.Thread(target=world.abort)
        end.start()
        with pytest.raises(WorldChanged):
            world.wait_for_value("never set")
        end.join()
        assert c10d._get_default_store().timeout == timedelta(seconds=group_module.STORE_S_MAX)
    finally:
        world.close()
        world.forget()
        destroying.settle()


@pytest.mark.parametrize(
    "error", [None, RuntimeError("no such interface"), RuntimeError("[enforce fail at gloo/transport/tcp]")]
)
def test_a_rehearsal_leaves_nothing_behind_and_tells_of_no_error(
    monkeypatch: pytest.MonkeyPatch, waits_end: None, error: RuntimeError | None
) -> None:
    before, hook, make = set(destroying.sockets()), sys.excepthook, c10d._new_process_group_helper
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    sizes = []

    def make_group(*args: Any, **kwargs: Any) -> Any:
        # Made meanwhile as if by another thread of the script.
        stores.append(dist.TCPStore("127.0.0.1", stores[0].port, wait_for_workers=False))
        sizes.append(args[0])
        if error is not None:
            raise error
        return make(*args, **kwargs)

    monkeypatch.setattr(c10d, "_new_process_group_helper", make)  # restored, whatever fails here
    monkeypatch.setattr(group_module, "_make_group", make_group)
    rehearse(timedelta(seconds=60))
    destroying.settle()
    assert sizes == [1] and not dist.is_initialized() and not group_module._present
    assert c10d._world.group_count == 0 and c10d._new_process_group_helper is make_group
    assert sys.excepthook is hook
    stores[1].set("still", "there")
    stores.clear()
    assert set(destroying.sockets()) <= before


@pytest.mark.parametrize(("round", "rehearsed"), [("0", True), ("3", False)])
def test_a_worker_that_has_no_round_rehearses_before_it_says_that_it_waits(
    monkeypatch: pytest.MonkeyPatch, round: str, *, rehearsed: bool
) -> None:
    done: list[Any] = []

    class LinkOfNobody:
        def send(self, message: object) -> None:
            done.append(message)
            raise EOFError

    loop: Any = SimpleNamespace(committed=SimpleNamespace(step=0, memory=None))
    link: Any = LinkOfNobody()
    runs = sys.modules["elasticd.worker.run"]
    monkeypatch.setattr(runs, "rehearse", done.append)
    monkeypatch.setenv("ELASTICD_ROUND", round)
    timeout = timedelta(seconds=60)
    with pytest.raises(EOFError):
        runs._run_in_rounds(loop, lambda: None, link, timeout)
    assert done == [*([timeout] if rehearsed else []), Waiting(0, 0, Holds.NONE)]


def test_a_world_cuts_what_torch_has_connected_and_no_connection_of_the_scripts_own() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("known", "")
    world = a_world(server.port)
    ends: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def connect() -> None:
            ends.append(socket.create_connection(listening.getsockname()))
            ends.append(listening.accept()[0])

        with world._connecting():
            meanwhile = threading.Thread(target=connect)
            meanwhile.start()
            store = world._connect()
            meanwhile.join()
        world.close()
    mine, other = ends
    with mine, other:
        mine.sendall(b"still there")
        assert other.recv(64) == b"still there"
    with pytest.raises(RuntimeError):
        store.get("known")


@dataclass(frozen=True)
class Pair:
    """Two worlds of this process that share a store, without a group. ``made``: the store clients that they
    have made."""

    server: dist.TCPStore
    worlds: list[World]
    made: list[dist.TCPStore]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made: list[dist.TCPStore] = []
    connect = World._connect

    def noting(world: World) -> dist.TCPStore:
        made.append(connect(world))
        return made[-1]

    monkeypatch.setattr(World, "_connect", noting)
    worlds = [a_world(server.port), a_world(server.port)]
    for rank, world in enumerate(worlds):
        world.rank = rank
        with world._connecting():
            world._store = world._connect()
        world._formed = True
    yield Pair(server, worlds, made)
    for world in worlds:
        world.close()


ANSWER_S_MAX = 20.0  # for a wait that has all it needs


def begun(call: Callable[[], object]) -> queue.SimpleQueue[object]:
    """Make the call in another thread. The queue gets what the call returns."""
    answer: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(call()), daemon=True).start()
    return answer


def end_together(worlds: list[World], commit: int) -> bool:
    """Whether all workers leave their world with the commit."""
    ends = [begun(functools.partial(world.ends_with_commit, commit)) for world in worlds]
    return all(end.get(timeout=ANSWER_S_MAX) for end in ends)


def until_a_wait_holds(client: dist.TCPStore) -> queue.SimpleQueue[object]:
    """Return once a wait of another thread keeps other calls of the client from their answers. The queue gets
    the answer of such a call once the wait is over."""
    while True:
        answer = begun(lambda: client.add("calls", 1))
        try:
            answer.get(timeout=0.1)
        except queue.Empty:
            return answer


def test_a_planned_end_makes_no_connection_while_no_worker_waits(pair: Pair) -> None:
    """torch asks DNS for a name at each connection."""
    for world in pair.worlds:
        world.ask_to_leave(going=False)
    assert end_together(pair.worlds, 1)
    assert len(pair.made) == len(pair.worlds)


def test_a_planned_end_that_comes_while_a_worker_waits_ends_with_the_same_commit(pair: Pair) -> None:
    first, second = pair.worlds
    first._commit = 6
    heard = begun(lambda: first.wait_for_value("from the other"))
    while not first._awaited:
        pass
    for world in pair.worlds:
        world.ask_to_leave(going=False)
    second.set_value("from the other", "7")
    assert heard.get(timeout=ANSWER_S_MAX) == "7"
    assert end_together(pair.worlds, 7)
    assert len(pair.made) == len(pair.worlds) + 1, "only the worker that waited needed another client"


def test_a_planned_end_that_comes_while_torch_waits_with_the_store_ends_with_the_same_commit(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the script makes a group, and another worker makes it only after its next commit."""
    monkeypatch.setattr(group_module, "ANSWER_S_MAX", 0.1)
    first, second = pair.worlds
    torchs = begun(lambda: first._store.wait(["group"], timedelta(seconds=60)))
    held = until_a_wait_holds(first._store)
    for world in pair.worlds:
        world.ask_to_leave(going=False)
    assert end_together([second], 1)
    second._store.set("group", "")
    torchs.get(timeout=ANSWER_S_MAX)
    held.get(timeout=ANSWER_S_MAX)
    assert end_together([first], 1)


def test_a_wait_that_comes_while_a_planned_end_is_announced_begins_once_it_is(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced = threading.Event()
    add = dist.TCPStore.add

    def slowly(store: dist.TCPStore, *args: Any) -> int:
        announced.wait()
        return add(store, *args)

    monkeypatch.setattr(dist.TCPStore, "add", slowly)
    for world in pair.worlds:
        world.ask_to_leave(going=False)
    ends = begun(lambda: end_together(pair.worlds, 1))
    while not all(world._awaited for world in pair.worlds):
        pass
    announced.set()
    assert ends.get(timeout=2 * ANSWER_S_MAX)
    assert len(pair.made) == len(pair.worlds)


def test_a_wait_ends_with_the_world_while_a_planned_end_is_being_announced_in_vain(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced = threading.Event()
    monkeypatch.setattr(dist.TCPStore, "add", lambda *_: announced.wait())
    first, _ = pair.worlds
    first.ask_to_leave(going=False)
    ends = begun(lambda: first.ends_with_commit(1))
    while not first._awaited:
        pass
    first.abort()
    assert ends.get(timeout=ANSWER_S_MAX)
    assert pair.server.get("last step") == b"left", "the other workers end their waits, too"
    announced.set()


def at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first worker's world end as soon as the worker has said that its function has returned."""
    add = dist.TCPStore.add

    def adding(store: dist.TCPStore, key: str, number: int) -> int:
        count = add(store, key, number)
        if store is pair.worlds[0]._store and key == "returned":
            pair.worlds[0].abort()
        return count

    monkeypatch.setattr(dist.TCPStore, "add", adding)


@pytest.mark.parametrize("end", [at_once, None], ids=["at once", "later"])
def test_workers_agree_whether_all_have_returned_however_a_world_ends_meanwhile(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, end: Callable[..., None] | None
) -> None:
    if end is not None:
        end(pair, monkeypatch)
    returned = [begun(world.end) for world in pair.worlds]
    [have_returned] = {each.get(timeout=ANSWER_S_MAX) for each in returned}
    assert have_returned or end is not None


def test_a_message_from_anyone_that_is_asked_for_when_the_world_is_over_is_not_waited_for(
    waits_end: None,
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = a_world(server.port, size=1)
    world.form(0, timedelta(seconds=5))
    try:
        world.abort()
        with pytest.raises(dist.DistNetworkError, match="the world ended before anyone had sent a message"):
            dist.recv(torch.zeros(1))
    finally:
        world.close()
        world.forget()


def test_what_has_failed_with_the_world_keeps_nothing_of_those_who_waited(waits_end: None) -> None:
    """A model stands for what the frames of a script have. An exception has the frames that it left."""
    kept = []

    def train() -> None:
        model = nn.Linear(1, 1)
        kept.append(weakref.ref(model))
        summed = waits.until_end(Future())
        failed: Future[int] = Future()
        done = waits.until_end(failed)
        failed.set_exception(RuntimeError("[gloo/pair.cc] Connection closed by peer"))
        waits.end()
        for _ in range(2):
            with pytest.raises(dist.DistNetworkError, match="the world ended before all workers"):
                summed.wait()
            with pytest.raises(RuntimeError, match="Connection closed by peer"):
                done.wait()

    train()
    gc.collect()
    assert [ref() for ref in kept] == [None]


def wait_for_a_sum(group: dist.ProcessGroupGloo) -> None:
    group.allreduce([torch.zeros(1)]).wait()


def wait_for_the_future_of_a_sum(group: dist.ProcessGroupGloo) -> None:
    """Wait as a hook does that the script has given to DDP."""
    group.allreduce([torch.zeros(1)]).get_future().wait()


def wait_for_a_message(group: dist.ProcessGroupGloo) -> None:
    group.recv([torch.zeros(1)], 1, 0).wait()


def wait_for_a_message_with_a_timeout(group: dist.ProcessGroupGloo) -> None:
    group.recv([torch.zeros(1)], 1, 0).wait(timedelta(seconds=3))


def wait_for_a_functional_collective(group: dist.ProcessGroupGloo) -> None:
    """Wait as a DTensor does."""
    total = torch.ones(1)
    torch._C._distributed_c10d._register_work(total, group.allreduce([total]))
    assert torch.ops._c10d_functional.wait_tensor(total) is total
    assert total == 2


WAITS = [
    wait_for_a_sum,
    wait_for_the_future_of_a_sum,
    wait_for_a_message,
    wait_for_a_message_with_a_timeout,
    wait_for_a_functional_collective,
]


@pytest.mark.parametrize("wait", WAITS)
def test_a_waiting_worker_learns_of_the_end_of_the_world_though_gloo_does_not(
    waits_end: None, wait: Callable[[dist.ProcessGroupGloo], None]
) -> None:
    """Gloo does not notice a connection that is lost after a part of a message has come, or while a part
    waits to be sent."""

    def wait_until_the_end(group: dist.ProcessGroupGloo) -> None:
        def end() -> None:
            while not waits._Ends.open:
                pass
            waits.end()

        threading.Thread(target=end).start()
        with pytest.raises(dist.DistNetworkError, match="the world ended before"):
            wait(group)
        with pytest.raises(dist.DistNetworkError, match="the world ended before"):
            wait(group)

    in_a_group_of_two(wait_until_the_end, timeout_s=2.0)


@pytest.mark.parametrize("wait", [wait_for_a_sum, wait_for_a_functional_collective])
def test_a_wait_that_others_answer_returns_and_one_that_fails_says_why(
    waits_end: None, wait: Callable[[dist.ProcessGroupGloo], None]
) -> None:
    in_a_group_of_two(wait, 60.0, answers=True)
    with pytest.raises(RuntimeError, match="gloo"):
        in_a_group_of_two(wait)
    assert not waits._Ends.open


def test_a_backward_pass_ends_with_the_next_gradients_once_the_world_is_over(
    waits_end: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the end of the world, a worker does not compute gradients that no worker adds up. The script or
    its library has made the DistributedDataParallel, and has evaluated the model before."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = a_world(server.port, size=1)
    world.form(0, timedelta(seconds=60))
    layers = [nn.Linear(8, 8) for _ in range(3)]
    reached: list[nn.Module] = []
    for layer in layers:
        layer.register_full_backward_pre_hook(lambda layer, _: reached.append(layer))
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1e-4)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    with torch.no_grad():
        model(torch.ones(8))
    assert not model._comm_hooks, "the script may still register a hook of its own"
    model(torch.ones(8, requires_grad=True)).sum().backward()
    assert reached == layers[::-1]
    loss = model(torch.ones(8, requires_grad=True)).sum()
    world.close()
    with pytest.raises(RuntimeError, match="the world ended before"):
        loss.backward()
    assert reached == [*layers[::-1], layers[-1]]
    del model, loss
    world.forget()


def test_a_thread_that_waited_at_the_end_of_a_world_is_not_used_again(waits_end: None) -> None:
    """The thread has two results: the error of the world's end, and the result of the wait."""
    with pytest.raises(dist.DistNetworkError, match="the world ended before"):
        waits._in_another_thread(waits.end)
    assert not waits._Substitute.idle


@dataclass(frozen=True)
class _Group:
    abort: Callable[[], None]
    number: int


def test_communicators_are_aborted_at_the_same_time_even_if_one_cannot_be_aborted_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU each may wait for the others to be aborted."""
    done: list[str] = []
    all_abort = threading.Barrier(3, timeout=60)

    def fails() -> None:
        all_abort.wait()
        done.append("aborted")
        raise RuntimeError("NCCL error: remote process exited or there was a network error")

    names = SimpleNamespace(pg_names={_Group(fails, number): str(number) for number in range(3)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(group_module, "c10d", SimpleNamespace(_world=names))
    monkeypatch.setattr(group_module, "sockets", lambda: done.append("looked for connections") or [])
    a_world().close()
    assert done == ["looked for connections", *["aborted"] * 3], "the quickest first"


@pytest.mark.parametrize(("gpu", "first"), [(True, "_abort_process_group"), (False, "destroy_process_group")])
def test_a_group_that_cannot_be_destroyed_in_the_usual_way_is_destroyed_in_the_other(
    waits_end: None, monkeypatch: pytest.MonkeyPatch, gpu: bool, first: str
) -> None:
    tried = []

    def fails() -> None:
        tried.append(first)
        raise RuntimeError("the communicator was aborted already")

    world = a_world(size=1)
    world.form(0, timedelta(seconds=60))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(c10d if gpu else dist, first, fails)
    world.forget()
    assert tried == [first] and not dist.is_initialized()


def test_a_group_whose_threads_wait_in_vain_is_left_behind_and_only_changes_of_its_connections_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gloo's threads may wait for half an hour. If the loop was told all the time that their connections are
    closed, gloo's event loop would spin meanwhile."""
    monkeypatch.setattr(destroying, "SOON_S", 0.01)
    released, destroyed = threading.Event(), threading.Event()

    class Group:
        def __del__(self) -> None:
            released.wait()
            destroyed.set()

    groups: list[Any] = [Group()]
    assert not destroying.is_held(groups)
    mine, peers = socket.socketpair()
    script, theirs = socket.socketpair()
    with mine, peers, script, theirs, select.epoll() as loop:
        loop.register(mine, select.EPOLLIN)
        loop.register(script, select.EPOLLIN)
        for end in (mine, theirs):
            end.shutdown(socket.SHUT_RDWR)
        assert len(loop.poll(0)) == 2
        ours = {one for one in destroying.sockets() if one[0] == mine.fileno()}
        closed = script.fileno(), "socket:[1]"  # the script has the descriptor of its own
        destroying.begin(groups, {*ours, closed})
        destroying.settle()
        assert not destroyed.is_set(), "its destructor waits still"
        assert {number for number, _ in loop.poll(0)} == {mine.fileno(), script.fileno()}
        assert [number for number, _ in loop.poll(0)] == [script.fileno()], "the script's own is told always"
        loop.unregister(mine)  # gloo crashes if it cannot
    released.set()
    assert destroyed.wait(60)


def test_a_loop_of_the_next_world_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once elasticd has read what a dead group's loop watches, the loop is closed. The next world has its
    number, and a connection with the number of a closed one."""
    old, (mine, peers), (later, sender) = select.epoll(), socket.socketpair(), socket.socketpair()
    old.register(mine, select.EPOLLIN)
    mine.shutdown(socket.SHUT_RDWR)
    numbers = old.fileno(), mine.fileno()
    watched, calls, new = destroying._watched, 0, select.epoll()

    def read(poll: int) -> destroying.Watched:
        nonlocal calls
        calls, found = calls + 1, watched(poll)
        if calls == 1:
            old.close()
            mine.close()
            os.dup2(new.fileno(), numbers[0])
            os.dup2(later.fileno(), numbers[1])
            new.register(numbers[1], select.EPOLLIN)
        return found

    monkeypatch.setattr(destroying, "_watched", read)
    with peers, later, sender, new:
        destroying._watch_changes({one for one in destroying.sockets() if one[0] == numbers[1]})
        assert calls >= 1
        sender.send(b"a message")
        assert [new.poll(0), new.poll(0)] == 2 * [[(numbers[1], select.EPOLLIN)]]
        for number in numbers:
            os.close(number)


A_GROUP = """
import threading
from datetime import timedelta
import torch.distributed as dist
from elasticd.worker.world import destroying

def join(rank):
    groups.append(dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60)))

before, store, groups = set(destroying.sockets()), dist.HashStore(), []
members = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
for member in members:
    member.start()
for member in members:
    member.join()
connections = set(destroying.sockets()) - before
"""
AT_LEISURE = """
destroying._watch_changes(connections)
groups.clear()
"""
AT_THE_END_OF_THE_PROCESS = """
destroying.SOON_S = 0.0
destroying.begin(groups, connections)
"""


@pytest.mark.parametrize("destroyed", [AT_LEISURE, AT_THE_END_OF_THE_PROCESS])
def test_a_group_whose_destructor_takes_long_is_destroyed_without_a_crash(destroyed: str) -> None:
    program = [sys.executable, "-c", A_GROUP + destroyed]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_a_process_is_forked_once_the_groups_of_the_last_world_are_destroyed() -> None:
    """A child that has a group but none of its threads hangs or crashes when it drops the group."""
    released, destroyed = threading.Event(), threading.Event()

    class Group:
        def __del__(self) -> None:
            released.wait()
            destroyed.set()

    groups: list[Any] = [Group()]
    destroying.begin(groups, set())
    assert not destroyed.is_set(), "the next world need not wait"
    threading.Timer(0.01, released.set).start()
    child = os.fork()
    if child == 0:
        os._exit(0 if destroyed.is_set() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
