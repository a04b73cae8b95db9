"""The sampler with a fake NVML and, on this machine, without any."""

import threading
import time

import pytest
from fake_nvml import FakeNvml

from hf_speedkit.measure.gpu_sampler import GpuSampler


def wait_for(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the sampler did not get there"
        time.sleep(0.005)


@pytest.fixture
def sampler():
    made = []

    def make(*arguments, **keywords):
        made.append(GpuSampler(*arguments, **keywords))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_a_window_holds_the_means_of_its_own_samples(sampler):
    nvml = FakeNvml()
    one = sampler(interval_s=0.01, nvml=nvml)
    one.start()
    usage = one.window()
    assert usage.samples >= 1
    assert usage.utilization_percent == 98
    assert usage.power_w == 650
    assert usage.sm_clock_mhz == 1980
    assert usage.memory_gib == 0.5
    assert usage.throttled_percent == 0
    nvml.utilization = 10
    one.window()  # may still hold a sample of before
    wait_for(lambda: one._samples)
    assert one.window().utilization_percent == 10


def test_a_window_without_samples_is_none_and_not_zero(sampler):
    one = sampler(interval_s=60.0, nvml=FakeNvml())
    one.start()
    assert one.window() is not None
    assert one.window() is None
    assert one.reason is None


def test_stopping_ends_the_thread_and_gives_nvml_back(sampler):
    nvml = FakeNvml()
    one = sampler(interval_s=60.0, nvml=nvml)
    one.start()
    assert nvml.users == 1
    one.stop()
    one.stop()
    assert nvml.users == 0
    assert "hf_speedkit-gpu-sampler" not in {thread.name for thread in threading.enumerate()}


def test_it_can_be_started_again(sampler):
    nvml = FakeNvml()
    one = sampler(interval_s=60.0, nvml=nvml)
    for _ in range(2):
        one.start()
        one.start()
        assert one.window() is not None
        one.stop()
    assert nvml.users == 0


def test_a_driver_that_does_not_start_is_a_reason_and_no_error(sampler):
    one = sampler(nvml=FakeNvml(broken="Driver Not Loaded"))
    one.start()
    assert one.window() is None
    assert "Driver Not Loaded" in one.reason


def test_this_machine_without_nvml_is_a_reason_and_no_error(sampler):
    one = sampler()
    one.start()
    if one.window() is None:
        assert one.reason


def test_a_gpu_that_is_not_there_is_a_reason(sampler):
    one = sampler(3, nvml=FakeNvml())
    one.start()
    assert one.window() is None
    assert "1 visible GPUs, number 3" in one.reason


@pytest.mark.parametrize(
    ("unsupported", "field"),
    [
        ("utilization", "utilization_percent"),
        ("power", "power_w"),
        ("clock", "sm_clock_mhz"),
        ("memory", "memory_gib"),
        ("reasons", "throttled_percent"),
    ],
)
def test_a_reading_the_driver_does_not_support_is_none(sampler, unsupported, field):
    one = sampler(interval_s=60.0, nvml=FakeNvml(unsupported=[unsupported]))
    one.start()
    usage = one.window()
    assert getattr(usage, field) is None
    assert usage.samples == 1


@pytest.mark.parametrize(
    ("reasons", "throttled", "by_heat"),
    [
        *((reasons, 0, 0) for reasons in (0x0, 0x1, 0x2)),
        *((reasons, 100, 0) for reasons in (0x4, 0x8, 0x80, 0x5)),
        *((reasons, 100, 100) for reasons in (0x20, 0x40, 0x24)),
    ],
)
def test_throttling_means_power_or_heat_and_not_idling(sampler, reasons, throttled, by_heat):
    nvml = FakeNvml()
    nvml.reasons = reasons
    one = sampler(interval_s=60.0, nvml=nvml)
    one.start()
    usage = one.window()
    assert (usage.throttled_percent, usage.throttled_by_heat_percent) == (throttled, by_heat)


def test_the_uuid_decides_which_gpu_is_meant(sampler, monkeypatch):
    seen = []
    nvml = FakeNvml(["NVIDIA H200"] * 3)
    read = nvml.nvmlDeviceGetPowerUsage
    nvml.nvmlDeviceGetPowerUsage = lambda handle: seen.append(handle) or read(handle)
    one = sampler(0, uuid="GPU-00000002-aaaa", interval_s=60.0, nvml=nvml)
    one.start()
    assert seen == [2]


def test_gpm_counters_are_rates_between_two_samples(sampler):
    nvml = FakeNvml()
    one = sampler(interval_s=0.01, nvml=nvml)
    one.start()
    first = one.window()
    assert (first.sm_active_percent, first.tensor_active_percent) == (None, None)  # no time has passed yet
    wait_for(lambda: one._samples)
    usage = one.window()
    assert (usage.sm_active_percent, usage.tensor_active_percent, usage.dram_active_percent) == (91.0, 55.0, 33.0)
    assert one.gpm_reason is None
    one.stop()
    assert nvml.gpm_samples == 0  # both were given back


@pytest.mark.parametrize(
    ("unsupported", "says"),
    [("gpm", "has no GPM counters"), ("gpm question", "cannot be asked for"), ("gpm sample", "cannot be read")],
)
def test_a_gpu_without_gpm_has_the_rest_and_a_reason(sampler, unsupported, says):
    nvml = FakeNvml(unsupported=(unsupported,))
    one = sampler(interval_s=0.01, nvml=nvml)
    one.start()
    wait_for(lambda: len(one._samples) > 1)
    usage = one.window()
    assert usage.utilization_percent == 98
    assert usage.tensor_active_percent is None
    assert says in one.gpm_reason
    one.stop()
    assert nvml.gpm_samples == 0


def test_a_counter_that_the_device_lacks_is_none_and_not_zero(sampler):
    nvml = FakeNvml()
    del nvml.gpm[5]
    one = sampler(interval_s=0.01, nvml=nvml)
    one.start()
    one.window()
    wait_for(lambda: one._samples)
    usage = one.window()
    assert usage.tensor_active_percent is None
    assert usage.sm_active_percent == 91.0
