"""A result of a bench, as one GPU run would give it."""

from __future__ import annotations

from hf_speedkit.core.bench_records import BenchResult
from hf_speedkit.core.records import Environment, TokenCounts


def bench(*, name="a", workload="w", speed=100.0, repetition=1, **rates) -> BenchResult:
    """A result that could be committed."""
    return BenchResult(
        name=name,
        workload=workload,
        repetition=repetition,
        settings={"steps": 4},
        seeds={"data": 0},
        measured_at="2026-11-29T12:00:00+00:00",
        environment=Environment(
            python="3.12.3",
            packages={"torch": "2.11.0", "transformers": "5.23.0", "trl": "1.16.0"},
            devices=("NVIDIA H200",),
            driver="580.1",
            cpu_count=16,
            commit="a" * 40,
        ),
        world_size=1,
        parameters=10,
        tokens=TokenCounts(slots=100, real=90, target=80, documents=3, squared_lengths=2700),
        rates={"speed/real_tokens_per_second": speed, **{f"speed/{key}": value for key, value in rates.items()}},
        steady_steps=3,
        session_steps=4,
        train_call_s=5.0,
        log=({"loss": 2.0, "speed/gpu_sm_clock_mhz": 1600.0},),
    )
