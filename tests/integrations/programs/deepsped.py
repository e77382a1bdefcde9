"""Trains a tiny model with DeepSpeed's engine (ZeRO stage 1), which counts the samples that were used. argv:
"plain"; a folder for checkpoints; a number that is not used here; the steps between checkpoints; the epochs.

A checkpoint of another number of workers is made universal first, as DeepSpeed's documentation says."""

import subprocess
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from elasticd import worker
from noted import LENGTH, TOKENS, Numbered, after_step, note

_, OUTPUT, _, EVERY, EPOCHS = sys.argv[1:6]
BATCH = 2


def made_universal(tag):
    """Return the universal checkpoint of the checkpoint with this tag."""
    universal = Path(OUTPUT, f"{tag}_universal")
    if dist.get_rank() == 0 and not universal.exists():
        folders = ["--input_folder", f"{OUTPUT}/{tag}", "--output_folder", str(universal)]
        workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        converter = "deepspeed.checkpoint.ds_to_universal"
        options = [*folders, *workers, "--inject_missing_state"]
        subprocess.run([sys.executable, "-m", converter, *options], check=True)
    dist.barrier()
    return universal.name


def started(*, universal):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(TOKENS, LENGTH), torch.nn.Linear(LENGTH, TOKENS))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def main():
    deepspeed.init_distributed(dist_backend="gloo")
    world = dist.get_world_size()
    sampler = DistributedSampler(Numbered())
    loader = DataLoader(Numbered(), batch_size=BATCH, sampler=sampler)
    latest = Path(OUTPUT, "latest")
    tag = latest.read_text() if latest.exists() else None
    resized = tag is not None and int(tag.partition("-of-")[2]) != world
    engine = started(universal=resized)
    first = used = step = 0
    if tag is not None:
        _, kept = engine.load_checkpoint(OUTPUT, tag=made_universal(tag) if resized else tag)
        first, used, step = kept["epoch"], kept["used"], kept["step"]
    for epoch in range(first, int(EPOCHS)):
        sampler.set_epoch(epoch)
        for batch in worker.rest_of_epoch(loader, used):
            note(step, batch["number"].tolist())
            logits = engine(batch["input_ids"]).flatten(0, 1)
            engine.backward(torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()))
            engine.step()
            step, used = step + 1, used + BATCH * world
            after_step(step)
            if step % int(EVERY) == 0:
                kept = {"epoch": epoch, "used": used, "step": step}
                engine.save_checkpoint(OUTPUT, tag=f"{step}-of-{world}", client_state=kept)
                if dist.get_rank() == 0:
                    worker.checkpointed(Path(OUTPUT, f"{step}-of-{world}"))
        used = 0


if __name__ == "__main__":
    main()
