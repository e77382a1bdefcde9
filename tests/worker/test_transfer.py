"""The state arrives unchanged in the workers that take it."""

import ctypes
import errno
import math
import os
import queue
import signal
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
import torch

from elasticd.worker.joining import peer_memory, transfer
from elasticd.worker.joining.peer_memory import PeerMemory, UnreadableMemory, reach, shown
from elasticd.worker.joining.transfer import (
    ALONE_BYTES,
    PARCEL_BYTES,
    RUN,
    UNDER_WAY_MAX,
    Transfer,
    _kept,
    _packed,
    _parcels,
    _unpacked,
    neighbours,
    receive_snapshot,
    send_snapshot,
)
from elasticd.worker.values.plaindata import copied, with_tensors


def odd_tensors() -> list[torch.Tensor]:
    return [
        torch.tensor(3.5),
        torch.empty(0),
        torch.tensor([True, False, True]),
        torch.arange(7, dtype=torch.bfloat16),
        torch.randn(3, 5, dtype=torch.complex64),
        torch.randn(4, 6).t(),
        torch.randn(PARCEL_BYTES // 4 + 3),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randint(0, 9, (5,), dtype=torch.uint8),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch._neg_view(torch.randn(3)),
        torch.randn(3, 1).expand(3, 5),
        torch.randn(6, 8)[:, ::2].t(),
    ]


def test_tensors_of_every_kind_and_size_arrive_as_they_were():
    tensors = odd_tensors()
    got: dict[int, torch.Tensor] = {}
    for together in _parcels(tensors):
        kinds = [torch.empty(tensors[i].shape, dtype=tensors[i].dtype, device="meta") for i in together]
        got |= zip(together, _unpacked(_packed([tensors[i] for i in together]), kinds), strict=True)
    arrived = [got[i] for i in range(len(tensors))]
    assert all(torch.equal(a, b) for a, b in zip(arrived, tensors, strict=True))
    assert [a.dtype for a in arrived] == [t.dtype for t in tensors]


def test_what_is_kept_of_a_parcel_does_not_keep_the_parcel():
    parcel = torch.arange(64, dtype=torch.uint8)
    piece = _kept(parcel[16:32])
    assert torch.equal(piece, parcel[16:32]) and piece.untyped_storage().nbytes() == 16
    assert _kept(parcel) is parcel


def test_of_a_state_of_small_tensors_only_a_few_parcels_are_in_memory_a_second_time(monkeypatch):
    @dataclass
    class Message:  # gloo's own messages hold what they send, too
        piece: torch.Tensor

        def wait(self) -> None:
            taken.append(self.piece.clone())

    made: list[weakref.ref[torch.Tensor]] = []
    taken: list[torch.Tensor] = []
    most = 0

    def isend(piece: torch.Tensor, to: int) -> Message:
        nonlocal most
        made.append(weakref.ref(piece))
        most = max(most, sum(there() is not None for there in made))
        return Message(piece)

    monkeypatch.setattr(transfer, "PARCEL_BYTES", 1024)
    monkeypatch.setattr(transfer.dist, "isend", isend)
    tensors = [torch.full((64,), float(n)) for n in range(200)]
    send_snapshot({"parameters": tensors}, Transfer(0, (1,), fresh=False))
    assert len(taken) == len(made) > 3 * UNDER_WAY_MAX and most <= UNDER_WAY_MAX + 2
    assert torch.equal(torch.cat(taken[-50:]), torch.cat(tensors).view(torch.uint8)), "all of it, in order"


@pytest.mark.parametrize("places", [1, 2, 3, 512, 513, 520, 1000, 80_000])
def test_each_place_gets_the_state_once_after_few_hops(places: int) -> None:
    hops = {0: 0}
    waiting = [0]
    while waiting:
        place = waiting.pop()
        for after in neighbours(place, places)[1]:
            assert after not in hops and neighbours(after, places)[0] == place
            hops[after] = hops[place] + 1
            waiting.append(after)
    assert hops.keys() == set(range(places)) and neighbours(0, places)[0] is None
    assert max(hops.values()) <= (places - 1 if places <= 512 else 7 + math.log2(places / RUN) + 1)
    assert all(len(neighbours(place, places)[1]) <= 3 for place in range(places))


class Threads:
    """The workers of a world, each a thread of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, choice: Transfer) -> None:
        self._choice = choice
        self._lines: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = defaultdict(queue.SimpleQueue)
        self._own = threading.local()
        monkeypatch.setattr(transfer.dist, "isend", self._isend)
        monkeypatch.setattr(transfer.dist, "send", self._isend)
        monkeypatch.setattr(transfer.dist, "recv", self._recv)

    def wait(self) -> None:
        """Wait for a message that was sent, which it is at once."""

    def _isend(self, piece: torch.Tensor, taker: int) -> Self:
        self._lines[self._own.rank, taker].put(piece.clone())
        return self

    def _recv(self, piece: torch.Tensor, source: int) -> None:
        piece.copy_(self._lines[source, self._own.rank].get(timeout=60))

    def transfer(self, snapshot: Any, overwritten: Callable[[], Any] | None = None) -> list[dict[str, Any]]:
        """Send the snapshot. Return what arrived in each taker."""

        def take(rank: int) -> dict[str, Any]:
            self._own.rank = rank
            world: Any = SimpleNamespace(rank=rank, check=lambda: None)
            return receive_snapshot(self._choice, world, overwritten)

        with ThreadPoolExecutor(len(self._choice.takers)) as pool:
            got = [pool.submit(take, rank) for rank in self._choice.takers]
            self._own.rank = self._choice.source
            send_snapshot(snapshot, self._choice)
            return [one.result(timeout=60) for one in got]


@pytest.mark.parametrize("takers", [1, 7, 30])
def test_a_state_that_is_passed_on_by_a_tree_arrives_as_it_was(
    monkeypatch: pytest.MonkeyPatch, takers: int
) -> None:
    monkeypatch.setattr(transfer, "CHAIN_MAX", 0)
    monkeypatch.setattr(transfer, "PARCEL_BYTES", 1000)
    snapshot = {"parameters": [torch.randn(37, 41), torch.arange(5)], "rest": {"a": torch.ones(3), "b": 7}}
    choice = Transfer(3, tuple(rank for rank in range(takers + 1) if rank != 3), fresh=False)
    for arrived in Threads(monkeypatch, choice).transfer(snapshot):
        assert torch.equal(arrived["parameters"][0], snapshot["parameters"][0])
        assert torch.equal(arrived["rest"]["a"], torch.ones(3)) and arrived["rest"]["b"] == 7


@pytest.mark.parametrize(
    ("alone", "readers"),
    [
        pytest.param(0, (), id="each in messages of its own"),
        pytest.param(1 << 30, (), id="together"),
        pytest.param(0, (1,), id="through memory"),
    ],
)
def test_parameters_of_every_kind_and_size_arrive_in_their_place(
    monkeypatch: pytest.MonkeyPatch, alone: int, readers: tuple[int, ...]
) -> None:
    monkeypatch.setattr(transfer, "ALONE_BYTES", alone)
    monkeypatch.setattr(transfer, "PARCEL_BYTES", 4096)
    sent = {str(n): tensor for n, tensor in enumerate([*odd_tensors(), torch.randn(3000), torch.randn(5)])}
    own = {name: torch.empty_like(tensor) for name, tensor in sent.items()}
    assert sum(not tensor.is_contiguous() for tensor in own.values()) > 2
    own["0"] = torch.empty(2)  # of another shape
    own["1"] = torch.empty(0, dtype=torch.float64)
    snapshot = {"parameters": {"model": sent, "unknown": {"0": torch.ones(3000)}}, "rest": torch.ones(3000)}
    threads = Threads(monkeypatch, Transfer(0, (1,), fresh=False, readers=readers))
    (arrived,) = threads.transfer(snapshot, lambda: {"model": own})
    assert {name for name, tensor in arrived["parameters"]["model"].items() if tensor is own[name]} == {
        *own.keys() - {"0", "1"}
    }
    for name, tensor in sent.items():
        got = arrived["parameters"]["model"][name]
        assert torch.equal(got, tensor) and got.dtype == tensor.dtype
    assert torch.equal(arrived["parameters"]["unknown"]["0"], torch.ones(3000))
    assert torch.equal(arrived["rest"], torch.ones(3000))


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory._Forbidden, "so_far", False)


def test_tensors_that_are_dense_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    show = transfer.shown

    def look(tensors: list[torch.Tensor]) -> Any:
        seen.extend(tensors)
        return show(tensors)

    monkeypatch.setattr(transfer, "shown", look)
    dense = [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(4, 6).t()]
    (arrived,) = Threads(monkeypatch, Transfer(0, (1,), fresh=False, readers=(1,))).transfer(
        {"parameters": dense}
    )
    assert [one.data_ptr() for one in seen] == [one.data_ptr() for one in dense]
    assert [one.stride() for one in arrived["parameters"]] == [one.stride() for one in dense]


def test_takers_that_get_messages_do_not_keep_readers_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(monkeypatch, Transfer(0, (1, 2), fresh=False, readers=(2,)))
    done: list[int] = []
    send, has_read = transfer._send, transfer._has_read

    def note_send(*args: Any) -> None:
        done.append(0)
        send(*args)

    def note_answer(reader: int) -> bool:
        done.append(reader)
        return has_read(reader)

    monkeypatch.setattr(transfer, "_send", note_send)
    monkeypatch.setattr(transfer, "_has_read", note_answer)
    threads.transfer({"parameters": [torch.ones(3)]})
    assert done == [2, 0]


@pytest.mark.parametrize("can_read", [True, False])
def test_takers_read_the_sources_memory_while_others_get_messages(
    monkeypatch: pytest.MonkeyPatch, can_read: bool
) -> None:
    if not can_read:
        monkeypatch.setattr(peer_memory, "_read_memory", lambda *_: -1)
    choice = Transfer(2, (0, 1, 3, 4), fresh=False, readers=(1, 4))
    for arrived in Threads(monkeypatch, choice).transfer({"parameters": [torch.arange(9.0)], "step": 7}):
        assert torch.equal(arrived["parameters"][0], torch.arange(9.0)) and arrived["step"] == 7


class WorldOver(Exception):
    pass


@pytest.fixture
def peer() -> Iterator[tuple[int, torch.Tensor]]:
    """Another process, and where it shows 0 to 99 and three ones."""
    ours, its = socket.socketpair()
    numbers, ones = torch.arange(100), torch.ones(3)
    if not (pid := os.fork()):
        numbers.add_(1000)  # in its memory alone
        with shown([numbers, ones]) as where:
            its.send(where.numpy().tobytes())
            its.recv(1)
        os._exit(0)
    where = torch.frombuffer(bytearray(ours.recv(1024)), dtype=torch.int64)
    yield pid, where
    ours.close()
    its.close()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_worker_reads_what_another_process_shows(peer: tuple[int, torch.Tensor]) -> None:
    memory, place, ones = (
        PeerMemory(peer[1], lambda: None),
        torch.zeros(100, dtype=torch.int64),
        torch.zeros(3),
    )
    memory.read(1, ones)
    memory.read(0, place)
    assert torch.equal(place, torch.arange(100) + 1000) and torch.equal(ones, torch.ones(3))


def test_a_worker_reads_nothing_of_a_process_that_is_not_the_one_it_looks_for(
    peer: tuple[int, torch.Tensor],
) -> None:
    where = peer[1].clone()
    where[2] += 1
    with pytest.raises(UnreadableMemory, match=f"process {peer[0]} is another worker here"):
        PeerMemory(where, lambda: None)


def test_a_read_of_a_process_that_has_ended_fails(peer: tuple[int, torch.Tensor]) -> None:
    memory = PeerMemory(peer[1], lambda: None)
    os.kill(peer[0], signal.SIGKILL)
    os.waitid(os.P_PID, peer[0], os.WEXITED | os.WNOWAIT)
    with pytest.raises(UnreadableMemory, match="cannot be read"):
        memory.read(1, torch.zeros(3))
    assert reach() != 0


def test_a_long_read_ends_with_the_world(
    peer: tuple[int, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_memory, "PIECE_BYTES", 160)
    left = 3

    def go_on() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise WorldOver

    place = torch.zeros(100, dtype=torch.int64)
    with pytest.raises(WorldOver):
        PeerMemory(peer[1], go_on).read(0, place)
    assert torch.equal(place[:40], torch.arange(40) + 1000) and not place[40:].any()


def test_workers_with_the_same_parent_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = reach()
    assert 0 < mine < 1 << 63 and reach() == mine
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "getppid", lambda: 1)
        assert reach() not in (0, mine)


@pytest.mark.parametrize("scope", ["0", "1", "2", "3"])
def test_a_worker_that_may_not_be_traced_has_no_reach(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str
) -> None:
    monkeypatch.setattr(peer_memory, "_YAMA", tmp_path / "ptrace_scope")
    (tmp_path / "ptrace_scope").write_text(f"{scope}\n")
    assert (reach() != 0) == (scope in "01")


def test_a_worker_that_was_once_forbidden_to_read_asks_for_messages(
    peer: tuple[int, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(*_: Any) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    memory = PeerMemory(peer[1], lambda: None)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(peer_memory, "_read_memory", forbid)
        with pytest.raises(UnreadableMemory, match="not permitted"):
            memory.read(1, torch.zeros(3))
    assert reach() == 0


def test_a_worker_without_the_system_call_has_no_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_read_memory", lambda *_: -1)
    assert reach() == 0


def test_small_tensors_travel_together_and_large_ones_alone():
    small, large = torch.empty(10), torch.empty(ALONE_BYTES)
    sent = list(_parcels([*[small] * 50, large, small, large, small]))
    assert sent == [[50], [52], [*range(50), 51, 53]]
    many = list(_parcels([torch.empty(1000)] * 1000))
    assert [n for together in many for n in together] == [*range(1000)]
    assert all(len(together) * 4000 <= PARCEL_BYTES for together in many) and len(many) == 2


def test_a_copy_of_plain_data_shares_nothing_with_it():
    data = {"list": [1, 2], "tensor": torch.ones(2), "deep": ({"x": [3]}, {4})}
    copy = copied(data)
    data["list"].append(9)
    data["tensor"].add_(1)
    data["deep"][0]["x"].append(9)
    assert list(map(type, copied({np.int64(3): 1}))) == [int], "with plain keys"
    assert copy["list"] == [1, 2] and copy["tensor"].tolist() == [1, 1] and copy["deep"] == ({"x": [3]}, {4})


def test_what_cannot_be_sent_is_refused_by_name():
    with pytest.raises(TypeError, match="State's thing holds a object, which cannot be sent"):
        copied({"a": [object()]}, "State's thing")


def test_tensors_are_found_in_a_fixed_order_wherever_they_are():
    data = {"a": [torch.tensor(1), {"b": torch.tensor(2)}], "c": (torch.tensor(3), "x")}
    assert with_tensors(data, lambda t: t + 10) == {"a": [11, {"b": 12}], "c": (13, "x")}
