"""A stand-in for pynvml: some GPUs, whose readings tests set by hand."""

from types import SimpleNamespace


class NVMLError(Exception):
    pass


class FakeNvml:
    NVMLError = NVMLError
    NVML_CLOCK_SM = 1

    def __init__(self, names=("NVIDIA H200",), *, broken=None, unsupported=()):
        self.names = list(names)
        self.broken = broken
        self.unsupported = set(unsupported)
        self.users = 0
        self.utilization = 98
        self.reasons = 0

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

    def _check(self, what):
        if what in self.unsupported:
            raise NVMLError("Not Supported")
