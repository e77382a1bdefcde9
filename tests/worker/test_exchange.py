"""Which worker sends the state to which."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elasticd.channel.worker_messages import Holds
from elasticd.worker.joining.exchange import HeldState, _standings, choose
from elasticd.worker.joining.transfer import Transfer


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


def test_takers_on_the_sources_node_read_its_memory():
    one, other, neither = (replace(NONE, reach=reach) for reach in (5, 6, 0))
    source = replace(whole(1, 4), reach=5)
    choice = choose([one, source, other, neither, one])
    assert (choice.readers, choice.chain) == ((0, 4), (1, 2, 3))
    assert choose([one, one, other]) == Transfer(0, (1, 2), fresh=True, readers=(1,))
    assert choose([neither, neither]).readers == ()


@pytest.mark.parametrize(("device", "is_reached"), [("cpu", True), ("meta", False)])
def test_only_a_model_in_the_hosts_memory_is_read_there(device: str, is_reached: bool) -> None:
    state: Any = SimpleNamespace(
        contents=SimpleNamespace(parameters=lambda: [torch.empty(1, device=device)]),
        comparison=SimpleNamespace(digests=lambda: [0] * 3),
        progress=SimpleNamespace(marks=0),
        holds=Holds.NONE,
        agreed=0,
        step=0,
    )
    world: Any = SimpleNamespace(size=1)
    (mine,) = _standings(state, world)
    assert (mine.reach != 0) == is_reached
