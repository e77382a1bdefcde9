"""The state of the GPUs behind the slots, from NVIDIA's management library (NVML).

Without the NVIDIA driver or ``nvidia-ml-py``, ``Gpus.open`` returns None.
"""

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
    """One GPU's state. A value is None where the GPU does not report it.

    ``throttled``: whether each cause holds the GPU's clock down. ``ecc``: memory errors since the driver was
    loaded, by kind. ``xids``: XID errors since the last reading. ``lost``: the driver cannot reach the GPU
    any more.
    """

    utilization: float | None = None
    memory_used: int | None = None
    memory_size: int | None = None
    celsius: int | None = None
    watts: float | None = None
    throttled: Mapping[str, bool] = field(default_factory=dict)
    ecc: Mapping[str, int] = field(default_factory=dict)
    xids: tuple[int, ...] = ()
    lost: bool = False


@dataclass(frozen=True, slots=True)
class _Gpu:
    """A GPU's handle, kept because NVML does not find a GPU that is lost. ``events``: an event set for this
    GPU alone, so that every event in it concerns this GPU; None if the GPU reports no events."""

    handle: Any
    events: Any


class Gpus:
    """NVML, initialised. Any call may take long where a GPU is broken."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._found: dict[int, _Gpu] = {}

    @classmethod
    def open(cls) -> Self | None:
        """Initialise NVML. Return None where there is no NVIDIA GPU or no ``nvidia-ml-py``."""
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
        """Return the readings by slot. ``devices``: the GPU of each slot in order, as in
        CUDA_VISIBLE_DEVICES."""
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
            except (self._nvml.NVMLError, ValueError):  # no GPU has this name
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
        """Return the XID errors since the last call."""
        told: list[int] = []
        try:
            while gpu.events is not None:
                told.append(int(self._nvml.nvmlEventSetWait_v2(gpu.events, 0).eventData))
        except self._nvml.NVMLError:  # no event is left
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
        except self._nvml.NVMLError:  # not every GPU answers every question
            return None
