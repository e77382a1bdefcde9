"""transformers' Trainer trains a small GPT-2 on random tokens."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

TOKENS = 256


class Drawn(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        tokens = torch.randint(TOKENS, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, n_positions=32, n_embd=64, n_layer=2, n_head=2))
    with tempfile.TemporaryDirectory() as folder:
        how = TrainingArguments(
            folder, max_steps=1_000_000, save_strategy="no", logging_strategy="no", report_to=[], use_cpu=True
        )
        Trainer(model, how, train_dataset=Drawn()).train()


if __name__ == "__main__":
    main()
