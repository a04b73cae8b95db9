"""Utilisation, power, clocks and memory of one GPU, sampled by NVML in a thread.

Utilisation here is NVML's share of time in which any kernel ran. It stands at 98 % for a GPU that does a tenth of the
work it could; it is sampled to be shown beside tokens per second, never alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_speedkit.core.records import GpuUsage
from hf_speedkit.measure.gpm import GpmReader, GpmReading
from hf_speedkit.measure.nvml import NvmlUnavailableError, nvml_session, optional, visible_handles

INTERVAL_S = 1.0
"""NVML updates utilisation about once a second on data centre GPUs; asking more often repeats the same value."""

# Reasons that mean "for power or heat": software power cap, hardware slowdown, software and hardware thermal slowdown,
# power brake. Idle, application clocks and sync boost are left out. Values: NVML's nvmlClocksEventReasons constants.
_HEAT = 0x20 | 0x40
_THROTTLED = 0x04 | 0x08 | _HEAT | 0x80

_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Sample:
    utilization_percent: float | None
    power_w: float | None
    sm_clock_mhz: float | None
    memory_gib: float | None
    clock_reasons: int | None
    gpm: GpmReading


class GpuSampler:
    """Samples one GPU until it is stopped. Never raises into its user: what cannot be read is None, with a reason.

    Args:
        index: which of the visible GPUs, counted as torch counts them.
        uuid: that GPU's UUID ("GPU-..."), which settles which one is meant; by index without it.
        interval_s: seconds between samples.
        nvml: a module with pynvml's functions; pynvml itself by default.
    """

    def __init__(
        self, index: int = 0, *, uuid: str | None = None, interval_s: float = INTERVAL_S, nvml: Any = None
    ) -> None:
        self._index = index
        self._uuid = uuid
        self._interval_s = interval_s
        self._nvml = nvml
        self._samples: list[_Sample] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self.reason: str | None = None
        """Why there are no samples; None while there is nothing to explain."""
        self.gpm_reason: str | None = None
        """Why there are no GPM counters in them; None likewise."""

    def start(self) -> None:
        """Begin sampling in a thread; returns when the first sample was taken or could not be."""
        if self._thread is not None:
            return
        self._stop.clear()
        self._ready.clear()
        # A daemon, so that a training process that dies of an exception does not hang on it.
        self._thread = threading.Thread(target=self._run, name="hf_speedkit-gpu-sampler", daemon=True)
        self._thread.start()
        self._ready.wait(_STOP_TIMEOUT_S)

    def stop(self) -> None:
        """End the thread. May be called twice, or without `start`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        thread.join(_STOP_TIMEOUT_S)

    def window(self) -> GpuUsage | None:
        """Means of the samples since the last call; None where there are none (`reason` says why)."""
        with self._lock:
            samples, self._samples = self._samples, []
        if not samples:
            return None
        return GpuUsage(
            samples=len(samples),
            utilization_percent=_mean([sample.utilization_percent for sample in samples]),
            power_w=_mean([sample.power_w for sample in samples]),
            sm_clock_mhz=_mean([sample.sm_clock_mhz for sample in samples]),
            memory_gib=_mean([sample.memory_gib for sample in samples]),
            throttled_percent=_share_of([sample.clock_reasons for sample in samples], _THROTTLED),
            throttled_by_heat_percent=_share_of([sample.clock_reasons for sample in samples], _HEAT),
            sm_active_percent=_mean([sample.gpm.sm_percent for sample in samples]),
            tensor_active_percent=_mean([sample.gpm.tensor_percent for sample in samples]),
            dram_active_percent=_mean([sample.gpm.dram_percent for sample in samples]),
        )

    def _run(self) -> None:
        try:
            with nvml_session(self._nvml) as nvml:
                handle = self._find(nvml)
                gpm = GpmReader(nvml, handle)
                try:
                    self._sample(nvml, handle, gpm)
                finally:
                    gpm.close()
        except NvmlUnavailableError as error:
            self.reason = str(error)
        finally:
            self._ready.set()

    def _sample(self, nvml: Any, handle: Any, gpm: GpmReader) -> None:
        gpm_reading = GpmReading()  # rates need a time to be taken over: none with the first sample
        while True:
            self.gpm_reason = gpm.reason
            sample = _read(nvml, handle, gpm_reading)
            with self._lock:
                self._samples.append(sample)
            self._ready.set()
            if self._stop.wait(self._interval_s):
                return
            gpm_reading = gpm.read()

    def _find(self, nvml: Any) -> Any:
        if self._uuid is not None:
            handle = optional(nvml, lambda: nvml.nvmlDeviceGetHandleByUUID(self._uuid))
            if handle is not None:
                return handle
        handles = visible_handles(nvml)
        if self._index >= len(handles):
            raise NvmlUnavailableError(f"NVML shows {len(handles)} visible GPUs, number {self._index} was asked for")
        return handles[self._index]


def sampler_of(device: Any) -> GpuSampler:
    """The sampler of a torch device, found by its UUID whatever CUDA_VISIBLE_DEVICES says."""
    import torch

    index = device.index or 0
    return GpuSampler(index, uuid=f"GPU-{torch.cuda.get_device_properties(index).uuid}")


def _read(nvml: Any, handle: Any, gpm: GpmReading) -> _Sample:
    utilization = optional(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    milliwatts = optional(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    memory = optional(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
    return _Sample(
        utilization_percent=None if utilization is None else float(utilization),
        power_w=None if milliwatts is None else milliwatts / 1e3,
        sm_clock_mhz=optional(nvml, lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        memory_gib=None if memory is None else memory / 2**30,
        clock_reasons=_clock_reasons(nvml, handle),
        gpm=gpm,
    )


def _clock_reasons(nvml: Any, handle: Any) -> int | None:
    # Named ...ThrottleReasons before driver 535; both names exist in nvidia-ml-py 12.
    read: Callable[[Any], int] | None = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    return None if read is None else optional(nvml, lambda: read(handle))


def _share_of(reasons: Sequence[int | None], mask: int) -> float | None:
    """Percent of the samples with one of these reasons."""
    return _mean([None if bits is None else 100.0 * bool(bits & mask) for bits in reasons])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
