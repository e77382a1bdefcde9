"""Train with local SGD or DiLoCo: workers train apart, and meet once in many steps.

    elasticd run --min 2 --max 8 workers/local_sgd.py
    torchrun --standalone --nproc-per-node 2 workers/local_sgd.py --method average
    python workers/local_sgd.py                    # one process, no launcher

**When**: links between the workers are slow, or some workers are slower or lost more often than others,
and the model fits on one device.

**How**: each worker takes ``--inner-steps`` steps of AdamW on its own copy of the model. Then the workers
average how far their copies have moved, and an outer optimizer moves the common weights that way: DiLoCo
with Nesterov momentum, local SGD ("average") all the way. The next copies begin at the common weights.

**Cost**: each worker keeps a second copy of the weights, and the outer momentum. Copies that train apart
for long make less of each sample: compare the held-out loss with ddp.py's. The program prints the bytes
that it sent, and those that DistributedDataParallel would have sent in as many steps.

**When a worker dies**: its steps since the last meeting are lost. The other workers lose nothing: their
copies belong to no world, so they go on from the step they were at, and notice the loss at the next
meeting. The replacement joins after it, and begins at the common weights. A slow worker delays the others
at a meeting only.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from digits import network, options_parser, quality, read_digits, say
from elasticd import worker
from gpt import positive

OUTER = {  # the learning rate and the momentum
    "average": (1.0, 0.0),
    "diloco": (0.7, 0.6),  # 0.9 in the paper, of far more data: these few images are learned by heart with it
}


class Copy:
    """This worker's own copy of the model, which trains apart. It outlives worlds, so it is in no State.

    ``round``: the meetings before it set off. ``steps``: its steps since. ``sent``: bytes, of this worker.
    """

    def __init__(self, common: nn.Module, data: TensorDataset, options: argparse.Namespace) -> None:
        self.round, self.steps, self.sent = -1, 0, 0
        self._model, self._options = copy.deepcopy(common), options
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=options.lr)
        self._images, self._labels = (tensor.to(worker.device()) for tensor in data.tensors)
        self._random = torch.Generator()

    def set_off(self, state: worker.State) -> None:
        """Begin at the common weights, unless this copy is under way from them already."""
        if self.round < 0:  # each process draws samples of its own
            self._random.manual_seed(hash((self._options.seed, state.step, worker.rank())))
        if self.round != state.step:
            self.round, self.steps = state.step, 0
            self._model.load_state_dict(state.model.state_dict())

    def take_step(self) -> None:
        batch = torch.randint(len(self._labels), (self._options.batch,), generator=self._random)
        loss = F.cross_entropy(self._model(self._images[batch]), self._labels[batch])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.steps += 1

    def meet(self, common: nn.Module) -> None:
        """Give the common weights a gradient: how far the copies have moved away from them, on average."""
        pairs = list(zip(common.parameters(), self._model.parameters(), strict=True))
        moved: Tensor = torch.cat([(was - now).detach().flatten() for was, now in pairs])  # one message
        if worker.world_size() > 1:
            dist.all_reduce(moved)
            self.sent += moved.nbytes
        moved /= worker.world_size()
        for (was, _), part in zip(pairs, moved.split([was.numel() for was, _ in pairs]), strict=True):
            was.grad = part.view_as(was)


@worker.run
def train(state: worker.State, mine: Copy, held_out: TensorDataset, options: argparse.Namespace) -> None:
    """Train. Called again after each change of world; ``state.step`` counts meetings."""
    if mine.round == state.step:
        say(f"goes on after {mine.steps} of {options.inner_steps} steps of its own")
    for _ in state.steps(options.meetings):
        mine.set_off(state)
        while mine.steps < options.inner_steps:
            mine.take_step()
        mine.meet(state.model)
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit()
        steps = state.step * options.inner_steps
        say(f"meeting {state.step:>4}, step {steps:>5}  {worker.world_size()} workers")
    say(quality(state.model, held_out))


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--method", choices=OUTER, default="diloco")
    parser.add_argument("--meetings", type=positive, default=20)
    parser.add_argument("--inner-steps", type=positive, default=100, help="of each worker, between meetings")
    parser.add_argument("--batch", type=positive, default=32, help="images a step of each worker")
    options = parser.parse_args()
    data, held_out = read_digits()
    common = network(options.seed).to(worker.device())
    rate, momentum = OUTER[options.method]
    outer = torch.optim.SGD(common.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    # wrap=None: nothing adds gradients up in each step. undo=True: a copy at each meeting, which are rare.
    state = worker.State(model=common, optimizer=outer, wrap=None, undo=True)
    mine = Copy(common, data, options)
    train(state, mine, held_out, options)
    each_step = sum(p.nbytes for p in common.parameters())
    ddp = each_step * options.meetings * options.inner_steps
    say(f"sent for the sums: {mine.sent / 1e6:.1f} MB; DistributedDataParallel: {ddp / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
