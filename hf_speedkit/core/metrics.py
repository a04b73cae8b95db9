"""Every metric this package logs: its key, unit, formula and cost, in one table.

`docs/metrics.md` and the tests read this table; a key that is not in it is never logged, and keys do not change their
meaning between releases. "A window" is the optimizer steps since the previous logging step. "Steady steps" are those
of them that no one excluded: not the first step of a session, not warm-up (see
`hf_speedkit.core.throughput.warm_up`), not traced, not counted. A metric that was not measured is left out of the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One logged number.

    Args:
        key: name in the log; trackers of the Trainer put "train/" before it.
        unit: what it is counted in.
        formula: how it follows from the steps.
        cost: what measuring it costs per step, in words.
    """

    key: str
    unit: str
    formula: str
    cost: str


_COUNTED = "none: host integers from the collator, else one small device kernel per micro-batch, read when logging"
_CLOCK = "two host clock readings a step"
_EVENTS = "two CUDA events a step, read when logging"
_NVML = "one NVML poll a second in a thread"
_REDUCTION = "part of the one all-gather per logging step"

_RATES = tuple(
    Metric(
        key=f"speed/{name}_per_second{suffix}",
        unit="tokens/s",
        formula=f"{what} of steady steps, summed over ranks / their step time{divided}",
        cost=_COUNTED,
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
        cost=_COUNTED,
    )
    for name, unit, what in (
        ("slots", "tokens", "slots"),
        ("real_tokens", "tokens", "real tokens"),
        ("target_tokens", "tokens", "target tokens"),
        ("documents", "documents", "documents (rows of a padded batch)"),
    )
)

_SPREAD = tuple(
    Metric(key=f"speed/{name}_{end}", unit=unit, formula=f"{which} over ranks of {what}", cost=_REDUCTION)
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
        key="speed/packing_efficiency", unit="0..1", formula="real tokens / slots of the whole window", cost=_COUNTED
    ),
    Metric(
        key="speed/target_share", unit="0..1", formula="target tokens / real tokens of the whole window", cost=_COUNTED
    ),
    Metric(
        key="speed/step_time_s",
        unit="s",
        formula="mean over steady steps of: end of step to end of step, on the device's clock where there is one, data "
        "wait included, evaluation, saving and logging left out; least over ranks, since a rank that waits for another "
        "one's pause must not count it",
        cost=_CLOCK,
    ),
    Metric(
        key="speed/data_wait_s",
        unit="s",
        formula="mean over steady steps and ranks of: loop resumed after the previous step until on_step_begin, i.e. "
        "fetching all micro-batches, copying them to the device and the Trainer's count of target tokens",
        cost=_CLOCK,
    ),
    Metric(
        key="speed/host_time_s",
        unit="s",
        formula="mean over steady steps and ranks of: on_step_begin to on_step_end less the waits for the device that "
        "were timed; an upper bound on a GPU: what else waited is speed/host_wait_s of the counted step",
        cost=_CLOCK,
    ),
    Metric(
        key="speed/device_time_s",
        unit="s",
        formula="mean over steady steps and ranks of: device clock from on_step_begin to on_step_end; gaps included",
        cost=_EVENTS,
    ),
    Metric(
        key="speed/device_wait_s",
        unit="s",
        formula="mean over steady steps and ranks of: host time spent waiting for the device, where it was timed",
        cost=_CLOCK,
    ),
    Metric(
        key="speed/model_tflops_per_device",
        unit="TFLOP/s",
        formula="model FLOPs of steady steps (forward and backward, no recompute, attention by squared document "
        "lengths, padding left out) / step time / number of ranks",
        cost="none: host arithmetic when logging",
    ),
    Metric(
        key="speed/mfu",
        unit="%",
        formula="100 x model_tflops_per_device / dense peak of the device for the training dtype",
        cost="none: host arithmetic when logging",
    ),
    Metric(
        key="speed/hfu",
        unit="%",
        formula="mfu with the FLOPs added that activation checkpointing and a fused head compute once more; what a "
        "kernel recomputes inside itself (attention's backward) is not added",
        cost="none: host arithmetic when logging",
    ),
)

_CUPTI = "a CUPTI recording of one step in count_launches_every, and of the step before; both are kept out of the rates"

