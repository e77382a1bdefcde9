"""The gradient of a global batch is the same, whoever computes its parts."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elasticd.data.dealing import parts_of
from elasticd.worker.gradients.reduction import Averaged
from tests.worker.worlds import in_world

BATCHES = [24, 24, 5, 1]  # the last are too short to reach all workers


class Net(nn.Module):
    def __init__(self, *, buffers: bool, unused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40).eval() if buffers else nn.Identity()
        self.last = nn.Linear(40, 1)
        self.unused = nn.Linear(3, 3) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))).squeeze(-1)


def gradients(kind: dict[str, bool], wrapped: bool, accumulate: int) -> tuple[list[list[float]], int]:
    """Of each batch; and how often gradients were sent."""
    torch.manual_seed(3)
    net = Net(**kind).double()
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = 0
    model = net
    if wrapped:
        model = DistributedDataParallel(
            net, init_sync=False, bucket_cap_mb=0.001, find_unused_parameters=kind["unused"]
        )

        def count(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            nonlocal sent
            sent += bucket.is_last()
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda f: f.value()[0] / world)

        count.__annotations__.clear()
        model.register_comm_hook(None, count)
    reduction = Averaged({"model": model})
    found = []
    for number, samples in enumerate(BATCHES):
        x = torch.randn(samples, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        parts = parts_of(rank, world, samples=samples, virtual_ranks=6, accumulate=accumulate)
        for part in parts:
            with reduction.part(part):
                loss = model(x[part.samples.start : part.samples.stop]).square().mean()
                reduction.backward(loss, part)
        reduction.finish(parts)
        found.append([v for p in net.parameters() if p.grad is not None for v in p.grad.flatten().tolist()])
        net.zero_grad()
    return found, sent


@pytest.mark.parametrize("kind", [(False, False), (True, False), (False, True)], ids=str)
def test_all_workers_have_the_gradient_of_the_global_batch_also_those_without_a_part(tmp_path, kind):
    how = {"buffers": kind[0], "unused": kind[1]}
    [(alone, _)] = in_world(1, tmp_path, gradients, how, False, 1)
    for found, sent in in_world(4, tmp_path, gradients, how, True, 2):
        assert sent == len(BATCHES), "once for each step, however many parts there are"
        for mine, reference in zip(found, alone, strict=True):
            assert mine == pytest.approx(reference, rel=1e-9, abs=1e-12)
