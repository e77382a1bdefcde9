"""A training of two modules. The script calls one of them without State's wrapper, so its weights differ from
worker to worker."""

import torch

from elasticd import worker

torch.manual_seed(0)
model, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)


@worker.run
def train(state: worker.State) -> None:
    for _ in state.steps(200):
        optimizer.zero_grad()
        head(state.model(torch.ones(8, 4) * (1 + worker.rank()))).square().mean().backward()
        optimizer.step()
        state.commit()


train(worker.State(model=model, head=head, optimizer=optimizer))
