"""The state of GPUs, with a stand-in for the library of NVIDIA's driver: no GPU is needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.telemetry.gpus import Gpus

pynvml = pytest.importorskip("pynvml")


@dataclass
class Nvml:
    """Two GPUs. ``mute``: questions that they do not answer. ``lost``: GPUs that have fallen off the bus:
    NVML answers no question about them, not even about their number and name. ``events``: events yet to be
    reported."""

    mute: set[str] = field(default_factory=set)
    reasons: int = 0
    events: list[tuple[str, int]] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)

    def __getattr__(self, name: str) -> Any:
        if name in self.mute:
            return self._refuse
        return getattr(pynvml, name)  # NVML's constants and errors

    def _refuse(self, *_: object) -> Any:
        raise pynvml.NVMLError_NotSupported

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if index > 1:
            raise pynvml.NVMLError_InvalidArgument
        return self.nvmlDeviceGetHandleByUUID(f"GPU-{index}")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid in self.lost:
            raise pynvml.NVMLError_GpuIsLost
        return uuid

    def answer(self, name: str, value: Any) -> Any:
        def about(handle: str, *_: object) -> Any:
            return self.nvmlDeviceGetHandleByUUID(handle) and value

        return self._refuse if name in self.mute else about

    def __post_init__(self) -> None:
        answers: dict[str, Any] = {
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=75),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3 << 30, total=80 << 30),
            "nvmlDeviceGetPowerUsage": 412_500,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetCurrentClocksThrottleReasons": self.reasons,
            "nvmlDeviceGetTotalEccErrors": 2,
        }
        for name, value in answers.items():
            setattr(self, name, self.answer(name, value))

    def nvmlEventSetCreate(self) -> set[str]:  # noqa: N802
        return self._refuse() if "nvmlEventSetCreate" in self.mute else set()

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: set[str]) -> None:  # noqa: N802
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        events.add(self.nvmlDeviceGetHandleByUUID(handle))

    def nvmlEventSetWait_v2(self, events: set[str], timeout_ms: int) -> Any:  # noqa: N802
        for told in self.events:
            if told[0] in events:
                self.events.remove(told)
                return SimpleNamespace(device=told[0], eventData=told[1])
        raise pynvml.NVMLError_Timeout


def test_each_slot_has_what_its_gpu_says_in_base_units() -> None:
    power = pynvml.nvmlClocksThrottleReasonSwPowerCap
    read = Gpus(Nvml(reasons=power)).read(["0", "GPU-1"])
    assert set(read) == {0, 1}
    one = read[0]
    assert (one.utilization, one.watts, one.celsius) == (0.75, 412.5, 61)
    assert (one.memory_used, one.memory_size) == (3 << 30, 80 << 30)
    assert one.throttled == {"power": True, "thermal": False, "hardware": False, "sync": False}
    assert one.ecc == {"corrected": 2, "uncorrected": 2}


def test_a_question_without_an_answer_leaves_the_others() -> None:
    mute = {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetUtilizationRates"}
    one = Gpus(Nvml(mute=mute)).read(["0"])[0]
    assert one.watts is None and one.utilization is None and one.ecc == {}
    assert one.celsius == 61


def test_a_slot_without_a_gpu_has_no_reading() -> None:
    assert set(Gpus(Nvml()).read(["0", "7", "nonsense"])) == {0}


def test_an_xid_error_is_told_once_by_the_slot_it_hit() -> None:
    nvml = Nvml(events=[("GPU-1", 79), ("GPU-1", 48), ("GPU-9", 13)])
    gpus = Gpus(nvml)
    read = gpus.read(["0", "1"])
    assert (read[0].xids, read[1].xids) == ((), (79, 48))
    assert gpus.read(["0", "1"])[1].xids == ()


def test_a_gpu_that_falls_off_the_bus_tells_so_and_silences_no_other() -> None:
    nvml = Nvml()
    gpus = Gpus(nvml)
    assert not any(reading.lost for reading in gpus.read(["0", "1"]).values())
    nvml.lost.add("GPU-0")
    nvml.events += [("GPU-0", 79), ("GPU-1", 48)]
    read = gpus.read(["0", "1"])
    assert (read[0].lost, read[0].xids, read[0].celsius) == (True, (79,), None)
    assert (read[1].lost, read[1].xids, read[1].celsius) == (False, (48,), 61)
    assert gpus.read(["0", "1"])[0].lost, "it stays so"


def test_a_gpu_that_was_lost_before_the_first_reading_is_reported() -> None:
    read = Gpus(Nvml(lost={"GPU-1"})).read(["0", "GPU-1"])
    assert read[1].lost and read[0].celsius == 61


def test_without_events_all_else_is_still_read() -> None:
    one = Gpus(Nvml(mute={"nvmlEventSetCreate"})).read(["0"])[0]
    assert one.xids == () and one.celsius == 61


def test_without_a_driver_there_is_nothing_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert Gpus.open() is None
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert Gpus.open() is None
