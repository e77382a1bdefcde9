"""The least that makes steps: torch, one optimizer, nothing to train and nobody to wait for."""

import time

import torch

optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
while True:
    optimizer.step()
    time.sleep(0.02)
