"""Rates and mean times of steps that count. Pure arithmetic.

Tokens per second = tokens of steady steps, over all ranks / their step time. Sums come first and one division last:
never a mean of rates, never a batch size times a length, never an accumulation factor.
"""

from __future__ import annotations

from collections.abc import Mapping

from hf_speedkit.core.stepsum import StepSum


def rates(steady: StepSum, *, world_size: int = 1, peak_tflops: float | None = None) -> dict[str, float]:
    """Rates and mean times of steps that count, added up over ranks; what is unknown is left out."""
    seconds = steady.step_time_s
    values: dict[str, float | None] = {}
    for name, tokens in (
        ("slots", steady.tokens.slots or None),  # no batch had tokens that anyone could see: not a rate of 0
        ("real_tokens", steady.tokens.real),
        ("target_tokens", steady.tokens.target),
    ):
        rate = ratio(tokens, seconds)
        values[f"speed/{name}_per_second"] = rate
        if world_size > 1:  # else the same number twice
            values[f"speed/{name}_per_second_per_device"] = ratio(rate, world_size)
    for name in ("step_time_s", "data_wait_s", "host_time_s", "device_time_s", "device_wait_s"):
        values[f"speed/{name}"] = ratio(getattr(steady, name), steady.steps)
    device_seconds = None if seconds is None else seconds * world_size * 1e12
    achieved = ratio(steady.flops, device_seconds)
    values["speed/model_tflops_per_device"] = achieved
    values["speed/mfu"] = ratio(None if achieved is None else 100 * achieved, peak_tflops)
    again = ratio(steady.recomputed_flops, device_seconds)
    if achieved is not None and again is not None:
        values["speed/hfu"] = ratio(100 * (achieved + again), peak_tflops)
    return known_only(values)


def ratio(part: float | None, whole: float | None) -> float | None:
    """The quotient; None where either is unknown, or the whole is 0."""
    return None if part is None or not whole else part / whole


def known_only(values: Mapping[str, float | None]) -> dict[str, float]:
    """The values that are known."""
    return {key: value for key, value in values.items() if value is not None}
