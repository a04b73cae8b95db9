"""Means and totals of a run from its logged windows. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from hf_speedkit.core.rates import ratio
from hf_speedkit.core.records import TokenCounts
from hf_speedkit.core.step_log import LoggedWindow

_MOST_RANKS = 1e6
"""More ranks than any job has: a log that says so is damaged."""


def run_means(windows: Sequence[LoggedWindow]) -> dict[str, float]:
    """Run means by metric key. A rate times its steady time is what was counted: sums first, one division last."""
    steady = [
        (window.metrics, window.metrics.get("speed/steady_steps", 0.0) * window.metrics.get("speed/step_time_s", 0.0))
        for window in windows
    ]
    rates = {}
    for key in (
        *(f"speed/{name}_per_second" for name in ("real_tokens", "slots", "target_tokens")),
        *(f"speed/{name}_per_second_per_device" for name in ("real_tokens", "slots", "target_tokens")),
        *(
            "speed/model_tflops_per_device",
            "speed/mfu",
            "speed/hfu",
            "speed/ofu",
            "speed/gpu_utilization",
            "speed/gpu_power_w",
        ),
    ):
        rates[key] = _mean([(metrics.get(key), seconds) for metrics, seconds in steady])
    for key in ("step_time_s", "data_wait_s", "host_time_s", "device_time_s", "device_wait_s"):
        values = [(w.metrics.get(f"speed/{key}"), w.metrics.get("speed/steady_steps", 0.0)) for w in windows]
        rates[f"speed/{key}"] = _mean(values)
    memory = [w.metrics["speed/gpu_memory_gib"] for w in windows if "speed/gpu_memory_gib" in w.metrics]
    rates["speed/gpu_memory_gib"] = max(memory) if memory else None
    return {key: value for key, value in rates.items() if value is not None}


def _mean(weighted: Sequence[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in weighted if value is not None and weight > 0]
    return ratio(sum(value * weight for value, weight in known), sum(weight for _, weight in known))


def run_tokens(windows: Sequence[LoggedWindow]) -> TokenCounts | None:
    """Tokens of the whole run over all ranks, by the last window that says; None where none does."""
    last = next((w.metrics for w in reversed(windows) if "speed/total_slots" in w.metrics), None)
    if last is None:
        return None
    whole = {name: last.get(f"speed/total_{name}") for name in ("slots", "real_tokens", "target_tokens", "documents")}
    counts = {name: None if value is None else int(value) for name, value in whole.items()}
    return TokenCounts(
        slots=counts["slots"] or 0,
        real=counts["real_tokens"],
        target=counts["target_tokens"],
        documents=counts["documents"],
    )


def world_sizes(windows: Sequence[LoggedWindow]) -> tuple[int, ...]:
    """Numbers of ranks in the order they came, repeats left out: a run may go on with another number of them.

    From a rate over all ranks and one a device; with one rank the latter is not logged. Windows that tell neither are
    left out.
    """
    found: list[int] = []
    for window in windows:
        rate = window.metrics.get("speed/slots_per_second")
        each = window.metrics.get("speed/slots_per_second_per_device")
        ranks = 1.0 if rate is not None and each is None else ratio(rate, each)
        if ranks is not None and 0.5 <= ranks < _MOST_RANKS and found[-1:] != [round(ranks)]:
            found.append(round(ranks))
    return tuple(found)
