"""Plain data comes back from a checkpoint, and reaches other workers, unchanged; or it is refused at once."""

from __future__ import annotations

import enum
import time
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elasticd import worker
from elasticd.checkpoint.client.objects import loaded
from elasticd.checkpoint.client.state_dict import Flat, flatten, restore
from elasticd.worker.values.plaindata import copied, outlined, with_tensors
from tests.checkpoint.likeness import with_types

BIG = 1 << 19  # elements; too many to be stored in one piece


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


def table(*keys: Any) -> dict[Any, Any]:
    return {key: torch.full((BIG,), n, dtype=torch.float32) for n, key in enumerate(keys)}


DATA = {
    "large, by number": table(1, 2, -3),
    "large, mixed": table(1, "1", 1.5, "1.5", None, "None", (1, "a"), (1,), b"1"),
    "large, by truth": table(True, False, "True"),
    "large, in a list": [table(1, 2), table(3)],
    "large, of another kind": OrderedDict([(2, torch.ones(BIG)), (1, torch.zeros(BIG))]),
    "large, with dots": {"a.b": torch.ones(BIG), "a": {"b": torch.zeros(BIG)}},
    "small, by number": {1: "a", "1": "b", None: 3, 1.5: 4, (1, 2): 5},
    "small, with dots": {"a.b": 1, "a": {"b": 2, "c.d": 3}, "e.f": 4},
    "with defaults": defaultdict(list, {3: [1, 2], "a": []}),
    "counted": Counter("abca"),
    "a history": [{"step": n, "loss": n / 7, "name": str(n)} for n in range(200)],
    "many": {f"entry {n}": n for n in range(200)},
    "many, of several kinds": {
        f"entry {n}": [torch.tensor(n), {str(n): torch.ones(2)}, {"a.b": n, 3: ()}, None][n // 50]
        for n in range(200)
    },
    "many tensors": [{"at": torch.tensor(n), "by": {"n": n}} for n in range(80)],
}


@pytest.mark.parametrize("what", DATA)
def test_plain_data_comes_back_from_a_checkpoint_unchanged(opened, what):
    checkpoints = opened()
    assert checkpoints.save({"data": DATA[what], "weights": nn.Linear(2, 2)}, 1)
    assert checkpoints.wait() and not checkpoints.failed, checkpoints.last_error
    state: dict[str, Any] = {"data": None, "weights": nn.Linear(2, 2)}
    assert checkpoints.load(state) == 1
    assert with_types(state["data"]) == with_types(DATA[what])
    state["data"] = {"a": {"b": torch.zeros(3)}}  # of another form than the saved data
    assert checkpoints.load(state) == 1
    assert with_types(state["data"]) == with_types(DATA[what])


@pytest.mark.parametrize("what", DATA)
def test_plain_data_reaches_another_worker_unchanged(what):
    outline, tensors = outlined(copied(DATA[what]))
    there = loaded(outline)
    arriving = iter(tensors)
    assert with_types(with_tensors(there, lambda _: next(arriving))) == with_types(DATA[what])


def test_numbers_of_numpys_become_pythons_in_keys(opened):
    made = copied(
        {np.int64(3): 1, (np.int32(4), "a"): 2, np.float64(0.5): 3, np.str_("b"): 4, np.bool_(1): 5}
    )
    assert with_types(made) == with_types({3: 1, (4, "a"): 2, 0.5: 3, "b": 4, True: 5})


class Odd:
    pass


REFUSED = {
    "a key of an enum": ({Colour.RED: 1}, "Colour"),
    "a key of an enum of numbers": ({Number.ONE: 1}, "Number"),
    "an enum within a key": ({"a": [{(1, Colour.RED): 1}]}, "Colour"),
    "an enum": ({"a": Colour.RED}, "Colour"),
    "a number of numpy's": ({"a": np.float64(1)}, "float64"),
    "a key of an own class": ({Odd(): 1}, "Odd"),
    "a lambda": (defaultdict(lambda: 0, {1: 2}), "lambda"),
    "a sparse tensor": (torch.eye(3).to_sparse(), "sparse"),
    "a quantized tensor": ({"a": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, "quantized"),
    "a nested tensor": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
}


@pytest.mark.parametrize(("data", "named"), REFUSED.values(), ids=REFUSED)
def test_what_could_not_be_handed_on_is_refused_in_a_sentence_that_names_it(data, named):
    with pytest.raises(TypeError, match=f"^State's odd holds .*{named}.*cannot be sent|neither sent"):
        worker.State(nn.Linear(2, 2), odd=data)


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)],
    ids=["sparse", "quantized"],
)
def test_tensors_that_are_no_block_of_numbers_are_refused_wherever_they_are(opened, tensor):
    model = nn.Linear(2, 2)
    model.register_buffer("odd", tensor)
    with pytest.raises(TypeError, match=r"State's model\.odd holds a (sparse|quantized) tensor"):
        worker.State(model)
    with pytest.raises(TypeError, match=r"model\.odd holds a (sparse|quantized) tensor"):
        opened().save({"model": model}, 1)


def test_two_entries_of_one_name_are_refused(opened):
    with pytest.raises(ValueError, match=r"two entries of the state would be saved under one name: .*a\.b"):
        opened().save({"a.b": 1, "a": {"b": 2}}, 1)


@pytest.mark.parametrize("kind", [list, dict])
def test_a_long_history_costs_a_save_little(opened, kind):
    """If they were stored one by one, 8,000 entries would take four seconds instead of a hundredth of a
    second."""
    entries = [{"step": n, "loss": n / 7, "rate": 0.1, "name": "train"} for n in range(8000)]
    history: Any = entries if kind is list else {f"step {n}": entry for n, entry in enumerate(entries)}
    checkpoints = opened()
    assert checkpoints.save({"history": history}, 1) and checkpoints.wait()
    if kind is list:
        history.append({"step": 8000})
    else:
        history["last"] = {"step": 8000}
    began = time.process_time()
    assert checkpoints.save({"history": history}, 2)
    assert time.process_time() - began < 1.0
    assert checkpoints.wait() and not checkpoints.failed
    state: dict[str, Any] = {"history": []}
    assert checkpoints.load(state) == 2 and state["history"] == history


def test_what_each_rank_has_under_a_key_of_its_own_is_saved_by_each():
    """The size of the values does not matter."""
    states = [{"ours": {"random": {str(rank): (3, tuple(range(700)), None)}, "of": {}}} for rank in range(2)]
    keys = [set(flatten(state).objects) for state in states]
    assert keys == [{"ours.random.0", "ours.of"}, {"ours.random.1", "ours.of"}]


@pytest.mark.parametrize("deep", [False, True])
def test_what_ranks_have_under_keys_of_their_own_in_a_long_mapping_is_saved_by_each(deep):
    """Each rank gets all entries back, as from a short mapping."""
    states = []
    for rank in range(2):
        common: dict[str, Any] = {f"entry {n}": n for n in range(100)}
        states.append({"ours": common | ({"by": {f"of {rank}": 1}} if deep else {f"of {rank}": 1})})
    flats = [flatten(state) for state in states]
    assert not flats[0].objects.keys() & flats[1].objects.keys()
    together = Flat({}, flats[0].objects | flats[1].objects, flats[0].paths | flats[1].paths)
    state: dict[str, Any] = {"ours": None}
    restore(state, together)
    assert state["ours"].keys() >= states[0]["ours"].keys() | states[1]["ours"].keys()
    if deep:
        assert state["ours"]["by"] == {"of 0": 1, "of 1": 1}
