"""The measuring room on a real GPU: honest times, no hidden waits, NVML."""

import time

import pytest
import torch

from hf_speedkit.core.devices import find_device
from hf_speedkit.measure.environment import collect_environment, visible_gpus
from hf_speedkit.measure.gpu_sampler import GpuSampler
from hf_speedkit.measure.step_clock import StepClock, device_timer
from hf_speedkit.trainer.observation import GradientProbe, LabelRule, Observation, count_batch

pytestmark = pytest.mark.gpu

STEPS, MATMULS, SIZE = 5, 10, 8192


@pytest.fixture
def matrix():
    made = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):  # library handles and clocks warm up outside the measurement
        made @ made
    torch.cuda.synchronize()
    return made


def test_v70_step_times_follow_the_device_and_not_the_queue(matrix):
    clock = StepClock(device=device_timer("cuda"))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    clock.start()
    began = time.perf_counter()
    start.record()
    for _ in range(STEPS):
        clock.begin_step()
        for _ in range(MATMULS):
            matrix @ matrix
        clock.end_step()
        clock.loop_goes_on()
    end.record()
    issued_s = time.perf_counter() - began
    clock.settle()
    steps = clock.take()
    torch.cuda.synchronize()
    truth_s = start.elapsed_time(end) / 1e3
    assert truth_s > 5 * issued_s  # else this test shows nothing
    assert sum(step.step_time_s for step in steps) == pytest.approx(truth_s, rel=0.05)
    assert sum(step.device_time_s for step in steps) == pytest.approx(truth_s, rel=0.05)
    parts = sum(step.data_wait_s + step.host_time_s + step.device_wait_s + step.other_s for step in steps)
    assert parts == pytest.approx(truth_s, rel=0.05)


def test_v62_what_runs_in_every_step_waits_for_nothing(matrix):
    batch = {
        "input_ids": torch.ones(2, 64, dtype=torch.int64, device="cuda"),
        "attention_mask": torch.ones(2, 64, dtype=torch.int64, device="cuda"),
        "labels": torch.ones(2, 64, dtype=torch.int64, device="cuda"),
    }
    packed = {**batch, "cu_seq_lens_q": torch.tensor([0, 64, 128], dtype=torch.int32, device="cuda")}
    model = torch.nn.Linear(8, 8, device="cuda")
    model(torch.ones(1, 8, device="cuda")).sum().backward()
    clock, probe = StepClock(device=device_timer("cuda")), GradientProbe()
    clock.start()
    for _ in range(20):
        matrix @ matrix  # work for the device to be busy with: a wait would take some milliseconds
    torch.cuda.set_sync_debug_mode("error")
    try:
        began = time.perf_counter()
        clock.begin_step()
        count_batch((), batch, LabelRule())
        count_batch((), packed, LabelRule())
        Observation().look(probe.smallest(model))
        clock.end_step()
        took_s = time.perf_counter() - began
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert took_s < 0.01
    clock.settle()


def test_utilisation_power_clock_and_memory_are_sampled(matrix):
    sampler = GpuSampler(0, uuid=f"GPU-{torch.cuda.get_device_properties(0).uuid}", interval_s=0.1)
    sampler.start()
    deadline = time.perf_counter() + 3.0
    while time.perf_counter() < deadline:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()
    usage = sampler.window()
    sampler.stop()
    assert sampler.reason is None
    assert usage.samples >= 10
    assert 50 <= usage.utilization_percent <= 100
    assert usage.power_w > 0
    assert usage.sm_clock_mhz > 0
    assert usage.memory_gib > 0


def test_nvml_and_torch_describe_the_same_gpus():
    gpus = visible_gpus()
    assert [gpu.name for gpu in gpus] == [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
    assert gpus[0].compute_capability == torch.cuda.get_device_capability(0)
    assert collect_environment().driver
    assert find_device(gpus[0].name) is not None  # a GPU we test on must have a peak
