"""DCP's metadata is a pickle, and runs nothing here."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from elasticd.checkpoint.format import metadata
from elasticd.checkpoint.format.manifest import BadCheckpoint


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path):
    mark = tmp_path / "ran"
    with pytest.raises(BadCheckpoint, match=r"names posix\.mkdir"):
        metadata.read(pickle.dumps(Evil(mark)), "x/.metadata")
    assert not mark.exists()


@pytest.mark.parametrize(
    "name", ["torch.load", "torch.hub.load", "builtins.eval", "torch._utils._rebuild_tensor_v2"]
)
def test_not_even_torch_s_own_functions_are_named(name):
    module, _, function = name.rpartition(".")
    raw = b"\x80\x02c" + module.encode() + b"\n" + function.encode() + b"\n."
    with pytest.raises(BadCheckpoint, match="never does"):
        metadata.read(raw, "x/.metadata")


@pytest.mark.parametrize("raw", [b"", b"\x80\x02", b"garbage", pickle.dumps({"a": 1})], ids=repr)
def test_what_is_no_metadata_is_said_to_be_none(raw):
    with pytest.raises(BadCheckpoint, match=r"x/\.metadata"):
        metadata.read(raw, "x/.metadata")


def test_what_torch_writes_is_read(tmp_path):
    state = {"w": torch.ones(3, 4, dtype=torch.bfloat16), "n": {"a": 1, "b": [2, "x"]}}
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    found = metadata.read((tmp_path / "plain" / ".metadata").read_bytes(), "plain/.metadata")
    assert set(found.state_dict_metadata) == {"w", "n.a", "n.b"}
