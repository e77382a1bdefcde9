"""Makes an optimizer's step in each round, and fails before the commit."""

import torch

from elasticd import worker

model = torch.nn.Linear(4, 4)


@worker.run
def train(state: worker.State) -> None:
    for _ in state.steps(100):
        state.model(torch.randn(2, 4)).sum().backward()
        state.optimizer.step()
        raise ValueError("the loss is not a number")


train(worker.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
