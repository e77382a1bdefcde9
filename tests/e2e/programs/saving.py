"""A worker that trains alone, and makes a checkpoint when it is told to. Otherwise a player.

Usage: saving.py FOLDER
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from player import Player

from elasticd import worker


class Saving(Player):
    def __init__(self) -> None:
        super().__init__(self.train)
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.checkpoints = worker.Checkpoints(sys.argv[1])

    def train(self) -> None:
        self.model(torch.randn(4, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def obey(self, order: dict[str, Any]) -> None:
        if order["do"] != "save":
            super().obey(order)
            return
        self.checkpoints.save({"model": self.model, "optimizer": self.optimizer}, self.step)
        assert self.checkpoints.wait(60.0), self.checkpoints.last_error
        self.tell("saved", step=self.step)


Saving().play()
