"""Costs of the host that documents name: checksums of a checkpoint, the empty shell of a 27B, a packed row. CPU only.

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
from statistics import median

import numpy as np
import torch
from datasets import Dataset
from geometry import chat_lengths, qwen27b_config

from hf_speedkit.core.records import to_dict
from hf_speedkit.measure.environment import collect_environment
from hf_speedkit.packing.collator import PackedCollator
from hf_speedkit.packing.documents import prepare_documents
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


def cpu_seconds(call: Callable[[], object], times: int) -> float:
    """CPU seconds of a call: the median of so many, after one that pays for what is made once."""
    call()
    seconds = []
    for _ in range(times):
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began)
    return median(seconds)


def collate_ms() -> dict[str, float]:
    """Making one row of 8,192 slots out of 7 documents, given as arrays and as lists."""
    collator = PackedCollator(pad_token_id=0, tokens_per_batch=8192)
    arrays = [{"input_ids": np.arange(length)} for length in (1170, 900, 1300, 700, 1500, 1200, 1400)]
    lists = [{"input_ids": row["input_ids"].tolist()} for row in arrays]
    return {
        name: 1e3 * cpu_seconds(lambda r=rows: collator(r), 200)
        for name, rows in (("arrays", arrays), ("lists", lists))
    }


def scan_ns_a_token() -> float:
    """Counting documents and targets of a tokenized data set before it is packed, which reads every label once."""
    ids = [list(range(length)) for length in chat_lengths(2_000, longest=8192)]
    dataset = Dataset.from_dict({"input_ids": ids, "labels": ids})
    return 1e9 * cpu_seconds(lambda: prepare_documents(dataset, tokens_per_batch=8192), 10) / sum(map(len, ids))


def main() -> None:
    """Measure and write the result."""
    result = {
        "what": "checksum rates of one core, the shell of the 27B geometry, a packed row, a data set",
        "environment": to_dict(collect_environment()),
        "shell": shell_cost(),
        "checksums_mb_per_cpu_second": checksum_rates(),
        "collate_ms": collate_ms(),
        "scan_ns_a_token": scan_ns_a_token(),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
