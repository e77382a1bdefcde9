"""An optimizer step without torch."""

import os
import sys


def step_once():
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "faketorch"))
    from torch.optim.optimizer import Optimizer

    Optimizer().step()
    del sys.path[0]
