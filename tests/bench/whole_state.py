"""The state of a model and its optimizer as torch's own ways of saving take it, and a file with all of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer


def nested(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state, which ``dcp.load`` fills in place."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def put_back(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state that has the form of ``nested``."""
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def save(model: nn.Module, optimizer: Optimizer, file: Path) -> None:
    """Save everything in one file, durably."""
    with file.open("wb") as out:
        torch.save(nested(model, optimizer), out)
        out.flush()
        os.fsync(out.fileno())


def load(model: nn.Module, optimizer: Optimizer, file: Path) -> None:
    put_back(model, optimizer, torch.load(file, weights_only=True))
