"""Trains a tiny model that is sharded with FSDP2, with torchtitan's optimizers and its checkpoint manager, in
a loop of its own: torchtitan's trainer needs a GPU. argv: "plain"; a folder for checkpoints; a number that is
not used here; the steps between checkpoints; the epochs."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from elasticd import worker
from noted import LENGTH, TOKENS, Numbered, after_step, note

_, OUTPUT, _, EVERY, EPOCHS = sys.argv[1:6]
BATCH = 2


class Place:
    """The place in the data, counted in samples. The manager saves and loads it."""

    def __init__(self):
        self.epoch = self.used = self.step = 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def main():
    dist.init_process_group("gloo")
    sampler = DistributedSampler(Numbered())
    loader = DataLoader(Numbered(), batch_size=BATCH, sampler=sampler)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(TOKENS, LENGTH), torch.nn.Linear(LENGTH, TOKENS))
    fully_shard(model)
    optimizers = replace(default_adamw(), implementation="for-loop").build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=100)
    place = Place()
    manager = CheckpointManager.Config(enable=True, folder=OUTPUT, interval=int(EVERY)).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": place},
        sd_adapter=None,
    )
    manager.load()
    for epoch in range(place.epoch, int(EPOCHS)):
        sampler.set_epoch(epoch)
        for batch in worker.rest_of_epoch(loader, place.used):
            note(place.step, batch["number"].tolist())
            logits = model(batch["input_ids"]).flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()).backward()
            optimizers.step()
            optimizers.zero_grad()
            place.step, place.used = place.step + 1, place.used + BATCH * dist.get_world_size()
            after_step(place.step)
            if manager.save(place.step) and dist.get_rank() == 0:
                worker.checkpointed(Path(OUTPUT, f"step-{place.step}"))
        place.epoch, place.used = epoch + 1, 0
    manager.close()


if __name__ == "__main__":
    main()
