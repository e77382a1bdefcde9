"""What plain DCP wrote is loaded too. Neither its objects nor its metadata, a pickle, run anything."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict

from elasticd.checkpoint.format import metadata
from elasticd.checkpoint.format.manifest import BadCheckpoint
from tests.checkpoint.conftest import assert_same, tensors_of, training


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def plain(folder: Path, seed: int, **more: object) -> Path:
    state = training(seed)
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    rest = {key: state[key] for key in ("progress", "table")}
    dcp.save({"model": model, "optimizer": optimizer, **rest, **more}, checkpoint_id=folder, no_dist=True)
    return folder


def wanted(seed: int) -> dict[str, object]:
    state = training(seed)
    del state["schedule"]
    return state


def test_a_plain_checkpoint_fills_the_same_state(opened, tmp_path):
    state = wanted(7)
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters(), lr=1.0)  # without a step
    opened().load_plain(state, plain(tmp_path / "plain", 3))
    assert_same(state, tensors_of(wanted(3)))
    assert state["progress"] == {"position": 3, "name": "seed 3"}
    assert state["optimizer"].param_groups[0]["lr"] == training(3)["optimizer"].param_groups[0]["lr"]


def test_a_checkpoint_that_was_saved_flat_fills_the_same_state(opened, tmp_path):
    state = training(3)
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    flat, _ = flatten_state_dict({"model": model, "optimizer": optimizer})
    dcp.save(flat, checkpoint_id=tmp_path / "plain", no_dist=True)
    fresh = {"model": training(7)["model"]}
    fresh["optimizer"] = torch.optim.AdamW(fresh["model"].parameters(), lr=1.0)  # without a step
    opened().load_plain(fresh, tmp_path / "plain")
    assert_same(fresh, tensors_of({name: state[name] for name in fresh}))


def test_an_object_in_it_that_would_run_something_runs_nothing(opened, tmp_path):
    mark = tmp_path / "ran"
    folder = plain(tmp_path / "plain", 3, evil=Evil(mark))
    with pytest.raises(ValueError, match="cannot be loaded"):
        opened().load_plain({"evil": 0}, folder)
    assert not mark.exists()


def test_metadata_that_would_run_something_is_refused_and_runs_nothing(tmp_path):
    mark = tmp_path / "ran"
    with pytest.raises(BadCheckpoint, match=r"names posix\.mkdir, which DCP's metadata never does"):
        metadata.read(pickle.dumps(Evil(mark)), "x/.metadata")
    assert not mark.exists()


@pytest.mark.parametrize(
    "name", ["torch.load", "torch.hub.load", "builtins.eval", "torch._utils._rebuild_tensor_v2"]
)
def test_metadata_may_not_even_name_torch_s_own_functions(name):
    module, _, function = name.rpartition(".")
    raw = b"\x80\x02c" + module.encode() + b"\n" + function.encode() + b"\n."
    with pytest.raises(BadCheckpoint, match="never does"):
        metadata.read(raw, "x/.metadata")


@pytest.mark.parametrize("raw", [b"", b"\x80\x02", b"garbage", pickle.dumps({"a": 1})], ids=repr)
def test_what_is_no_metadata_is_said_to_be_none(opened, tmp_path, raw):
    (tmp_path / ".metadata").write_bytes(raw)
    with pytest.raises(BadCheckpoint, match=r"/\.metadata"):
        opened().load_plain(wanted(7), tmp_path)


def test_another_shape_or_a_missing_part_is_refused(opened, tmp_path):
    folder = plain(tmp_path / "plain", 3)
    with pytest.raises(ValueError, match="cannot be loaded"):
        opened().load_plain({"nothing": torch.zeros(3)}, folder)
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        opened().load_plain({"nothing": torch.zeros(3)}, tmp_path / "nowhere")
