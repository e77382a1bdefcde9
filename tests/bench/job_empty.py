"""The smallest script that makes steps: it imports torch, and calls one optimizer."""

import time

import torch

optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
while True:
    optimizer.step()
    time.sleep(0.02)
