"""As in the DDP tutorials: a Trainer whose rank 0 writes a snapshot, which every rank loads after a
restart."""

import argparse
import os
import signal

import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class MyTrainDataset(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.data = [
            (torch.rand(20, generator=generator), torch.rand(1, generator=generator)) for _ in range(size)
        ]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.global_rank = int(os.environ["RANK"])
        self.model, self.train_data, self.optimizer = model, train_data, optimizer
        self.save_every = save_every
        self.epochs_run = 0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            snapshot = torch.load(snapshot_path, weights_only=True)
            self.model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
            print(f"[{self.global_rank}] Resuming training from snapshot at Epoch {self.epochs_run}")
        self.model = DDP(self.model)

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self.optimizer.zero_grad()
            F.mse_loss(self.model(source), targets).backward()
            self.optimizer.step()

    def train(self, max_epochs, die_at):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.global_rank == 0 and epoch % self.save_every == 0:
                state = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
                torch.save(state, self.snapshot_path)
            torch.distributed.barrier()
            if epoch == die_at and self.epochs_run == 0 and self.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--batch_size", default=8, type=int)
    parser.add_argument("--snapshot", default="snapshot.pt")
    parser.add_argument("--die-at", default=-1, type=int)
    args = parser.parse_args()

    init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    dataset = MyTrainDataset(64)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=DistributedSampler(dataset))
    trainer = Trainer(
        model, loader, torch.optim.SGD(model.parameters(), lr=1e-2), args.save_every, args.snapshot
    )
    trainer.train(args.total_epochs, args.die_at)
    if trainer.global_rank == 0:
        print(f"done, weights {sum(p.sum().item() for p in model.parameters()):.6f}")
    destroy_process_group()


if __name__ == "__main__":
    main()
