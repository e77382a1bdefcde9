"""Trains a tiny model with Lightning's Trainer. argv: "plain", "elastic" or "in_place"; a folder for
checkpoints; batches that a worker accumulates; the steps between checkpoints; the epochs."""

import os
import sys

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from noted import LENGTH, TOKENS, Numbered, after_step, let_others_train, note

KIND, OUTPUT, ACCUMULATE, EVERY, EPOCHS = sys.argv[1:6]


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Embedding(TOKENS, LENGTH), torch.nn.Linear(LENGTH, TOKENS))

    def training_step(self, batch, number):
        note(self.trainer.global_step, batch["number"].tolist())
        return torch.nn.functional.cross_entropy(
            self.layers(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        )

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Accident(Callback):
    def on_train_batch_end(self, trainer, *_):
        after_step(trainer.global_step)


def fit(model, loader, ckpt_path, callback, **world):
    Trainer(
        max_epochs=int(EPOCHS),
        accelerator="cpu",
        strategy="ddp",
        accumulate_grad_batches=int(ACCUMULATE),
        callbacks=[Accident(), callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **world,
    ).fit(model, loader, ckpt_path=ckpt_path)


def elastic_on(model, loader):
    from elasticd.integrations.lightning import ElasticFit

    elastic = ElasticFit(OUTPUT, every=int(EVERY))
    fit(model, elastic.loader(loader), elastic.newest, elastic, **elastic.world)


def elastic(loader):
    elastic_on(Model(), loader)


def in_place(loader):
    from elasticd.integrations.lightning import in_place

    model = Model()
    in_place(model=model)(elastic_on)(model, loader)


def plain(loader):
    """Train as Lightning's documentation says."""
    saves = ModelCheckpoint(OUTPUT, every_n_train_steps=int(EVERY), save_last=True)
    fit(Model(), loader, "last", saves, devices=int(os.environ["LOCAL_WORLD_SIZE"]))


if __name__ == "__main__":
    let_others_train()
    kinds = {"plain": plain, "elastic": elastic, "in_place": in_place}
    kinds[KIND](DataLoader(Numbered(), batch_size=2, shuffle=True))
