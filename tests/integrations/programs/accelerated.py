"""Trains a tiny model with Accelerate's own loop. argv: "plain", "elastic" or "in_place"; a folder for
checkpoints; batches that a worker accumulates; the steps between checkpoints; the epochs."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from noted import LENGTH, TOKENS, Numbered, after_step, evaluate, let_others_train, note, note_committed

KIND, OUTPUT, ACCUMULATE, EVERY, EPOCHS = sys.argv[1:6]


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(
        model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
    )


def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(TOKENS, LENGTH), torch.nn.Linear(LENGTH, TOKENS))
    return model, torch.optim.AdamW(model.parameters())


def train_on(accelerator, model, optimizer, batch, step):
    note(step, batch["number"].tolist())
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        after_step(step + 1)
        return step + 1
    return step


def elastic_on(model, optimizer):
    from elasticd.integrations.accelerate import ElasticLoader

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=int(ACCUMULATE))
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = DataLoader(Numbered(), batch_size=2, shuffle=True)
    loader = ElasticLoader(accelerator, loader, OUTPUT, every=int(EVERY))
    step = loader.epoch * loader.steps + loader.step
    for epoch in loader.epochs(int(EPOCHS)):
        for batch in loader:
            step = train_on(accelerator, model, optimizer, batch, step)
        evaluate(epoch, accelerator.wait_for_everyone)
    note_committed()


def elastic():
    elastic_on(*made())


def in_place():
    from elasticd.integrations.accelerate import in_place

    model, optimizer = made()
    in_place(model=model, optimizer=optimizer)(elastic_on)(model, optimizer)


def plain():
    """Train as Accelerate's documentation says."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=int(ACCUMULATE))
    model, optimizer = accelerator.prepare(*made())
    loader = accelerator.prepare(DataLoader(Numbered(), batch_size=2, shuffle=True))
    folders = sorted(Path(OUTPUT).glob("step_*"), key=lambda folder: int(folder.name[5:]))
    batches = 0
    if folders:
        accelerator.load_state(str(folders[-1]))
        batches = int(folders[-1].name[5:])
    for epoch in range(batches // len(loader), int(EPOCHS)):
        loader.set_epoch(epoch)
        rest = batches % len(loader)
        for batch in accelerator.skip_first_batches(loader, rest) if rest else loader:
            train_on(accelerator, model, optimizer, batch, batches // int(ACCUMULATE))
            batches += 1
            if batches % (int(EVERY) * int(ACCUMULATE)) == 0:
                accelerator.save_state(f"{OUTPUT}/step_{batches}")


if __name__ == "__main__":
    let_others_train()
    {"plain": plain, "elastic": elastic, "in_place": in_place}[KIND]()
