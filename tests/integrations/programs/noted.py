"""Shared by the programs: a dataset whose samples know their numbers, notes of the samples that were trained
on, and accidents.

Environment variables: LEDGER is a folder for the notes. ACCIDENT is KIND:NUMBER, and happens in the first
round of a job. "evaluate" kills rank 1 in the evaluation of the epoch with this number. "kill" kills rank 1
after so many steps. "outlive" does so, too, and a worker that starts afterwards first lets the others train
without it. "wait" has all workers wait after so many steps for a file named "go", and three steps
later for a file named "closing".
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

FOLDER = Path(os.environ["LEDGER"])
KIND, AFTER = os.environ.get("ACCIDENT", "none:0").split(":")
SAMPLES, LENGTH, TOKENS = 53, 8, 32


class Numbered(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        tokens = torch.randint(TOKENS, (LENGTH,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens, "number": torch.tensor(number)}


def note(step, numbers):
    """Note the samples of a batch, in the step after so many steps."""
    round, rank, world = (os.environ[name] for name in ("ELASTICD_ROUND", "RANK", "WORLD_SIZE"))
    with (FOLDER / f"notes-{os.getpid()}").open("a") as notes:
        notes.write(f"{round} {step} {rank} {world} {','.join(map(str, numbers))}\n")


def evaluate(epoch, meet):
    """Note that this worker evaluates an epoch. ``meet``: returns once all workers have called it."""
    round, rank = os.environ["ELASTICD_ROUND"], os.environ["RANK"]
    if (KIND, rank, round, int(AFTER)) == ("evaluate", "1", "1", epoch):
        os.kill(os.getpid(), signal.SIGKILL)
    meet()
    (FOLDER / f"evaluated-{epoch}-{rank}").touch()


def note_committed():
    """Note the step that the agent knows as the last committed one."""
    from elasticd.core.page_layout import COMMITTED
    from elasticd.worker.agent_link.agentpage import own_page

    (FOLDER / "committed").write_text(str(own_page().words[COMMITTED] - 1))


def after_step(step):
    """Have the accident, if it is due after so many steps."""
    if os.environ["ELASTICD_ROUND"] != "1":
        return
    if KIND in ("kill", "outlive") and (os.environ["RANK"], step) == ("1", int(AFTER)):
        (FOLDER / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    until = {0: "go", 3: "closing"}.get(step - int(AFTER))
    if KIND == "wait" and until:
        (FOLDER / f"waits-{os.environ['RANK']}").touch()
        while not (FOLDER / until).exists():
            time.sleep(0.02)


def let_others_train():
    """In a worker that starts after the accident "outlive": wait until the others train without it."""
    if KIND == "outlive" and (FOLDER / "killed").exists():
        while not any(_has_later_round(notes) for notes in FOLDER.glob("notes-*")):
            time.sleep(0.02)


def _has_later_round(notes):
    return any(not line.startswith("1 ") for line in notes.read_text().splitlines())
