"""Which worker sends the state to which, and that the state arrives unchanged."""

import math
import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pytest
import torch

from elasticd.channel.worker_messages import Holds
from elasticd.worker.joining import exchange
from elasticd.worker.joining.exchange import (
    ALONE_BYTES,
    PARCEL_BYTES,
    RUN,
    UNDER_WAY_MAX,
    HeldState,
    Transfer,
    _kept,
    _packed,
    _parcels,
    _unpacked,
    choose,
    neighbours,
    receive_snapshot,
    send_snapshot,
)
from elasticd.worker.values.plaindata import copied, with_tensors


def whole(agreed: int, step: int, marks: int = 0) -> HeldState:
    return HeldState(Holds.WHOLE, agreed, step, marks=marks)


NONE = HeldState(Holds.NONE, 0, 0)


def torn(agreed: int, step: int) -> HeldState:
    return HeldState(Holds.TORN, agreed, step)


@pytest.mark.parametrize(
    ("standings", "choice"),
    [
        ([NONE, NONE, NONE], Transfer(0, (1, 2), fresh=True)),
        ([whole(1, 4), whole(1, 4)], Transfer(0, (), fresh=False)),
        ([NONE, whole(1, 4), whole(1, 4)], Transfer(1, (0,), fresh=False)),
        ([whole(1, 4), whole(1, 5), whole(1, 4)], Transfer(1, (0, 2), fresh=False)),
        ([whole(1, 4), whole(1, 4, marks=1)], Transfer(1, (0,), fresh=False)),
        ([whole(1, 5), whole(1, 4, marks=1)], Transfer(0, (1,), fresh=False)),
        ([torn(1, 5), whole(1, 4)], Transfer(1, (0,), fresh=False)),
        ([torn(1, 5), torn(1, 5)], Transfer(0, (1,), fresh=True)),
        ([NONE, torn(1, 5)], Transfer(0, (1,), fresh=True)),
        ([torn(0, 0), NONE, NONE], Transfer(1, (0, 2), fresh=True)),
        ([torn(0, 0), whole(1, 4)], Transfer(1, (0,), fresh=False)),
    ],
)
def test_the_most_advanced_whole_state_is_gone_on_from(standings, choice):
    assert choose(standings) == choice


def test_a_step_that_the_others_have_made_anew_is_not_gone_back_to():
    """Rank 0 committed step 6 in round 1, and was left behind. The others made their step 6 in round 2."""
    assert choose([whole(1, 6), whole(2, 5), whole(2, 5)]) == Transfer(1, (0,), fresh=False)
    assert choose([whole(1, 6), whole(2, 6), whole(2, 6)]) == Transfer(1, (0,), fresh=False)


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

    monkeypatch.setattr(exchange, "PARCEL_BYTES", 1024)
    monkeypatch.setattr(exchange.dist, "isend", isend)
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
        monkeypatch.setattr(exchange.dist, "isend", self._isend)
        monkeypatch.setattr(exchange.dist, "recv", self._recv)

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
            return receive_snapshot(self._choice, rank, overwritten)

        with ThreadPoolExecutor(len(self._choice.takers)) as pool:
            got = [pool.submit(take, rank) for rank in self._choice.takers]
            self._own.rank = self._choice.source
            send_snapshot(snapshot, self._choice)
            return [one.result(timeout=60) for one in got]


@pytest.mark.parametrize("takers", [1, 7, 30])
def test_a_state_that_is_passed_on_by_a_tree_arrives_as_it_was(
    monkeypatch: pytest.MonkeyPatch, takers: int
) -> None:
    monkeypatch.setattr(exchange, "CHAIN_MAX", 0)
    monkeypatch.setattr(exchange, "PARCEL_BYTES", 1000)
    snapshot = {"parameters": [torch.randn(37, 41), torch.arange(5)], "rest": {"a": torch.ones(3), "b": 7}}
    choice = Transfer(3, tuple(rank for rank in range(takers + 1) if rank != 3), fresh=False)
    for arrived in Threads(monkeypatch, choice).transfer(snapshot):
        assert torch.equal(arrived["parameters"][0], snapshot["parameters"][0])
        assert torch.equal(arrived["rest"]["a"], torch.ones(3)) and arrived["rest"]["b"] == 7


@pytest.mark.parametrize("alone", [0, 1 << 30])
def test_parameters_of_every_kind_and_size_arrive_in_their_place(
    monkeypatch: pytest.MonkeyPatch, alone: int
) -> None:
    monkeypatch.setattr(exchange, "ALONE_BYTES", alone)
    monkeypatch.setattr(exchange, "PARCEL_BYTES", 4096)
    sent = {str(n): tensor for n, tensor in enumerate([*odd_tensors(), torch.randn(3000), torch.randn(5)])}
    own = {name: torch.empty_like(tensor) for name, tensor in sent.items()}
    own["0"] = torch.empty(2)  # of another shape
    own["1"] = torch.empty(0, dtype=torch.float64)
    unlike = {"0", "1"} | {name for name, tensor in own.items() if not tensor.is_contiguous()}
    snapshot = {"parameters": {"model": sent, "unknown": {"0": torch.ones(3000)}}, "rest": torch.ones(3000)}
    threads = Threads(monkeypatch, Transfer(0, (1,), fresh=False))
    (arrived,) = threads.transfer(snapshot, lambda: {"model": own})
    assert {name for name, tensor in arrived["parameters"]["model"].items() if tensor is own[name]} == {
        *own.keys() - unlike
    }
    for name, tensor in sent.items():
        got = arrived["parameters"]["model"][name]
        assert torch.equal(got, tensor) and got.dtype == tensor.dtype
    assert torch.equal(arrived["parameters"]["unknown"]["0"], torch.ones(3000))
    assert torch.equal(arrived["rest"], torch.ones(3000))


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
