"""Modules whose ``state_dict`` gives copies of their tensors, or other tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elasticd.worker.checkpoints import Checkpoints
from tests.worker.worlds import in_world


class Renaming(nn.Linear):
    """Gives copies, under other names."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"old_{key}": t.clone() for key, t in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({k.removeprefix("old_"): t for k, t in state.items()}, *args, **kwargs)


def with_hook() -> nn.Module:
    module = nn.Linear(8, 4)
    module.register_state_dict_post_hook(
        lambda _, state, prefix, __: state.update({k: t.clone() for k, t in state.items()})
    )
    return module


def test_a_module_that_gives_copies_is_loaded_all_the_same(opened: Callable[..., Checkpoints]) -> None:
    made = {"renaming": Renaming(8, 4), "hooked": with_hook()}
    checkpoints = opened()
    assert checkpoints.save(made, 1) and checkpoints.wait() and not checkpoints.failed
    fresh = {"renaming": Renaming(8, 4), "hooked": with_hook()}
    assert opened().load(fresh) == 1
    for name, module in made.items():
        for mine, other in zip(module.parameters(), fresh[name].parameters(), strict=True):
            assert torch.equal(mine, other), name


def test_a_model_that_is_flattened_and_sharded_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """The module's state would be whole, and its optimizer's only that of one rank."""
    for said in in_world(2, tmp_path, flattened, str(tmp_path / "run")):
        assert len(said) == 2
        for sentence in said:
            assert "model cannot be saved or loaded, as it is in FullyShardedDataParallel" in sentence


def flattened(folder: str) -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(8, 4), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(folder)
    said = []
    for state in ({"model": model, "optimizer": optimizer}, {"model": nn.Sequential(model)}):
        try:
            checkpoints.save(state, 1)
        except TypeError as error:
            said.append(str(error))
    checkpoints.close()
    return said