_COUNTED_STEP = (
    Metric(
        key="speed/launch_calls", unit="calls", formula="host calls of the counted step that started work", cost=_CUPTI
    ),
    Metric(key="speed/launches", unit="launches", formula="kernels + memcpy + memset they started", cost=_CUPTI),
    Metric(key="speed/kernels", unit="launches", formula="kernels among the launches", cost=_CUPTI),
    Metric(key="speed/memcpy", unit="launches", formula="copies among the launches", cost=_CUPTI),
    Metric(key="speed/memset", unit="launches", formula="memsets among the launches", cost=_CUPTI),
    Metric(
        key="speed/device_busy_s",
        unit="s",
        formula="union over all streams of what the counted step launched, mean over ranks",
        cost=_CUPTI,
    ),
    Metric(
        key="speed/communication_s",
        unit="s",
        formula="union of the communication kernels among it; a kernel that waits for another rank runs",
        cost=_CUPTI,
    ),
    Metric(
        key="speed/host_wait_s",
        unit="s",
        formula="time of the counted step the host stood in calls that wait for the device: cudaStreamSynchronize, "
        "cudaEventSynchronize, cudaDeviceSynchronize, cudaMemcpy, and launches longer than 0.2 ms under a busy device "
        "(a full queue)",
        cost=_CUPTI,
    ),
    Metric(
        key="speed/counted_step_time_s",
        unit="s",
        formula="the counted step on the device's clock, end of the step before to its own end: the sum of its five "
        "parts",
        cost=_CUPTI,
    ),
    Metric(
        key="speed/part_data_wait_s",
        unit="s",
        formula="part of the counted step: device idle while the host waited for a batch (without a GPU: data_wait_s)",
        cost=_CUPTI,
    ),
    Metric(
        key="speed/part_host_only_s",
        unit="s",
        formula="part of the counted step: device idle otherwise, it waited for the host (without a GPU: step_time_s - "
        "data_wait_s)",
        cost=_CUPTI,
    ),
    Metric(
        key="speed/part_overlapped_s",
        unit="s",
        formula="part of the counted step: device computing while the host issued work",
        cost=_CUPTI,
    ),
    Metric(
        key="speed/part_device_only_s",
        unit="s",
        formula="part of the counted step: device computing while the host waited for it or had issued everything",
        cost=_CUPTI,
    ),
    Metric(
        key="speed/part_exposed_comm_s",
        unit="s",
        formula="part of the counted step: device running communication and nothing else",
        cost=_CUPTI,
    ),
    Metric(
        key="speed/count_cost_s",
        unit="s",
        formula="host time that starting, stopping and reading the recording took; in log_time_s, in no step's time",
        cost=_CUPTI,
    ),
)

_WINDOW = (
    Metric(key="speed/steady_steps", unit="steps", formula="steps of the window that enter the rates", cost="none"),
    Metric(key="speed/excluded_steps", unit="steps", formula="steps of the window that do not", cost="none"),
    Metric(
        key="speed/nonfinite_steps",
        unit="steps",
        formula="steps of the window in which a loss or gradient was NaN or infinite on any rank",
        cost="a look at the loss and at the gradient's norm (plain Trainer: the smallest gradient) on the device, read "
        "when logging",
    ),
    Metric(
        key="speed/compiled_kernels",
        unit="kernels",
        formula="Triton kernels and torch.compile graphs compiled in the window, most over ranks; those that come from "
        "Triton's cache on disk are not counted, nor are other compilers",
        cost="a listener that Triton calls when it compiles",
    ),
    Metric(key="speed/eval_time_s", unit="s", formula="evaluation in the window, most over ranks", cost=_CLOCK),
    Metric(key="speed/save_time_s", unit="s", formula="checkpoint writing in the window, most over ranks", cost=_CLOCK),
    Metric(
        key="speed/log_time_s",
        unit="s",
        formula="logging (the log before this one) and reading counted steps, most over ranks",
        cost=_CLOCK,
    ),
)

_GPU = (
    Metric(
        key="speed/gpu_utilization",
        unit="%",
        formula="mean over ranks and samples of NVML's share of time with any kernel running; not a measure of speed",
        cost=_NVML,
    ),
    Metric(key="speed/gpu_power_w", unit="W", formula="mean over ranks and samples of board power", cost=_NVML),
    Metric(key="speed/gpu_sm_clock_mhz", unit="MHz", formula="mean over ranks and samples of the SM clock", cost=_NVML),
    Metric(
        key="speed/gpu_memory_gib", unit="GiB", formula="most over ranks of mean memory in use on the board", cost=_NVML
    ),
    Metric(
        key="speed/gpu_throttled",
        unit="%",
        formula="share of samples in which the clock was held back for power or heat, mean over ranks",
        cost=_NVML,
    ),
    Metric(
        key="speed/gpu_sm_active",
        unit="%",
        formula="mean over ranks and samples of the share of multiprocessors with work (NVML GPM, Hopper and later)",
        cost=_NVML,
    ),
    Metric(
        key="speed/gpu_tensor_active",
        unit="%",
        formula="mean over ranks and samples of the share of time the tensor pipes were active (GPM)",
        cost=_NVML,
    ),
    Metric(
        key="speed/gpu_dram_active",
        unit="%",
        formula="mean over ranks and samples of the share of the memory's peak bandwidth in use (GPM)",
        cost=_NVML,
    ),
    Metric(
        key="speed/ofu",
        unit="%",
        formula="gpu_tensor_active x gpu_sm_clock_mhz / the clock at which the device's peak is stated: FLOP "
        "utilisation as the hardware counts it, recompute and padding included, over the whole window (arXiv "
        "2605.20799); to be held against hfu, or mfu without recompute",
        cost=_NVML,
    ),
)

METRICS: Mapping[str, Metric] = MappingProxyType(
    {metric.key: metric for metric in (*_RATES, *_STEP, *_COUNTED_STEP, *_WINDOW, *_TOTALS, *_SPREAD, *_GPU)}
)
"""Every key, in the order the documentation shows them."""
