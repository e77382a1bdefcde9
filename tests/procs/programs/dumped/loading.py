"""DataLoaders whose workers are started in each possible way, and must find the script's classes."""

import gc
import sys

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor([i * i, get_worker_info().id])


def as_rows(samples):
    return torch.stack(samples).tolist()


def main():
    torch.manual_seed(5)
    torch.optim.SGD([torch.zeros(1)], lr=0.1).step()
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(
            Squares(),
            batch_size=2,
            shuffle=True,
            num_workers=2,
            collate_fn=as_rows,
            multiprocessing_context=method,
        )
        print(method, list(loader))
    print(gc.get_freeze_count() > 1000, file=sys.stderr)


if __name__ == "__main__":
    main()
