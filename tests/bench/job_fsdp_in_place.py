"""The job of job_fsdp.py, which keeps its process. BENCH_REDUNDANCY: the copies of each shard; BENCH_EVERY:
the steps from one commit to the next; BENCH_OVERLAP: whether copies are sent while the next steps run."""

from __future__ import annotations

import os

import torch

from elasticd import worker
from tests.bench.job import BATCH, STEPS, WIDTH, note
from tests.bench.job_fsdp import build, shard

REDUNDANCY = int(os.environ.get("BENCH_REDUNDANCY", "1"))
OVERLAP = os.environ.get("BENCH_OVERLAP") == "1"
EVERY = int(os.environ.get("BENCH_EVERY", "1"))


@worker.run
def train(state: worker.State, batch: torch.Tensor) -> None:
    place = f"{worker.rank()} {worker.world_size()} {os.getpid()}"
    for step in state.steps(STEPS):
        state.optimizer.zero_grad()
        state.model(batch).square().mean().backward()
        state.optimizer.step()
        made = (step + 1) % EVERY != 0
        try:
            if not made:
                state.commit()
                made = True
        finally:
            if made or state.step > step:  # the step is committed, even if the world ends with this commit
                note(place, step)


def main() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    copies = {"redundancy": REDUNDANCY, "overlap": OVERLAP}
    state = worker.State(model=model, optimizer=optimizer, shard=shard, **copies)
    train(state, torch.randn(BATCH, WIDTH))


if __name__ == "__main__":
    main()
