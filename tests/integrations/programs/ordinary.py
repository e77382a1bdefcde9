"""Trains a tiny model with DistributedDataParallel and DistributedSampler, in its own loop. argv: "plain" or
"elastic"; a folder for the snapshot; a number that is not used here; the steps between snapshots; the
epochs; the samples of the dataset, if not all."""

import sys
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from elasticd import worker
from noted import LENGTH, SAMPLES, TOKENS, Numbered, after_step, note

KIND, OUTPUT, _, EVERY, EPOCHS = sys.argv[1:6]
COUNT = int(sys.argv[6]) if len(sys.argv) > 6 else SAMPLES
BATCH = 2


def main():
    dist.init_process_group("gloo")
    dataset = Subset(Numbered(), range(COUNT))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(TOKENS, LENGTH), torch.nn.Linear(LENGTH, TOKENS))
    optimizer = torch.optim.AdamW(model.parameters())
    file = Path(OUTPUT, "snapshot.pt")
    first = used = step = 0
    if file.exists():
        snapshot = torch.load(file, weights_only=True)
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        first, used, step = snapshot["epoch"], snapshot["used"], snapshot["step"]
    replica = DistributedDataParallel(model)

    def save():
        if dist.get_rank() == 0:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            file.parent.mkdir(exist_ok=True)
            torch.save({**parts, "epoch": epoch, "used": used, "step": step}, file.with_suffix(".new"))
            file.with_suffix(".new").rename(file)
            worker.checkpointed(file)
        dist.barrier()

    def rest():
        """Return the batches that are left in the epoch."""
        if KIND == "elastic":
            return worker.rest_of_epoch(loader, used)
        return islice(loader, step - epoch * len(loader), None)  # counted in batches, as many scripts do

    if KIND == "plain":
        first = step // len(loader)
    for epoch in range(first, int(EPOCHS)):
        sampler.set_epoch(epoch)
        for batch in rest():
            note(step, batch["number"].tolist())
            logits = replica(batch["input_ids"]).flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            step, used = step + 1, used + BATCH * dist.get_world_size()
            after_step(step)
            if step % int(EVERY) == 0:
                save()
        used = 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
