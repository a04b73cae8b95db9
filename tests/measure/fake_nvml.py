"""A stand-in for pynvml: some GPUs, whose readings tests set by hand."""

from types import SimpleNamespace


class NVMLError(Exception):
    pass


class FakeNvml:
    NVMLError = NVMLError
    NVML_CLOCK_SM = 1

    NVML_GPM_METRIC_SM_UTIL = 2
    NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
    NVML_GPM_METRIC_DRAM_BW_UTIL = 10
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, names=("NVIDIA H200",), *, broken=None, unsupported=()):
        self.names = list(names)
        self.broken = broken
        self.unsupported = set(unsupported)
        self.users = 0
        self.utilization = 98
        self.reasons = 0
        self.gpm = {2: 91.0, 5: 55.0, 10: 33.0}  # rates by metric
        self.gpm_samples = 0  # allocated and not freed
        self.gpm_taken = 0

    def nvmlInit(self):
        if self.broken:
            raise NVMLError(self.broken)
        self.users += 1

    def nvmlShutdown(self):
        self.users -= 1

    def nvmlSystemGetDriverVersion(self):
        return b"580.65.06"

    def nvmlDeviceGetCount(self):
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle:08d}-aaaa"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for index in range(len(self.names)):
            if self.nvmlDeviceGetUUID(index) == uuid:
                return index
        raise NVMLError("Not Found")

    def nvmlDeviceGetName(self, handle):
        return self.names[handle]

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._check("memory")
        return SimpleNamespace(total=(handle + 1) * 2**30, used=2**29)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        self._check("capability")
        return (9, 0)

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._check("utilization")
        return SimpleNamespace(gpu=self.utilization)

    def nvmlDeviceGetPowerUsage(self, handle):
        self._check("power")
        return 650_000

    def nvmlDeviceGetClockInfo(self, handle, kind):
        self._check("clock")
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        self._check("reasons")
        return self.reasons

    def nvmlGpmQueryDeviceSupport(self, handle):
        self._check("gpm question")
        return SimpleNamespace(isSupportedDevice=int("gpm" not in self.unsupported))

    def nvmlGpmSampleAlloc(self):
        self.gpm_samples += 1
        return {"at": None}

    def nvmlGpmSampleFree(self, sample):
        self.gpm_samples -= 1

    def nvmlGpmSampleGet(self, handle, sample):
        self._check("gpm sample")
        self.gpm_taken += 1
        sample["at"] = self.gpm_taken

    def c_nvmlGpmMetricsGet_t(self):
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=None, nvmlReturn=None, value=None) for _ in range(5)])

    def nvmlGpmMetricsGet(self, wanted):
        assert wanted.version == 1
        assert wanted.sample1["at"] < wanted.sample2["at"]  # the older one first
        for metric in wanted.metrics[: wanted.numMetrics]:
            known = metric.metricId in self.gpm
            metric.nvmlReturn, metric.value = (0, self.gpm[metric.metricId]) if known else (3, 0.0)

    def _check(self, what):
        if what in self.unsupported:
            raise NVMLError("Not Supported")
