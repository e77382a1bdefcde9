"""What a loop with Accelerate refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest


@pytest.fixture(autouse=True)
def _needs_accelerate() -> None:
    """Import the library here, not in each process that collects tests."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")


@pytest.mark.parametrize("kind", ["a stream", "a sampler with weights"])
def test_a_loader_whose_order_is_not_known_is_refused(kind: str) -> None:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

    from elasticd.integrations.accelerate import ElasticLoader

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from range(3)

    loader = {
        "a stream": lambda: DataLoader(Stream()),
        "a sampler with weights": lambda: DataLoader(range(3), sampler=WeightedRandomSampler([1, 2, 3], 3)),
    }[kind]()
    with pytest.raises(TypeError, match="is not known ahead"):
        ElasticLoader(Accelerator(cpu=True), loader, "nowhere", every=1)


def test_a_sharded_model_is_not_kept_in_place() -> None:
    from elasticd.integrations.in_place import LoopProgress, Present

    accelerator: Any = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=object()))
    present = Present(cast(Any, SimpleNamespace(commit=None)), LoopProgress())
    with pytest.raises(ValueError, match="leave it out with FSDP"):
        present.begin(accelerator, dict)
