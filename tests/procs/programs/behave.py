"""A worker that does what the environment variable BEHAVE says: it trains until it is told to stop,
or ends."""

import os
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "faketorch"))
from torch.optim.optimizer import Optimizer

what, _, argument = os.environ["BEHAVE"].partition(":")
optimizer = Optimizer()
if what == "exit":
    optimizer.step()
    sys.exit(int(argument))
if what == "die":
    os.kill(os.getpid(), int(argument))
if what == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if what == "save":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    optimizer.step()
    time.sleep(0.005)
