"""Every metric this package logs: its key, unit, formula and cost, in one table.

`docs/metrics.md` and the tests read this table; a key that is not in it is never logged, and keys do not change their
meaning between releases. "A window" is the optimizer steps since the previous logging step. "Steady steps" are those
of them that no one excluded: not the first step of a session, not warm-up (see
`hf_speedkit.core.throughput.warm_up`), not traced, not counted. A metric that was not measured is left out of the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hf_speedkit.core.metric import (
    ARITHMETIC,
    CLOCK,
    COMPILERS,
    COUNTED,
    CUPTI,
    EVENTS,
    LOOK,
    MARKS,
    NVML,
    REDUCTION,
    Metric,
    all_by,
)

_RATES = tuple(
    Metric(
        key=f"speed/{name}_per_second{suffix}",
        unit="tokens/s",
        formula=f"{what} of steady steps, summed over ranks / their step time{divided}",
        by=COUNTED,
    )
    for name, what in (
        ("slots", "positions computed, padding included,"),
        ("real_tokens", "slots that hold a document's token,"),
        ("target_tokens", "labels that enter the loss"),
    )
    for suffix, divided in (
        ("", ""),
        ("_per_device", " / number of ranks; left out where there is one rank, it would be the same"),
    )
)

_TOTALS = tuple(
    Metric(
        key=f"speed/total_{name}",
        unit=unit,
        formula=f"{what} since the run began, over all ranks, excluded steps and earlier sessions included",
        by=COUNTED,
    )
    for name, unit, what in (
        ("slots", "tokens", "slots"),
        ("real_tokens", "tokens", "real tokens"),
        ("target_tokens", "tokens", "target tokens"),
        ("documents", "documents", "documents (rows of a padded batch)"),
    )
)

_SPREAD = tuple(
    Metric(key=f"speed/{name}_{end}", unit=unit, formula=f"{which} over ranks of {what}", by=REDUCTION)
    for name, seconds, what in (
        ("step_time", True, "the mean step time"),
        ("data_wait", True, "the mean data wait"),
        ("target_tokens", False, "target tokens per step"),
    )
    for end, which, unit in (
        ("min_s" if seconds else "min", "least", "s" if seconds else "tokens"),
        ("max_s" if seconds else "max", "most", "s" if seconds else "tokens"),
        ("max_rank", "the rank with the most", "rank"),
    )
)

_STEP = (
    Metric(
        key="speed/packing_efficiency",
        unit="0..1",
        formula="real tokens / slots of the whole window",
        by=COUNTED,
    ),
    Metric(
        key="speed/target_share",
        unit="0..1",
        formula="target tokens / real tokens of the whole window",
        by=COUNTED,
    ),
    Metric(
        key="speed/step_time_s",
        unit="s",
        formula="mean over steady steps of: end of step to end of step, on the device's clock where there is one, data "
        "wait included, evaluation, saving and logging left out; least over ranks, since a rank that waits for another "
        "one's pause must not count it",
        by=CLOCK,
    ),
    Metric(
        key="speed/data_wait_s",
        unit="s",
        formula="mean over steady steps and ranks of: loop resumed after the previous step until on_step_begin, i.e. "
        "fetching all micro-batches, copying them to the device and the Trainer's count of target tokens",
        by=CLOCK,
    ),
    Metric(
        key="speed/host_time_s",
        unit="s",
        formula="mean over steady steps and ranks of: on_step_begin to on_step_end less the waits for the device that "
        "were timed; an upper bound on a GPU: what else waited is speed/host_wait_s of the counted step",
        by=CLOCK,
    ),
    Metric(
        key="speed/device_time_s",
        unit="s",
        formula="mean over steady steps and ranks of: device clock from on_step_begin to on_step_end; gaps included",
        by=EVENTS,
    ),
    Metric(
        key="speed/device_wait_s",
        unit="s",
        formula="mean over steady steps and ranks of: host time spent waiting for the device, where it was timed",
        by=CLOCK,
    ),
    Metric(
        key="speed/model_tflops_per_device",
        unit="TFLOP/s",
        formula="model FLOPs of steady steps (forward and backward, no recompute, attention by squared document "
        "lengths, padding left out) / step time / number of ranks",
        by=ARITHMETIC,
    ),
    Metric(
        key="speed/mfu",
        unit="%",
        formula="100 x model_tflops_per_device / dense peak of the device for the training dtype",
        by=ARITHMETIC,
    ),
    Metric(
        key="speed/hfu",
        unit="%",
        formula="mfu with the FLOPs added that activation checkpointing and a fused head compute once more; what a "
        "kernel recomputes inside itself (attention's backward) is not added",
        by=ARITHMETIC,
    ),
)

_COUNTED_STEP = all_by(
    CUPTI,
    (
        "launch_calls",
        "calls",
        "host calls of the counted step that started work",
    ),
    (
        "launches",
        "launches",
        "kernels + memcpy + memset they started",
    ),
    (
        "kernels",
        "launches",
        "kernels among the launches",
    ),
    (
        "memcpy",
        "launches",
        "copies among the launches",
    ),
    (
        "memset",
        "launches",
        "memsets among the launches",
    ),
    (
        "device_busy_s",
        "s",
        "union over all streams of what the counted step launched, mean over ranks",
    ),
    (
        "communication_s",
        "s",
        "union of the communication kernels among it; a kernel that waits for another rank runs",
    ),
    (
        "host_wait_s",
        "s",
        "time of the counted step the host stood in calls that wait for the device: cudaStreamSynchronize, "
        "cudaEventSynchronize, cudaDeviceSynchronize, cudaMemcpy, and launches longer than 0.2 ms under a "
        "busy device (a full queue)",
    ),
    (
        "counted_step_time_s",
        "s",
        "the counted step on the device's clock, end of the step before to its own end: the sum of its five parts",
    ),
    (
        "part_data_wait_s",
        "s",
        "part of the counted step: device idle while the host waited for a batch (without a GPU: data_wait_s)",
    ),
    (
        "part_host_only_s",
        "s",
        "part of the counted step: device idle otherwise, it waited for the host (without a GPU: step_time_s "
        "- data_wait_s)",
    ),
    (
        "part_overlapped_s",
        "s",
        "part of the counted step: device computing while the host issued work",
    ),
    (
        "part_device_only_s",
        "s",
        "part of the counted step: device computing while the host waited for it or had issued everything",
    ),
    (
        "part_exposed_comm_s",
        "s",
        "part of the counted step: device running communication and nothing else",
    ),
    (
        "count_cost_s",
        "s",
        "host time that starting, stopping and reading the recording took; in log_time_s, in no step's time",
    ),
)

_WINDOW = (
    Metric(
        key="speed/steady_steps",
        unit="steps",
        formula="steps of the window that enter the rates",
        by=MARKS,
    ),
    Metric(
        key="speed/excluded_steps",
        unit="steps",
        formula="steps of the window that do not",
        by=MARKS,
    ),
    Metric(
        key="speed/nonfinite_steps",
        unit="steps",
        formula="steps of the window in which a loss or gradient was NaN or infinite on any rank",
        by=LOOK,
    ),
    Metric(
        key="speed/compiled_kernels",
        unit="kernels",
        formula="Triton kernels and torch.compile graphs compiled in the window, most over ranks; those that come from "
        "Triton's cache on disk are not counted, nor are other compilers",
        by=COMPILERS,
    ),
    Metric(
        key="speed/eval_time_s",
        unit="s",
        formula="evaluation in the window, most over ranks",
        by=CLOCK,
    ),
    Metric(
        key="speed/save_time_s",
        unit="s",
        formula="checkpoint writing in the window, most over ranks",
        by=CLOCK,
    ),
    Metric(
        key="speed/log_time_s",
        unit="s",
        formula="logging (the log before this one) and reading counted steps, most over ranks",
        by=CLOCK,
    ),
)

_GPU = all_by(
    NVML,
    (
        "gpu_utilization",
        "%",
        "mean over ranks and samples of NVML's share of time with any kernel running; not a measure of speed",
    ),
    (
        "gpu_power_w",
        "W",
        "mean over ranks and samples of board power",
    ),
    (
        "gpu_sm_clock_mhz",
        "MHz",
        "mean over ranks and samples of the SM clock",
    ),
    (
        "gpu_memory_gib",
        "GiB",
        "most over ranks of mean memory in use on the board",
    ),
    (
        "gpu_throttled",
        "%",
        "share of samples in which the clock was held back for power or heat, mean over ranks",
    ),
    (
        "gpu_throttled_by_heat",
        "%",
        "share of samples in which it was held back for heat; the rest of gpu_throttled is the power limit",
    ),
    (
        "gpu_sm_active",
        "%",
        "mean over ranks and samples of the share of multiprocessors with work (NVML GPM, Hopper and later)",
    ),
    (
        "gpu_tensor_active",
        "%",
        "mean over ranks and samples of the share of time the tensor pipes were active (GPM)",
    ),
    (
        "gpu_dram_active",
        "%",
        "mean over ranks and samples of the share of the memory's peak bandwidth in use (GPM)",
    ),
    (
        "ofu",
        "%",
        "gpu_tensor_active x gpu_sm_clock_mhz / the clock at which the device's peak is stated: FLOP "
        "utilisation as the hardware counts it, recompute and padding included, over the whole window (arXiv "
        "2605.20799); to be held against hfu, or mfu without recompute",
    ),
)

METRICS: Mapping[str, Metric] = MappingProxyType(
    {metric.key: metric for metric in (*_RATES, *_STEP, *_COUNTED_STEP, *_WINDOW, *_TOTALS, *_SPREAD, *_GPU)}
)
"""Every key, in the order the documentation shows them."""
