"""Train with local SGD or DiLoCo: workers train apart, and meet once in many steps.

    elasticd run --min 2 --max 8 workers/local_sgd.py
    torchrun --standalone --nproc-per-node 2 workers/local_sgd.py --method average
    python workers/local_sgd.py                    # one process, no launcher

**When**: links between the workers are slow, or some workers are slower or lost more often than others,
and the model fits on one device.

**How**: each worker takes ``--inner-steps`` steps of AdamW on its own copy of the model. Then the workers
average how far their copies have moved, and an outer optimizer moves the common weights that way: DiLoCo
with Nesterov momentum, local SGD ("average") all the way. The next copies begin at the common weights.

**Fragments**: with ``--fragments N`` each part of the model has meetings of its own, N times as often in
all, so that no meeting sends more than its part. A part is under way while the copies train on, up to the
next part's turn. A copy then takes the mean of the common weights and its own. This is Streaming DiLoCo
(arXiv 2501.18512), without its compression.

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
from collections.abc import Callable

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
    # The paper has a momentum of 0.9, for far more data. These few images are learned by heart with it.
    "diloco": (0.7, 0.3),
}


def fragments(model: nn.Sequential, count: int) -> list[list[nn.Parameter]]:
    """Return the parameters in ``count`` parts, with every ``count``-th layer in each."""
    layers = [list(layer.parameters()) for layer in model if layer.state_dict()]
    return [[parameter for layer in layers[n::count] for parameter in layer] for n in range(count)]


class Copy:
    """This worker's own copy of the model, which trains apart. It outlives worlds, so it is in no State.

    ``round``: the meetings before it set off. ``steps``: its steps since, of ``apart`` until the next
    meeting. ``sent``: bytes, of this worker; ``most`` at a meeting.
    """

    def __init__(self, common: nn.Sequential, data: TensorDataset, options: argparse.Namespace) -> None:
        self.round, self.steps, self.sent, self.most = -1, 0, 0, 0
        self.apart = options.inner_steps // options.fragments
        self._model, self._options = copy.deepcopy(common), options
        parts = (fragments(model, options.fragments) for model in (common, self._model))
        self._fragments = [list(zip(was, now, strict=True)) for was, now in zip(*parts, strict=True)]
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=options.lr)
        self._images, self._labels = (tensor.to(worker.device()) for tensor in data.tensors)
        self._random = torch.Generator()

    @torch.no_grad()
    def set_off(self, state: worker.State) -> None:
        """Take over the common weights that the last meeting moved, unless this copy is under way already."""
        if self.round == state.step:
            return
        if self.round < 0:  # each process draws samples of its own
            self._random.manual_seed(hash((self._options.seed, state.step, worker.rank())))
        if len(self._fragments) > 1 and 0 <= self.round == state.step - 1:
            for was, now in self._fragment():
                now.lerp_(was, 0.5)  # the copy has trained on meanwhile
        else:
            self._model.load_state_dict(state.model.state_dict())
        self.round, self.steps = state.step, 0

    def take_steps(self) -> None:
        while self.steps < self.apart:
            batch = torch.randint(len(self._labels), (self._options.batch,), generator=self._random)
            loss = F.cross_entropy(self._model(self._images[batch]), self._labels[batch])
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self.steps += 1

    def meet(self) -> Callable[[], None]:
        """Begin to add up how far the copies have moved away from the common weights. Return a function that
        waits for the sum, and gives the common weights the mean as a gradient."""
        fragment = self._fragment()
        moved: Tensor = torch.cat([(was - now).detach().flatten() for was, now in fragment])  # one message
        work = dist.all_reduce(moved, async_op=True) if worker.world_size() > 1 else None

        def end() -> None:
            if work is not None:
                work.wait()
                self.sent += moved.nbytes
                self.most = max(self.most, moved.nbytes)
            parts = (moved / worker.world_size()).split([was.numel() for was, _ in fragment])
            for (was, _), part in zip(fragment, parts, strict=True):
                was.grad = part.view_as(was)

        return end

    def _fragment(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return the common weights that this round is about, and those of the copy."""
        return self._fragments[self.round % len(self._fragments)]


@worker.run
def train(state: worker.State, mine: Copy, held_out: TensorDataset, options: argparse.Namespace) -> None:
    """Train. Called again after each change of world; ``state.step`` counts meetings."""
    if mine.round == state.step:
        say(f"goes on after {mine.steps} of {mine.apart} steps of its own")
    for _ in state.steps(options.meetings * options.fragments):
        mine.set_off(state)
        if options.fragments == 1:
            mine.take_steps()
        end_meeting = mine.meet()
        mine.take_steps()  # with fragments: while a fragment is on its way
        end_meeting()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit()
        steps = state.step * mine.apart
        say(f"meeting {state.step:>4}, step {steps:>5}  {worker.world_size()} workers")
    say(quality(state.model, held_out))


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--method", choices=OUTER, default="diloco")
    parser.add_argument("--meetings", type=positive, default=20)
    parser.add_argument("--inner-steps", type=positive, default=100, help="of each worker, between meetings")
    parser.add_argument("--batch", type=positive, default=32, help="images a step of each worker")
    parser.add_argument("--fragments", type=positive, default=1, help="of the model, which meet in turn")
    options = parser.parse_args()
    common = network(options.seed).to(worker.device())
    if not all(fragments(common, options.fragments)):
        parser.error(f"{options.fragments} fragments: the model has fewer layers with weights")
    if options.inner_steps % options.fragments:
        parser.error(f"--inner-steps {options.inner_steps} is no multiple of --fragments {options.fragments}")
    data, held_out = read_digits()
    rate, momentum = OUTER[options.method]
    outer = torch.optim.SGD(common.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    # wrap=None: nothing adds gradients up in each step. undo=True: a copy at each meeting, which are rare.
    state = worker.State(model=common, optimizer=outer, wrap=None, undo=True)
    mine = Copy(common, data, options)
    train(state, mine, held_out, options)
    each_step = sum(p.nbytes for p in common.parameters())
    ddp = each_step * options.meetings * options.inner_steps
    sent = f"{mine.sent / 1e6:.1f} MB, {mine.most / 1e3:.0f} kB at once"
    say(f"sent for the sums: {sent}; DistributedDataParallel: {ddp / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
