"""Modules whose ``state_dict`` gives copies of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elasticd.worker.checkpoint import Checkpoints


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
