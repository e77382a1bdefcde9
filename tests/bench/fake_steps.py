"""A worker that reports steps without training: it uses next to no processor time."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "procs" / "programs" / "faketorch"))
from torch.optim.optimizer import Optimizer  # the stand-in for torch of tests/procs

step = Optimizer().step
while True:
    step()
    time.sleep(0.05)
