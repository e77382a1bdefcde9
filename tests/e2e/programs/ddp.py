"""A worker that really trains: DDP over gloo, with a collective in each step. In all else it behaves as
player.py."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from player import Player
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def work() -> None:
        x = torch.randn(4, 8)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    Player(work).play()
    weights = [torch.empty_like(model.module.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, model.module.weight.detach())
    assert all(torch.equal(w, weights[0]) for w in weights), "the ranks have trained apart"
    dist.destroy_process_group()


main()
