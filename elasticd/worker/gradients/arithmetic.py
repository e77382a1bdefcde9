"""The parts of a machine that decide the last bits of a result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

_MEANINGS = {
    "torch": ("torch", "install the same version everywhere"),
    "cpu": ("the processor's instructions", "set ATEN_CPU_CAPABILITY to what all of them have"),
    "gpu": ("the GPU", "use GPUs of one kind"),
}


class Arithmetic:
    """The arithmetic of consistent mode, kept in the State: later workers compute as the first ones did, with
    as many threads."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""

    def state_dict(self) -> dict[str, Any]:
        return {
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "gpu": self._gpu,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the number of threads. Raises ValueError if this worker would compute other bits."""
        mine = self.state_dict()
        for name, (meaning, remedy) in _MEANINGS.items():
            if mine[name] != state[name]:
                raise ValueError(
                    f"{meaning} is {mine[name] or 'none'} here and {state[name] or 'none'} where the "
                    f"training began, so that results would differ: {remedy}, or give Data consistent=False"
                )
        if mine["threads"] != state["threads"]:
            torch.set_num_threads(state["threads"])


def refuse_inconsistent(modules: Iterable[nn.Module]) -> None:
    """Raise TypeError, with a sentence, for a module that cannot give the same results in a world of another
    size."""
    for whole in modules:
        for name, module in whole.named_modules():
            where = f"{type(module).__name__} {name}".strip()
            if isinstance(module, nn.SyncBatchNorm):
                raise TypeError(
                    f"{where} adds up over the workers of the present world, so it cannot be consistent: "
                    "use BatchNorm, which is each virtual rank's own, or give Data consistent=False"
                )
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise TypeError(
                    f"{where} has sparse gradients, which consistent mode cannot add up: make it with "
                    "sparse=False, or give Data consistent=False"
                )
