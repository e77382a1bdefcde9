"""Copies from a GPU beside the training, and saves made of such copies, with a stand-in for the GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elasticd.checkpoint.client.gpu_copy import GpuCopier, GpuEvent, offload, stepped
from elasticd.checkpoint.client.state_dict import flatten
from elasticd.checkpoint.shared_memory import Memory
from elasticd.worker.checkpoints import Checkpoints
from tests.checkpoint.conftest import assert_same, tensors_of, training


@dataclass(eq=False)
class Copy:
    """A requested copy. It is made once the training calls something that waits for the copy, or by
    ``run``."""

    into: Sequence[torch.Tensor]
    sources: Sequence[torch.Tensor]
    done: threading.Event = field(default_factory=threading.Event)
    device: None = None

    def run(self) -> None:
        if not self.done.is_set():
            torch._foreach_copy_(self.into, self.sources)
        self.done.set()

    def synchronize(self) -> None:
        assert self.done.wait(60.0)


class Lazy(GpuCopier):
    """Makes each copy as late as possible."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0

    def copy(self, into: list[torch.Tensor], sources: list[torch.Tensor]) -> Copy:
        self.copies.append(Copy(into, sources))
        return self.copies[-1]

    def wait_on_gpu(self, event: Copy) -> None:
        for copy in self.copies[: self.copies.index(event) + 1]:
            copy.run()

    def wait(self, event: GpuEvent) -> None:
        event.synchronize()

    def pin(self, memory: Memory) -> None:
        """Do nothing: pinned memory would not be faster here."""


@pytest.fixture
def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad
def begin(gpu: Lazy, state: dict) -> tuple:
    flat = flatten(state)
    lasting = stepped(state, flat)
    into = {key: torch.zeros_like(t) for key, t in flat.tensors.items()}
    before = {key: t.clone() for key, t in flat.tensors.items()}
    copied = offload(gpu, list(into.values()), list(flat.tensors.values()), [k in lasting for k in into])
    assert copied is not None
    return copied, into, before


def test_a_late_copy_has_the_values_of_the_save_and_the_next_step_waits_for_it(trained):
    model, optimizer = trained
    copied, into, before = begin(gpu := Lazy(), {"model": model, "optimizer": optimizer})
    model(torch.randn(8, 4)).sum().backward()  # the forward pass changes the batch norm's buffers
    assert not copied.done() and torch.equal(into["model.1.running_mean"], before["model.1.running_mean"])
    assert not into["model.0.weight"].any(), "parameters are not copied yet"
    optimizer.step()
    assert copied.result(60.0) == ""
    assert all(torch.equal(into[key], before[key]) for key in before)
    assert not torch.equal(model[0].weight, before["model.0.weight"]) and gpu.copies[-1].done.is_set()


def test_what_a_script_changes_by_itself_before_it_was_copied_fails_that_save(trained):
    model, optimizer = trained
    copied, _, _ = begin(gpu := Lazy(), {"model": model, "optimizer": optimizer})
    with torch.no_grad():
        model[0].weight.clamp_(max=0.1)
    gpu.copies[-1].run()
    assert "changed before they were copied" in copied.result(60.0)


def test_a_change_by_the_script_before_the_optimizer_steps_is_noticed(trained):
    model, optimizer = trained
    copied, _, _ = begin(Lazy(), {"model": model, "optimizer": optimizer})
    with torch.no_grad():
        model[0].weight.clamp_(max=0.1)
    optimizer.step()
    assert "changed before they were copied" in copied.result(60.0)


def test_only_what_optimizers_of_the_state_step_is_copied_late(trained):
    model, optimizer = trained
    average = torch.nn.Linear(4, 4)
    late = stepped(s := {"model": model, "optimizer": optimizer, "average": average}, flatten(s))
    assert {"model.0.weight", "optimizer.state.0.weight.exp_avg"} <= late
    assert not {"model.1.running_mean", "average.weight"} & late
    for group in optimizer.param_groups:
        group["capturable"] = True  # the optimizer may step within a CUDA graph
    assert not stepped(s, flatten(s))


def test_memory_that_cannot_be_pinned_leaves_no_error_behind_for_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[int] = []  # CUDA's last error, which torch asks for after each kernel

    def refuse(*_: int) -> int:
        kept.append(2)
        return 2

    def launch(*_: object, device: str) -> None:
        assert device == "cuda"
        if kept:
            kept.clear()
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=refuse))
    monkeypatch.setattr(torch, "ones", launch)
    GpuCopier().pin(Memory.make(4096))
    assert not kept


def test_the_gpu_that_waits_and_is_waited_for_is_the_one_that_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    second = torch.device("cuda", 1)
    used: list[object] = []

    @contextlib.contextmanager
    def device(which: torch.device) -> Iterator[None]:
        used.append(which)
        yield
        used.append("back")

    stream = SimpleNamespace(wait_event=lambda _: used.append("held"))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda which: used.append(which) or stream)
    event = SimpleNamespace(device=second, synchronize=lambda: used.append("waited"))
    GpuCopier().wait_on_gpu(event)
    GpuCopier().wait(event)
    assert used == [second, "held", second, "waited", "back"]


# ------------------------------------------------------------ saves


@pytest.fixture
def lazy(opened: Callable[..., Checkpoints]) -> tuple[Checkpoints, Lazy]:
    checkpoints = opened()
    checkpoints._gpu = gpu = Lazy()
    return checkpoints, gpu


def train(state: dict[str, Any]) -> None:
    state["model"](torch.randn(4, 96)).square().sum().backward()
    state["optimizer"].step()


def test_a_save_is_of_its_step_though_training_goes_on_before_it_is_copied(lazy, opened):
    checkpoints, _ = lazy
    state = training(1)
    expected = tensors_of(state)
    assert checkpoints.save(state, 1)
    train(state)
    assert checkpoints.wait() and not checkpoints.failed, checkpoints.last_error
    found = training(7)
    assert opened().load(found) == 1
    assert_same(found, expected)


def test_a_save_that_the_script_spoils_fails_and_the_next_does_not(lazy, opened):
    checkpoints, gpu = lazy
    state = training(1)
    assert checkpoints.save(state, 1)
    with torch.no_grad():
        state["model"][0].weight.zero_()
    for copy in gpu.copies:
        copy.run()
    assert checkpoints.wait() and "changed before they were copied" in checkpoints.last_error
    assert checkpoints.save(state, 2)
    train(state)
    assert checkpoints.wait() and checkpoints.failed == 1
    assert opened().load(training(7)) == 2


def test_a_save_of_another_shape_waits_for_the_copy_of_the_one_before(lazy, opened):
    checkpoints, gpu = lazy
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    assert checkpoints.save(state, 0)  # without AdamW's state
    with torch.no_grad():
        model.weight.grad, model.bias.grad = torch.ones(4, 4), torch.ones(4)
    optimizer.step()  # waits for the copy on the GPU, and the saver hears of the copy later
    assert checkpoints.save(state, 1)
    for copy in gpu.copies:
        copy.run()
    assert checkpoints.wait() and not checkpoints.failed, checkpoints.last_error
    assert checkpoints.newest.step == 1
