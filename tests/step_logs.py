"""Step logs for tests, written line by line in the form of the sink. Numbers are made up; none is a measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "python": "3.11.7",
    "packages": {"torch": "2.11.0+cu130", "transformers": "5.23.0"},
    "devices": ["NVIDIA Test", "NVIDIA Test"],
    "driver": "580.1",
    "cpu_count": 16,
    "commit": "abc123",
}
WINDOW = 5


def session(step: int = 0, **other: Any) -> dict[str, Any]:
    return {"kind": "session", "format": 1, "step": step, "environment": ENVIRONMENT, **other}


def step(number: int, seconds: float = 0.5, **other: Any) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "micro_batches": 1,
        "tokens": {"slots": 1000, "real": 900, "target": 600, "documents": 4, "squared_lengths": 250_000},
        "step_time_s": seconds,
        "data_wait_s": 0.02,
        "host_time_s": 0.3,
        "eval_time_s": 0.0,
        "save_time_s": 0.0,
        "log_time_s": 0.0,
        "excluded": None,
        "nonfinite": False,
        **other,
    }


def window(number: int, rate: float | None = 3600.0, utilization: float | None = 98.0, **other: Any) -> dict[str, Any]:
    metrics: dict[str, Any] = {"loss": 4 - number / 100, "speed/steady_steps": WINDOW, "speed/excluded_steps": 0}
    if rate is not None:
        metrics |= {
            "speed/real_tokens_per_second": rate,
            "speed/real_tokens_per_second_per_device": rate / 2,
            "speed/slots_per_second": rate / 0.9,
            "speed/slots_per_second_per_device": rate / 1.8,
            "speed/step_time_s": 1800 / rate,
            "speed/data_wait_s": 0.02,
            "speed/host_time_s": 0.3,
            "speed/device_wait_s": max(0.0, 1800 / rate - 0.35),
            "speed/device_time_s": 1800 / rate - 0.03,
            "speed/mfu": rate / 100,
        }
    if utilization is not None:
        metrics |= {"speed/gpu_utilization": utilization, "speed/gpu_memory_gib": 61.5}
    metrics |= {f"speed/total_{name}": number * count for name, count in
                (("slots", 2000), ("real_tokens", 1800), ("target_tokens", 1200), ("documents", 8))}  # fmt: skip
    return {"kind": "window", "step": number, "metrics": {**metrics, **other}}


def run(steps: int = 40, *, rate: float = 3600.0, start: int = 0) -> list[dict[str, Any]]:
    """A session: a window every WINDOW steps, the first step warm-up."""
    lines = [session(start)]
    for number in range(start + 1, start + steps + 1):
        first = number == start + 1
        lines.append(step(number, 1800 / rate, excluded="warm-up" if first else None))
        if number % WINDOW == 0:
            lines.append(window(number, rate))
    return lines


def write(folder: Path, lines: list[dict[str, Any]], *, tail: str = "") -> Path:
    """A run directory with a step log in it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "speedkit_steps.jsonl").write_text(text + tail)
    return folder
