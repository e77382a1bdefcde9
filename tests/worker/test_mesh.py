"""The world as a mesh of units."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from elasticd import worker
from tests.worker.worlds import in_world


@pytest.mark.parametrize(
    ("unit", "of_the_job", "sentence"),
    [
        (3, "1", "a world of 4 workers has no whole units of 3; give `elasticd run --unit 3`"),
        (None, "3", "a world of 4 workers has no whole units of 3; give `elasticd run --unit 3`"),
        (0, "1", "unit is 0: give a number that is 1 or more"),
    ],
)
def test_a_world_that_is_no_multiple_of_the_unit_is_refused(
    unit: int | None, of_the_job: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ELASTICD_UNIT", of_the_job)
    with pytest.raises(ValueError, match=sentence):
        worker.mesh(unit)


def layouts_after_each_world() -> list[int]:
    """Return how many layouts of tensors there are after each of three worlds."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from elasticd.worker.world.round_mesh import RoundMesh

    def train(number: int) -> None:
        one = distribute_tensor(torch.ones(4), mesh.make(number, (1,), ("all",)), [Shard(0)])
        assert (one + one).full_tensor().sum() == 8

    mesh, counts = RoundMesh(), []
    for number in (1, 2, 3):
        train(number)
        mesh.forget()
        gc.collect()
        counts.append(sum(isinstance(one, DTensorSpec) for one in gc.get_objects()))
    return counts


def test_torch_keeps_no_layouts_of_worlds_that_ended(tmp_path: Path) -> None:
    after_first, after_second, after_third = in_world(1, tmp_path, layouts_after_each_world)[0]
    assert after_first == after_second == after_third
