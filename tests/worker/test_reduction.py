"""The gradient of a global batch is the same, whoever computes its parts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from elasticd.channel.worker_messages import Enter
from elasticd.core.thread_activity import ActivityKind, Frame, activity_of
from elasticd.data.dealing import Portion, parts_of
from elasticd.worker.gradients import buckets
from elasticd.worker.gradients.consistent import ConsistentReduction
from elasticd.worker.gradients.reduction import AveragedReduction
from elasticd.worker.gradients.wrapping import Wrap, WrappedModels, data_parallel
from elasticd.worker.world.group import World
from tests.worker.worlds import in_world

BATCHES = [24, 24, 5, 1]  # the last batches are too short for all workers


class Net(nn.Module):
    def __init__(self, *, buffers: bool, unused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40).eval() if buffers else nn.Identity()
        self.last = nn.Linear(40, 1)
        self.unused = nn.Linear(3, 3) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))).squeeze(-1)


def wrapped_models(nets: dict[str, nn.Module], wrap: Wrap | None) -> WrappedModels:
    models = WrappedModels(nets, [*nets], wrap)
    models.enter(None)
    return models


def gradients(kind: dict[str, bool], wrapped: bool, accumulate: int) -> tuple[list[list[float]], int]:
    """Return the gradients of each batch, and how often gradients were sent."""
    torch.manual_seed(3)
    net = Net(**kind).double()
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = 0

    def wrap(net: nn.Module) -> nn.Module:
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
        return model

    models = wrapped_models({"model": net}, wrap if wrapped else None)
    model = models["model"]
    reduction = AveragedReduction(models)
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


def this_world() -> World:
    """Return the process group of ``in_world``, with its store, as a World."""
    env = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    world = World(Enter(1, {**env, "MASTER_ADDR": "", "MASTER_PORT": "0"}))
    world._store = dist.PrefixStore("round", c10d._get_default_store())
    return world


def several_parts_of(samples: int) -> list[Portion]:
    """Return the parts of this worker in a batch that is cut into two virtual ranks of two parts each. One of
    three workers has none."""
    return parts_of(dist.get_rank(), dist.get_world_size(), samples=samples, virtual_ranks=2, accumulate=2)


def gradients_of_several(turning: bool) -> list[float]:
    torch.manual_seed(3)
    nets = {name: nn.Linear(1, 1, bias=False).double() for name in "ab"}
    models = wrapped_models(nets, data_parallel)
    reduction = AveragedReduction(models, world=this_world())
    models.before_forward = reduction.calls
    x = torch.arange(8, dtype=torch.float64).reshape(8, 1)
    reduction.begin(lambda: 1)
    for number, part in enumerate(parts := several_parts_of(8)):
        with reduction.part(part):
            mine = x[part.samples.start : part.samples.stop]
            order = "ba" if turning and number % 2 else "ab"
            y = {name: models[name](mine) for name in order}
            reduction.backward(y["a"].mean() + 100 * y["b"].mean(), part)
    reduction.finish(parts)
    return [net.weight.grad.item() for net in nets.values()]


@pytest.mark.parametrize("turning", [False, True], ids=["the same", "another in the last part"])
def test_a_worker_without_a_part_adds_up_in_the_order_of_the_calls_of_the_last_part(tmp_path, turning):
    for found in in_world(3, tmp_path, gradients_of_several, turning):
        assert found == pytest.approx([3.5, 350])


def steps_without_a_sum(steps: int) -> tuple[list[list[str]], bool]:
    """Return the models that a worker without a part hears of, by step, once the last worker has made all
    steps. Also return whether the store still has the models of the last step."""
    world = this_world()
    models = wrapped_models({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}, lambda model: model)
    reduction = AveragedReduction(models, world=world)
    heard = []
    if parts := parts_of(world.rank, world.size, samples=2, virtual_ranks=1):
        for _ in range(steps):
            reduction.begin(lambda: 2)
            with reduction.part(parts[0]):
                for name in "ab":
                    reduction.calls(name)
                reduction.backward(torch.zeros((), requires_grad=True), parts[0])
        world.set_value("all steps are made", "")
    else:
        world.wait_for_value("all steps are made")
        for _ in range(steps):
            reduction.begin(lambda: 2)
            assert reduction._order is not None
            heard.append(list(reduction._order.names()))
    dist.barrier()
    return heard, world._store.check(["call 0 of 0"])


def test_a_worker_without_a_part_hears_of_all_calls_however_far_the_others_are(tmp_path):
    first, second, last = in_world(3, tmp_path, steps_without_a_sum, 3)
    assert first == second == ([["a", "b"]] * 3, False)
    assert last == ([], False)


def test_a_worker_that_waits_for_another_ranks_call_is_seen_to_wait_and_not_to_sleep():
    wait = World.wait_for_value.__code__
    frames = [
        Frame(wait.co_filename, wait.co_firstlineno, wait.co_name),
        Frame("/home/me/job.py", 40, "main"),
    ]
    activity = activity_of(frames)
    assert activity is not None and activity.kind is ActivityKind.COLLECTIVE


def calls_in_consistent_mode(samples: int, virtual_ranks: int) -> list[str]:
    """Return the order in which this rank begins to communicate in a step."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    begun = []
    start, broadcast = buckets._start, dist.broadcast

    def exchanged(*ways: Any) -> Any:
        begun.append("exchange")
        return start(*ways)

    def broadcasted(*args: Any, **options: Any) -> Any:
        begun.append("broadcast")
        return broadcast(*args, **options)

    buckets._start, dist.broadcast = exchanged, broadcasted
    reduction = ConsistentReduction([model], virtual_ranks, 0, lambda: (0, 0))
    parts = parts_of(dist.get_rank(), dist.get_world_size(), samples=samples, virtual_ranks=virtual_ranks)
    x = torch.randn(samples, 4)
    reduction.begin(lambda: 0)
    for part in parts:
        with reduction.part(part):
            mine = x[part.samples.start : part.samples.stop]
            reduction.backward(model(mine).square().mean(), part)
    reduction.finish(parts)
    return begun


def test_all_ranks_communicate_in_one_order_as_nccl_needs_it_also_those_without_a_part(tmp_path):
    orders = in_world(3, tmp_path, calls_in_consistent_mode, 4, 2)
    assert "broadcast" in orders[0] and orders[0] == orders[1] == orders[2]
