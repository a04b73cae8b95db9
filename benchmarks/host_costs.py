"""Two costs of the host that docs name: checksums of a checkpoint, and the empty shell of a 27B model. A CPU is enough.

python benchmarks/host_costs.py
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from geometry import qwen27b_config

from hf_speedkit.core.records import to_dict
from hf_speedkit.measure.environment import collect_environment
from hf_speedkit.trainer.weights import empty_model

RESULT = Path(__file__).resolve().parent / "results" / "host_costs.json"
CHUNK_BYTES = 64 << 20
"""What a checkpoint's manifest has a checksum for."""
REPETITIONS = 8

CHECKSUMS: dict[str, Callable[[bytes], object]] = {
    "zlib.crc32": zlib.crc32,
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "blake2b": lambda data: hashlib.blake2b(data).digest(),
}


def checksum_rates() -> dict[str, float]:
    """MB of a chunk in memory by second of one core: CPU time, so that other jobs on the machine do not enter."""
    chunk, rates = os.urandom(CHUNK_BYTES), {}
    for name, of in CHECKSUMS.items():
        began = time.process_time()
        for _ in range(REPETITIONS):
            of(chunk)
        rates[name] = REPETITIONS * CHUNK_BYTES / 1e6 / (time.process_time() - began)
    return rates


def shell_cost() -> dict[str, float]:
    """CPU seconds and MB of resident memory that the shell of the 27B takes."""
    empty_model(qwen27b_config(layers=4), dtype=torch.bfloat16)  # imports are not the shell's
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    shell = empty_model(qwen27b_config(layers=64), dtype=torch.bfloat16)
    seconds = time.process_time() - began
    return {
        "parameters": sum(parameter.numel() for parameter in shell.parameters()),
        "cpu_seconds": seconds,
        "memory_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6,
    }


def main() -> None:
    """Measure and write the result."""
    result = {
        "what": "checksum rates of one core, and the empty shell of the 27B geometry",
        "environment": to_dict(collect_environment()),
        "shell": shell_cost(),
        "checksums_mb_per_cpu_second": checksum_rates(),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
