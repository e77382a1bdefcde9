"""Trains a tiny GPT-2 with Trainer. argv: "plain", "elastic" or "in_place"; a folder for checkpoints; batches
that a worker accumulates; the steps between checkpoints; the epochs."""

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from noted import LENGTH, TOKENS, Numbered, after_step, evaluate, let_others_train, note

KIND, OUTPUT, ACCUMULATE, EVERY, EPOCHS = sys.argv[1:6]
EVALUATES = os.environ["ACCIDENT"].startswith("evaluate")
if KIND == "plain":
    from transformers import Trainer
else:
    from elasticd.integrations.transformers import Trainer


class Accident(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        after_step(state.global_step)

    def on_evaluate(self, args, state, control, **_):
        if EVALUATES:
            evaluate(round(state.epoch) - 1, torch.distributed.barrier)


class Noting(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        number = inputs.pop("number").tolist()
        if model.training:
            note(self.state.global_step, number)
        return super().compute_loss(model, inputs, *args, **kwargs)


def train(model):
    os.makedirs(OUTPUT, exist_ok=True)  # get_last_checkpoint needs the folder
    args = TrainingArguments(
        OUTPUT,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=int(ACCUMULATE),
        num_train_epochs=int(EPOCHS),
        save_steps=int(EVERY),
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        eval_strategy="epoch" if EVALUATES else "no",
    )
    trainer = Noting(model, args, train_dataset=Numbered(), eval_dataset=Numbered(), callbacks=[Accident()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(OUTPUT) if KIND == "plain" else None)
    if trainer.is_world_process_zero():
        print(f"trained {trainer.state.global_step} steps")


def main():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=TOKENS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=1)
    model = GPT2LMHeadModel(config)
    if KIND == "in_place":
        from elasticd.integrations.transformers import in_place

        in_place(model=model)(train)(model)
    else:
        train(model)


if __name__ == "__main__":
    let_others_train()
    main()
