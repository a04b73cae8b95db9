"""NVML's GPM counters (Hopper and later): how busy the multiprocessors, the tensor pipes and the memory were.

GPM takes two samples of hardware counters and gives rates over the time between them. No kernel is slowed and no
profiling privilege is needed; where the driver or the GPU has no GPM, there are no numbers and one sentence says why.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_SM, _TENSOR, _DRAM = "NVML_GPM_METRIC_SM_UTIL", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", "NVML_GPM_METRIC_DRAM_BW_UTIL"


class GpmReading(NamedTuple):
    """Rates between two samples, 0..100 each; None for one that the device does not give."""

    sm_percent: float | None = None
    tensor_percent: float | None = None
    dram_percent: float | None = None


class GpmReader:
    """Reads the counters of one GPU, each call over the time since the one before.

    Args:
        nvml: a module with pynvml's functions, initialised.
        handle: the GPU.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._samples: list[Any] = []
        self.reason = self._unsupported()
        """Why there are no readings; None where there are."""
        if self.reason is None:
            self._begin()

    def read(self) -> GpmReading:
        """The rates since the last call; empty where there is no GPM."""
        if self.reason is not None:
            return GpmReading()
        nvml = self._nvml
        try:
            before, after = self._samples
            nvml.nvmlGpmSampleGet(self._handle, after)
            wanted = nvml.c_nvmlGpmMetricsGet_t()
            wanted.version = nvml.NVML_GPM_METRICS_GET_VERSION
            wanted.numMetrics = len(GpmReading._fields)
            wanted.sample1, wanted.sample2 = before, after
            for place, name in enumerate((_SM, _TENSOR, _DRAM)):
                wanted.metrics[place].metricId = getattr(nvml, name)
            nvml.nvmlGpmMetricsGet(wanted)
        except nvml.NVMLError as error:
            self._end(f"GPM cannot be read: {error}")
            return GpmReading()
        self._samples = [after, before]
        return GpmReading(*(_value(wanted.metrics[place]) for place in range(len(GpmReading._fields))))

    def close(self) -> None:
        """Give the samples back."""
        for sample in self._samples:
            self._nvml.nvmlGpmSampleFree(sample)
        self._samples = []

    def _unsupported(self) -> str | None:
        nvml = self._nvml
        if not hasattr(nvml, "nvmlGpmQueryDeviceSupport"):
            return "this nvidia-ml-py has no GPM (12.0 and later have)"
        try:
            supported = nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice
        except nvml.NVMLError as error:
            return f"GPM cannot be asked for: {error}"
        return None if supported else "this GPU has no GPM counters (Hopper and later have)"

    def _begin(self) -> None:
        try:
            for _ in range(2):
                self._samples.append(self._nvml.nvmlGpmSampleAlloc())
            self._nvml.nvmlGpmSampleGet(self._handle, self._samples[0])
        except self._nvml.NVMLError as error:
            self._end(f"GPM cannot be read: {error}")

    def _end(self, reason: str) -> None:
        self.close()
        self.reason = reason


def _value(metric: Any) -> float | None:
    return float(metric.value) if metric.nvmlReturn == 0 else None
