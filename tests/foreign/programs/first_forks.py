import gc
import os

import torch

SHARED = 50_000  # objects that come with torch
print(
    "rank",
    os.environ["RANK"],
    "forked" if gc.get_freeze_count() > SHARED else "fresh",
    torch.ones(2).sum().item(),
)
