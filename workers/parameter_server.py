"""Train asynchronously with a parameter server: no worker waits for another, and gradients come late.

    elasticd run --min 2 --max 8 workers/parameter_server.py
    torchrun --standalone --nproc-per-node 3 --max-restarts 5 workers/parameter_server.py
    python workers/parameter_server.py             # one process, no launcher

**When**: seldom. It is here to compare with: workers of very unequal speed are all used fully. Where
links are slow, local_sgd.py sends far less; where workers are equal, ddp.py learns more from each sample.

**How**: rank 0 keeps the weights. Each worker computes a gradient, sends it there, and gets the weights as
they are by then. Rank 0 applies a gradient as it comes, and trains itself as well.

**Cost**: a gradient is of weights that others have changed meanwhile. The program prints how many changes
late the gradients were: about one less than there are workers. Late gradients want a smaller learning
rate. All traffic goes through rank 0: twice the model's size for each step of each worker. No two runs
are the same.

**When a worker dies**: all workers start again, in a world of any size, and load rank 0's last snapshot,
which is at most ``--snapshot-every`` gradients old. Give ``--snapshot-dir`` on a disk that all nodes
share: rank 0 may be lost with its node. If a launcher replaced other workers alone, only their gradient
under way would be lost; the loss of rank 0 would stop all of them in any case.
"""

from __future__ import annotations

import argparse
import copy
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from digits import network, options_parser, quality, read_digits, say
from gpt import positive
from restarting import add_snapshot_dir, join_world, leave, load_snapshot, run, save_snapshot

Exchange = Callable[[Tensor, int], tuple[Tensor, int]]


class Server:
    """The weights, and all that changes them. ``version``: the number of gradients applied. ``late``: of each
    of them since the start, how many others were applied while it was computed."""

    def __init__(self, model: nn.Module, options: argparse.Namespace, folder: Path | None) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
        self.version, self.late = 0, list[int]()
        self._options, self._folder, self._lock = options, folder, threading.Lock()

    def exchange(self, gradient: Tensor, of_version: int) -> tuple[Tensor, int]:
        """Apply a gradient of the weights of that version. Return the present weights and their version."""
        options = self._options
        with self._lock:
            if self.version < options.gradients:
                parameters = list(self.model.parameters())
                for parameter, part in zip(
                    parameters, gradient.split([p.numel() for p in parameters]), strict=True
                ):
                    parameter.grad = part.view_as(parameter).to(parameter.device)
                self.optimizer.step()
                self.late.append(self.version - of_version)
                self.version += 1
                if self._folder is not None and self.version % options.snapshot_every == 0:
                    parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
                    save_snapshot(self._folder, {"step": self.version, **parts})
                if self.version % options.log_every == 0:
                    late = sum(self.late) / len(self.late)
                    say(f"gradient {self.version:>5}  {late:.2f} changes late on average")
            return parameters_to_vector(self.model.parameters()).detach().cpu(), self.version

    def serve(self, group: dist.ProcessGroup, size: int) -> None:
        """Answer the other workers, until each knows that training is over."""
        training = dist.get_world_size() - 1
        # a gradient, and the version of the weights for which it was computed
        message = torch.empty(size + 1)
        while training:
            source = dist.recv(message, group=group)
            weights, version = self.exchange(message[:-1], int(message[-1]))
            dist.send(torch.cat((weights, torch.tensor([float(version)]))), source, group=group)
            if version >= self._options.gradients:
                training -= 1


def ask_server(group: dist.ProcessGroup) -> Exchange:
    """Return ``Server.exchange`` for a worker other than rank 0."""

    def exchange(gradient: Tensor, of_version: int) -> tuple[Tensor, int]:
        message = torch.cat((gradient, torch.tensor([float(of_version)])))
        dist.send(message, 0, group=group)
        dist.recv(message, 0, group=group)
        return message[:-1], int(message[-1])

    return exchange


def train(
    model: nn.Module, version: int, exchange: Exchange, device: torch.device, options: argparse.Namespace
) -> None:
    """Compute gradients of the newest weights this worker knows, until enough gradients are applied."""
    images, labels = (tensor.to(device) for tensor in read_digits()[0].tensors)
    random = torch.Generator().manual_seed(hash((options.seed, version, dist.get_rank())))
    while version < options.gradients:
        batch = torch.randint(len(labels), (options.batch,), generator=random)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        weights, version = exchange(parameters_to_vector(gradient).cpu(), version)
        vector_to_parameters(weights.to(device), model.parameters())


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--gradients", type=positive, default=1500, help="to apply in all")
    parser.add_argument("--batch", type=positive, default=32, help="images a gradient")
    add_snapshot_dir(parser, "parameter_server")
    parser.add_argument("--snapshot-every", type=positive, default=200, metavar="GRADIENTS")
    options = parser.parse_args()
    device, local_rank = join_world()
    group = dist.new_group(backend="gloo")  # messages are on the CPU, and rank 0 takes them from anybody
    model = network(options.seed).to(device)
    folder: Path | None = options.snapshot_dir
    server = Server(model, options, folder if dist.get_rank() == 0 else None)
    snapshot = load_snapshot(folder, local_rank, device)
    if snapshot is not None:
        server.model.load_state_dict(snapshot["model"])
        server.optimizer.load_state_dict(snapshot["optimizer"])
        server.version = snapshot["step"]
    say(f"{dist.get_world_size()} workers, {server.version} gradients applied")

    own, size = copy.deepcopy(model), parameters_to_vector(model.parameters()).numel()
    if dist.get_rank() == 0:
        serving = threading.Thread(target=server.serve, args=(group, size), daemon=True)
        serving.start()
        train(own, server.version, server.exchange, device, options)
        serving.join()
    else:
        train(own, server.version, ask_server(group), device, options)
    for parameter in server.model.parameters():
        dist.broadcast(parameter.data, 0)  # the server's, after the last gradient
    say(quality(server.model, read_digits()[1]))


if __name__ == "__main__":
    leave(run("parameter_server", main))
