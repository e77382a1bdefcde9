"""What NVIDIA's management library says of the GPUs behind the slots. Where there is no driver or no
``nvidia-ml-py``, there is nothing to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

_REASONS = {
    "power": ("SwPowerCap", "HwPowerBrakeSlowdown"),
    "thermal": ("SwThermalSlowdown", "HwThermalSlowdown"),
    "hardware": ("HwSlowdown",),
    "sync": ("SyncBoost",),
}


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Of one GPU; None where it does not say. ``throttled``: whether its clock is held down, by what.
    ``ecc``: errors since the driver was loaded, by kind. ``xids``: XID errors since the last reading."""

    utilization: float | None = None
    memory_used: int | None = None
    memory_size: int | None = None
    celsius: int | None = None
    watts: float | None = None
    throttled: Mapping[str, bool] = field(default_factory=dict)
    ecc: Mapping[str, int] = field(default_factory=dict)
    xids: tuple[int, ...] = ()


# XID errors that speak of the GPU, its memory or its links, and not of the program that ran on it
# (13, 31, 43 and 45 do), as NVIDIA's catalogue of them has it.
_ITS_OWN = frozenset((48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 109, 119, 120, 136, 140, 143, 145, 155, 156))


def trouble(reading: GpuReading, spoilt_before: int) -> str:
    """What it tells of errors of its own, in a clause; empty for a GPU that is well. ``spoilt_before``: the
    uncorrected memory errors that it told of when the job came to it."""
    told = sorted(set(reading.xids) & _ITS_OWN)
    if told:
        return f"its driver reports XID {', '.join(map(str, told))}"
    spoilt = reading.ecc.get("uncorrected", 0) - spoilt_before
    return f"{spoilt} of its memory errors could not be corrected" if spoilt > 0 else ""


class Gpus:
    """The library, once it answers. All calls may take long where a GPU is broken."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._events: Any = None
        self._listening: set[str] = set()

    @classmethod
    def open(cls) -> Self | None:
        """None where there is no GPU of this maker, or nothing to ask it with."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        return cls(pynvml)

    def read(self, devices: Sequence[str]) -> dict[int, GpuReading]:
        """By slot: ``devices`` are theirs in order, as CUDA_VISIBLE_DEVICES names them."""
        handles: dict[int, Any] = {}
        for slot, device in enumerate(devices):
            with suppress(self._nvml.NVMLError, ValueError):
                handles[slot] = self._handle(device)
        xids = self._xids(handles)
        return {slot: self._read(handle, tuple(xids.get(slot, ()))) for slot, handle in handles.items()}

    def _handle(self, device: str) -> Any:
        if device.startswith(("GPU-", "MIG-")):
            return self._nvml.nvmlDeviceGetHandleByUUID(device)
        return self._nvml.nvmlDeviceGetHandleByIndex(int(device))

    def _read(self, handle: Any, xids: tuple[int, ...]) -> GpuReading:
        nvml = self._nvml
        used = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        ecc = {
            kind: self._ask(nvml.nvmlDeviceGetTotalEccErrors, handle, error, nvml.NVML_VOLATILE_ECC)
            for kind, error in (
                ("corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
                ("uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            )
        }
        return GpuReading(
            utilization=None if used is None else used.gpu / 100,
            memory_used=None if memory is None else memory.used,
            memory_size=None if memory is None else memory.total,
            celsius=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            watts=None if milliwatts is None else milliwatts / 1000,
            throttled={} if reasons is None else {k: bool(reasons & self._mask(k)) for k in _REASONS},
            ecc={kind: count for kind, count in ecc.items() if count is not None},
            xids=xids,
        )

    def _mask(self, kind: str) -> int:
        names = _REASONS[kind]
        return sum({getattr(self._nvml, f"nvmlClocksThrottleReason{name}") for name in names})

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        try:
            return question(*args)
        except self._nvml.NVMLError:  # many a GPU has no answer to many a question
            return None

    def _xids(self, handles: Mapping[int, Any]) -> dict[int, list[int]]:
        """Those that were told since the last call."""
        nvml = self._nvml
        found: dict[int, list[int]] = {}
        with suppress(nvml.NVMLError):
            if self._events is None:
                self._events = nvml.nvmlEventSetCreate()
            by_uuid: dict[str, int] = {}
            for slot, handle in handles.items():
                uuid = str(nvml.nvmlDeviceGetUUID(handle))
                by_uuid[uuid] = slot
                if uuid not in self._listening:
                    self._listening.add(uuid)
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
            while True:  # until there is none left, which is an error of its own
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                slot_of = by_uuid.get(str(nvml.nvmlDeviceGetUUID(event.device)))
                if slot_of is not None:
                    found.setdefault(slot_of, []).append(int(event.eventData))
        return found
