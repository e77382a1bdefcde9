"""A worker that trains alone, and behaves as player.py. On an order it saves a checkpoint, saves one after
the other until one is left out, or has a loss that is NaN.

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

        self.poison = 1.0

    def train(self) -> None:
        loss = self.model(torch.randn(4, 64)).square().mean()
        loss.backward()
        worker.report(loss=loss * self.poison, samples=4)
        self.poison = 1.0
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> bool:
        return self.checkpoints.save({"model": self.model, "optimizer": self.optimizer}, self.step)

    def obey(self, order: dict[str, Any]) -> None:
        if order["do"] == "poison":
            self.poison = float("nan")
        elif order["do"] == "hurry":
            saves = 0
            while self.save():
                saves += 1
                self.step += 1
                self.train()
            durable = self.checkpoints.wait(60.0) and not self.checkpoints.failed
            self.tell("hurried", saves=saves, durable=durable)
        elif order["do"] == "save":
            self.save()
            durable = self.checkpoints.wait(60.0) and not self.checkpoints.failed
            self.tell("saved", step=self.step, durable=durable)
        else:
            super().obey(order)


Saving().play()
