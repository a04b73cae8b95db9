"""The metrics of one logging window, by key. Pure arithmetic; keys and formulas: `hf_speedkit.core.metrics`."""

from __future__ import annotations

from collections.abc import Sequence

from hf_speedkit.core.rates import known_only, rates, ratio
from hf_speedkit.core.records import GpuUsage, StepRecord, TokenCounts
from hf_speedkit.core.step_parts import activity_metrics
from hf_speedkit.core.stepsum import StepSum, rank_rows
from hf_speedkit.core.throughput import JobWindow, Ledger, job_window


def window_metrics(
    window: JobWindow, ledger: Ledger, *, peak_tflops: float | None = None, tensor_clock_mhz: float | None = None
) -> dict[str, float]:
    """The metrics of one window, by key (`hf_speedkit.core.metrics.METRICS`); what is unknown is left out.

    Args:
        window: the window.
        ledger: the ledger with this window in it.
        peak_tflops: dense peak of one device for the training dtype.
        tensor_clock_mhz: SM clock at which that peak is stated.
    """
    everything = window.everything
    values: dict[str, float | None] = {
        **rates(window.steady, world_size=ledger.world_size, peak_tflops=peak_tflops),
        "speed/packing_efficiency": ratio(everything.tokens.real, everything.tokens.slots),
        "speed/target_share": ratio(everything.tokens.target, everything.tokens.real),
        "speed/steady_steps": window.steady.steps,
        "speed/excluded_steps": window.excluded.steps,
        "speed/nonfinite_steps": everything.nonfinite,
        "speed/compiled_kernels": everything.compiled,
        # A pause that did not happen is not a measurement of 0 s.
        "speed/eval_time_s": everything.eval_time_s or None,
        "speed/save_time_s": everything.save_time_s or None,
        "speed/log_time_s": everything.log_time_s or None,
        **_totals(ledger.run_tokens),
        **_spread(window.ranks),
        **_gpu(window.gpu, tensor_clock_mhz),
        **_parts_on_host(window.steady),
        **activity_metrics(window.activity),
    }
    return known_only(values)


def metrics_of(ranks: Sequence[Sequence[StepRecord]], *, peak_tflops: float | None = None) -> dict[str, float]:
    """The metrics of a whole session from its records, rank by rank, as if it were one window.

    Args:
        ranks: the records of every rank, in rank order; the first is the session's first step.
        peak_tflops: dense peak of one device for the training dtype.
    """
    ledger = Ledger(world_size=len(ranks))
    window = job_window([rank_rows(records, ledger.early_left) for records in ranks], ledger)
    return window_metrics(window, ledger.with_window(window), peak_tflops=peak_tflops)


def _totals(tokens: TokenCounts | None) -> dict[str, float | None]:
    if tokens is None or not tokens.slots:
        return {}
    return {
        "speed/total_slots": tokens.slots,
        "speed/total_real_tokens": tokens.real,
        "speed/total_target_tokens": tokens.target,
        "speed/total_documents": tokens.documents,
    }


def _spread(ranks: Sequence[StepSum]) -> dict[str, float | None]:
    if len(ranks) < 2:
        return {}
    values: dict[str, float | None] = {}
    for name, unit, per_rank in (
        ("step_time", "_s", [ratio(rank.step_time_s, rank.steps) for rank in ranks]),
        ("data_wait", "_s", [ratio(rank.data_wait_s, rank.steps) for rank in ranks]),
        ("target_tokens", "", [ratio(rank.tokens.target, rank.steps) for rank in ranks]),
    ):
        known = [value for value in per_rank if value is not None]
        if len(known) == len(ranks):
            values[f"speed/{name}_min{unit}"] = min(known)
            values[f"speed/{name}_max{unit}"] = max(known)
            values[f"speed/{name}_max_rank"] = known.index(max(known))
    return values


def _gpu(usage: GpuUsage | None, tensor_clock_mhz: float | None) -> dict[str, float | None]:
    if usage is None:
        return {}
    clock = ratio(usage.sm_clock_mhz, tensor_clock_mhz)
    active = usage.tensor_active_percent
    return {
        "speed/gpu_sm_active": usage.sm_active_percent,
        "speed/gpu_tensor_active": active,
        "speed/gpu_dram_active": usage.dram_active_percent,
        "speed/ofu": None if active is None or clock is None else active * clock,
        "speed/gpu_utilization": usage.utilization_percent,
        "speed/gpu_power_w": usage.power_w,
        "speed/gpu_sm_clock_mhz": usage.sm_clock_mhz,
        "speed/gpu_memory_gib": usage.memory_gib,
        "speed/gpu_throttled": usage.throttled_percent,
        "speed/gpu_throttled_by_heat": usage.throttled_by_heat_percent,
    }


def _parts_on_host(steady: StepSum) -> dict[str, float | None]:
    """Without a device there are two parts: waiting for data, and the host's work."""
    step, data = ratio(steady.step_time_s, steady.steps), ratio(steady.data_wait_s, steady.steps)
    if steady.device_time_s is not None or step is None or data is None:
        return {}
    return {"speed/part_data_wait_s": data, "speed/part_host_only_s": step - data}
