"""Checkpoints of tensors on a GPU, which are copied through pinned memory while training goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticd.checkpoint.client.gpu_copy import GpuCopier
from elasticd.checkpoint.shared_memory import Memory
from elasticd.telemetry.gpus import Gpus
from tests.checkpoint.conftest import assert_same, tensors_of

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
CYCLES = 4_000_000_000  # cycles of the GPU's clock: two seconds, far longer than a save takes


def training_on_gpu(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.BatchNorm1d(4096)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    state = {"model": model, "optimizer": optimizer, "position": seed}
    step(state)
    return state


def step(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.randn(8, 1024, device="cuda")).square().sum().backward()
    state["optimizer"].step()


def keep_busy() -> torch.cuda.Event:
    """Let the GPU be busy first. Return what happens once that is over."""
    over = torch.cuda.Event()
    torch.cuda._sleep(CYCLES)
    over.record()
    return over


def test_a_save_waits_for_no_gpu_and_is_of_its_step_though_the_next_is_asked_for_already(opened: Any) -> None:
    checkpoints = opened()
    state = training_on_gpu(1)
    assert checkpoints.save(state, 1) and checkpoints.wait()
    plan = checkpoints._plan
    for number in (2, 3):
        step(state)
        assert checkpoints.save(state, number) and checkpoints.wait()
    assert len(plan.buffers) == 2 and all(into.is_pinned() for b in plan.buffers for into in b.into)
    expected = tensors_of(state)
    torch.cuda.synchronize()
    busy = keep_busy()
    assert checkpoints.save(state, 4)
    step(state)
    assert not busy.query() and not plan.copy_done.done(), "the GPU has not come to it yet"
    assert checkpoints.wait(120) and not checkpoints.failed, checkpoints.last_error
    found = training_on_gpu(7)
    assert opened().load(found) == 4
    assert_same(found, expected)
    assert not torch.equal(tensors_of(state)["model.0.weight"], expected["model.0.weight"])


def test_a_save_that_the_script_spoils_before_it_is_copied_fails_and_the_next_does_not(opened: Any) -> None:
    checkpoints = opened()
    state = training_on_gpu(1)
    assert checkpoints.save(state, 1) and checkpoints.wait()
    keep_busy()
    assert checkpoints.save(state, 2)
    with torch.no_grad():
        state["model"][0].weight.zero_()
    assert checkpoints.wait(120) and "changed before they were copied" in checkpoints.last_error
    assert checkpoints.save(state, 3)
    step(state)
    assert checkpoints.wait(120) and checkpoints.failed == 1
    assert opened().load(training_on_gpu(7)) == 3


def test_what_fsdp2_has_on_the_gpu_is_saved_while_it_is_busy(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "sharded.py"), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and "all as it was" in done.stdout, done.stderr


def test_pinned_memory_is_unpinned_when_freed_and_a_refusal_raises_no_error() -> None:
    gpu, memory = GpuCopier(), Memory.make(1 << 20)
    torch.ones(1, device="cuda")
    image = torch.frombuffer(memory.map, dtype=torch.uint8)
    gpu.pin(memory)
    assert image.is_pinned()
    gpu.pin(memory)  # a second copy, which CUDA refuses
    assert torch.ones(1, device="cuda").item() == 1.0
    del memory
    assert not image.is_pinned()


def test_nvml_knows_the_gpu_that_cuda_has() -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py, which elasticd's extra `gpu` installs")
    properties = torch.cuda.get_device_properties(0)
    gpus = Gpus.open()
    assert gpus is not None
    for named in ("0", f"GPU-{properties.uuid}"):
        reading = gpus.read([named])[0]
        assert reading.memory_size is not None and reading.memory_used is not None
        assert abs(reading.memory_size - properties.total_memory) < 0.05 * properties.total_memory
        assert not reading.xids and not reading.lost
