"""What NVIDIA's management library says of the GPUs behind the slots. Where there is no driver or no
``nvidia-ml-py``, there is nothing to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    ``ecc``: errors since the driver was loaded, by kind. ``xids``: XID errors since the last reading.
    ``lost``: the driver cannot reach it any more."""

    utilization: float | None = None
    memory_used: int | None = None
    memory_size: int | None = None
    celsius: int | None = None
    watts: float | None = None
    throttled: Mapping[str, bool] = field(default_factory=dict)
    ecc: Mapping[str, int] = field(default_factory=dict)
    xids: tuple[int, ...] = ()
    lost: bool = False


# XID errors that speak of the GPU, its memory or its links, and not of the program that ran on it
# (13, 31, 43 and 45 do), as NVIDIA's catalogue of them has it.
_ITS_OWN = frozenset((48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 109, 119, 120, 136, 140, 143, 145, 155, 156))


def trouble(reading: GpuReading, spoilt_before: int) -> str:
    """What it tells of errors of its own, in a clause; empty for a GPU that is well. ``spoilt_before``: the
    uncorrected memory errors that it told of when the job came to it."""
    told = sorted(set(reading.xids) & _ITS_OWN)
    if told:
        return f"its driver reports XID {', '.join(map(str, told))}"
    if reading.lost:
        return "its driver has lost it: it is off the bus, or hangs"
    spoilt = reading.ecc.get("uncorrected", 0) - spoilt_before
    return f"{spoilt} of its memory errors could not be corrected" if spoilt > 0 else ""


@dataclass(frozen=True, slots=True)
class _Gpu:
    """As it was found while it still answered: one that is lost is found no more. ``events``: a set that
    holds its own alone, so that it need not be asked whose they are; None if it tells of none."""

    handle: Any
    events: Any


class Gpus:
    """The library, once it answers. All calls may take long where a GPU is broken."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._found: dict[int, _Gpu] = {}

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
        readings: dict[int, GpuReading] = {}
        for slot, device in enumerate(devices):
            xids: tuple[int, ...] = ()
            try:
                if slot not in self._found:
                    self._found[slot] = self._find(device)
                xids = self._xids(self._found[slot])
                readings[slot] = self._read(self._found[slot].handle, xids)
            except self._nvml.NVMLError_GpuIsLost:
                readings[slot] = GpuReading(xids=xids, lost=True)
            except (self._nvml.NVMLError, ValueError):  # there is none of that name
                pass
        return readings

    def _find(self, device: str) -> _Gpu:
        nvml = self._nvml
        if device.startswith(("GPU-", "MIG-")):
            handle = nvml.nvmlDeviceGetHandleByUUID(device)
        else:
            handle = nvml.nvmlDeviceGetHandleByIndex(int(device))
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            events = None
        return _Gpu(handle, events)

    def _xids(self, gpu: _Gpu) -> tuple[int, ...]:
        """Those that were told since the last call."""
        told: list[int] = []
        try:
            while gpu.events is not None:
                told.append(int(self._nvml.nvmlEventSetWait_v2(gpu.events, 0).eventData))
        except self._nvml.NVMLError:  # there is none left
            pass
        return tuple(told)

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
        except self._nvml.NVMLError_GpuIsLost:
            raise
        except self._nvml.NVMLError:  # many a GPU has no answer to many a question
            return None
