"""Which worker sends the state to which, and that the state arrives unchanged."""

import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from elasticd.channel.worker_messages import Holds
from elasticd.worker.commit.plaindata import copied, with_tensors
from elasticd.worker.world import exchange
from elasticd.worker.world.exchange import (
    PARCEL_BYTES,
    UNDER_WAY_MAX,
    HeldState,
    Transfer,
    _kept,
    _packed,
    _parcels,
    _unpacked,
    choose,
    send_snapshot,
)


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
    ],
)
def test_the_most_advanced_whole_state_is_gone_on_from(standings, choice):
    assert choose(standings) == choice


def test_a_step_that_the_others_have_made_anew_is_not_gone_back_to():
    """Rank 0 committed step 6 in round 1 and was left behind; the others made theirs in round 2."""
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
    arrived = []
    for together in _parcels(tensors):
        kinds = [torch.empty(tensors[i].shape, dtype=tensors[i].dtype, device="meta") for i in together]
        arrived += _unpacked(_packed([tensors[i] for i in together]), kinds)
    assert all(torch.equal(a, b) for a, b in zip(arrived, tensors, strict=True))
    assert [a.dtype for a in arrived] == [t.dtype for t in tensors]


def test_what_is_kept_of_a_parcel_does_not_keep_the_parcel():
    parcel = torch.arange(64, dtype=torch.uint8)
    piece = _kept(parcel[16:32])
    assert torch.equal(piece, parcel[16:32]) and piece.untyped_storage().nbytes() == 16
    assert _kept(parcel) is parcel


def test_of_a_state_of_small_tensors_only_a_few_parcels_are_in_memory_a_second_time(monkeypatch):
    @dataclass
    class Message:  # gloo's hold what they send, too
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


def test_small_tensors_travel_together_and_large_ones_alone():
    sizes = [
        len(p) for p in _parcels([torch.empty(10)] * 50 + [torch.empty(PARCEL_BYTES)] + [torch.empty(10)])
    ]
    assert sizes == [50, 1, 1]


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
