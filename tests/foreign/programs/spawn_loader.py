"""DataLoader workers started by spawn: they import __main__ again and unpickle the dataset by its name."""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Squares(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.tensor(index**2)


def main():
    dist.init_process_group("gloo")
    data = Squares()
    loader = DataLoader(
        data,
        batch_size=4,
        num_workers=2,
        multiprocessing_context="spawn",
        persistent_workers=True,
        sampler=DistributedSampler(data, shuffle=False),
    )
    total = sum(batch.sum() for batch in loader)
    dist.all_reduce(total)
    print(f"rank {os.environ['RANK']} total {total.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
