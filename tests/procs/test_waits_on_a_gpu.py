"""How long a GPU waits for other ranks at the end of a real backward pass of DistributedDataParallel, with
a simulated GPU clock. tests/gpu uses a real one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elasticd.procs.page import BOOT_DIR
from tests.procs.fakecuda import Cuda, OnGpu

GPU = torch.device("cpu")  # the devices where the parameters really are


def optimizer_of(*parameters: torch.nn.Parameter) -> Any:
    return SimpleNamespace(param_groups=[{"params": parameters}])


class Job:
    """One rank's training. ``late_ms``: how late the gradients of other ranks reach its GPU. ``lost``: one of
    the other ranks is lost, which is noticed when its gradients are awaited."""

    def __init__(self, waits: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits, self.cuda = waits, cuda
        self.late_ms, self.lost = 0.0, False
        model = torch.nn.Linear(4, 1)
        for name in ("weight", "bias"):
            setattr(model, name, OnGpu(getattr(model, name).detach()))
        self.wrapped = torch.nn.parallel.DistributedDataParallel(model)
        self.wrapped.register_comm_hook(None, self._add_up)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "cuda", cuda)
            waits.follow(optimizer_of(*model.parameters()))

    def _add_up(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self.cuda.stream.wait(self.late_ms))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_exception(RuntimeError("lost a peer")) if self.lost else future.set_result(bucket.buffer())
        return future

    _add_up.__annotations__.clear()  # torch checks devices, and these are strings

    def backward(self, late_ms: float = 0.0) -> None:
        self.late_ms = late_ms
        self.wrapped(torch.ones(2, 4)).sum().backward()

    @property
    def told(self) -> tuple[int, int]:
        """Return how often and for how many ms the GPU has waited, as far as that is known."""
        self.waits.catch_up()
        return self.waits.count, self.waits.total_ns // 1_000_000


@pytest.fixture
def cuda() -> Cuda:
    return Cuda(GPU)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BOOT_DIR)
    return importlib.import_module("elasticd_waits").Waits()


@pytest.fixture
def job(waits: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Job(waits, cuda, monkeypatch)
    finally:
        dist.destroy_process_group()


def test_what_a_gpu_waits_for_others_is_known_once_it_has_come_by_and_not_waited_for(job: Job) -> None:
    job.backward(late_ms=30)
    job.backward(late_ms=5)
    assert job.told == (0, 0), "the program is ahead of its GPU"
    job.cuda.stream.run(marks=3)
    assert job.told == (1, 30), "and the second wait has not ended"
    job.cuda.stream.run()
    assert job.told == (2, 35)
    for _ in range(20):
        job.backward(late_ms=1)
        job.cuda.stream.run()
        assert job.told
    assert job.told == (22, 55) and job.cuda.made == 4, "marks are used again"


def test_a_pass_that_adds_nothing_up_has_not_waited_and_one_that_fails_does_not_count(job: Job) -> None:
    with job.wrapped.no_sync():
        job.backward(late_ms=30)
    job.cuda.stream.run()
    assert job.told == (1, 0)
    job.lost = True
    with pytest.raises(RuntimeError, match="lost a peer"):
        job.backward(late_ms=30)
    job.lost = False
    job.cuda.stream.wait(1000)  # for the workers that take their place
    job.backward(late_ms=7)
    job.cuda.stream.run()
    assert job.told == (2, 7)


def test_a_graph_that_is_captured_is_neither_marked_nor_spoilt(job: Job) -> None:
    job.backward(late_ms=7)
    job.cuda.stream.capturing = True
    job.backward(late_ms=30)
    assert job.told == (0, 0) and not job.cuda.stream.spoilt
    job.cuda.stream.capturing = False
    job.cuda.stream.run()
    job.backward(late_ms=8)
    job.cuda.stream.run()
    assert job.told == (2, 15)


@pytest.mark.parametrize(
    "call", ["is_current_stream_capturing", "Event", "current_stream", "record", "query", "elapsed_time"]
)
def test_after_a_failed_call_of_cuda_training_goes_on_and_waits_are_no_longer_measured(
    job: Job, call: str
) -> None:
    job.cuda.breaks = call
    for _ in range(3):
        job.backward(late_ms=30)
        job.cuda.stream.run()
        assert job.told == (0, 0)
    calls = job.cuda.calls
    job.backward()
    assert job.told == (0, 0) and job.cuda.calls == calls


def test_of_a_gpu_that_does_not_answer_no_more_is_kept_than_a_few(job: Job) -> None:
    for _ in range(300):
        job.backward(late_ms=1)
    assert job.cuda.made == 2 * 256
    job.cuda.stream.run()
    assert job.told == (0, 0), "what lacks some would make this worker seem slow"


def test_cuda_is_not_used_for_it_where_nothing_else_does(
    waits: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.in_use = False
    parameter = OnGpu(torch.ones(2))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "cuda", cuda)
        waits.follow(optimizer_of(parameter))
    parameter.sum().backward()
    assert cuda.calls == 0 and not parameter._post_accumulate_grad_hooks


def test_a_second_gpu_of_the_same_process_is_let_be(
    waits: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = OnGpu(torch.ones(2)), OnGpu(torch.ones(2, device="meta"))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "cuda", cuda)
        for parameter in (here, there):
            waits.follow(optimizer_of(parameter))
    assert here._post_accumulate_grad_hooks and not there._post_accumulate_grad_hooks
