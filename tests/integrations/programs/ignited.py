"""Trains a tiny model with Ignite's engine, as Ignite's documentation says. argv: "plain"; a folder for
checkpoints; a number that is not used here; the steps between checkpoints; the epochs."""

import os
import sys
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Events
from ignite.engine.deterministic import DeterministicEngine
from ignite.handlers import Checkpoint, DiskSaver

from elasticd import worker
from noted import LENGTH, TOKENS, Numbered, after_step, note

_, OUTPUT, _, EVERY, EPOCHS = sys.argv[1:6]
GLOBAL_BATCH = 6  # of all workers: idist.auto_dataloader divides it


def train(_):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(TOKENS, LENGTH), torch.nn.Linear(LENGTH, TOKENS))
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters()))
    loader = idist.auto_dataloader(Numbered(), batch_size=GLOBAL_BATCH, shuffle=True)

    def step(engine, batch):
        note(engine.state.iteration - 1, batch["number"].tolist())
        logits = model(batch["input_ids"]).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    trainer = DeterministicEngine(step)
    sampler = loader.sampler
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda e: sampler.set_epoch(e.state.epoch - 1))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda e: after_step(e.state.iteration))
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer}
    saves = Checkpoint(parts, DiskSaver(OUTPUT, create_dir=True, require_empty=False), n_saved=2)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=int(EVERY)), saves)

    @trainer.on(Events.ITERATION_COMPLETED(every=int(EVERY)))
    def tell(_):
        if idist.get_rank() == 0:
            worker.checkpointed(saves.last_checkpoint)

    found = sorted(Path(OUTPUT).glob("checkpoint_*.pt"), key=os.path.getmtime)
    if found:
        Checkpoint.load_objects(parts, torch.load(found[-1], weights_only=False))
    trainer.run(loader, max_epochs=int(EPOCHS))


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(train)
