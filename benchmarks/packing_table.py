"""The packing study's tables from this code, beside TRL's own pack_dataset in the same run; a CPU is enough.

    python benchmarks/packing_table.py --out benchmarks/results/DATE_packing_table.json [--scale-documents 10000000]

Lengths follow benchmarks/geometry.py (ultrachat_200k, reconstructed); the long rows use a heavy tail (see `LONG_CHAT`).
Waiting is a model of compute alone: FLOPs of the 27B geometry, ranks that start a step together.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from bisect import bisect_right
from datetime import date
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, disable_progress_bars
from geometry import chat_dataset, chat_lengths, qwen27b_config

from hf_speedkit.core.flops import model_flops
from hf_speedkit.core.records import to_dict
from hf_speedkit.measure.environment import collect_environment
from hf_speedkit.packing.balance import deal_packs
from hf_speedkit.packing.forecast import quadratic_per_token
from hf_speedkit.packing.planner import count_padded_batches, document_order
from hf_speedkit.packing.sampler import PackedBatchSampler
from hf_speedkit.packing.strategies import best_fit_decreasing, fifo_close, next_fit
from hf_speedkit.packing.stream import PackedStream

# Whole shared conversations, measured: quantiles of their lengths in tokens.
LONG_CHAT = {
    0: 16, 0.01: 35, 0.05: 136, 0.1: 235, 0.2: 377, 0.3: 539, 0.4: 736, 0.5: 1028, 0.6: 1482, 0.7: 2118, 0.8: 3603,
    0.9: 6499, 0.95: 10751, 0.98: 17941, 0.99: 27496, 0.999: 93197, 1: 224841,
}  # fmt: skip


def long_chat_lengths(documents: int, *, longest: int, seed: int = 0) -> list[int]:
    """Draw lengths by interpolating uniform numbers through `LONG_CHAT`, cut at `longest`."""
    levels, values = list(LONG_CHAT), list(LONG_CHAT.values())
    draw = random.Random(seed).random
    lengths = []
    for _ in range(documents):
        level = draw()
        upper = bisect_right(levels, level)
        share = (level - levels[upper - 1]) / (levels[upper] - levels[upper - 1])
        lengths.append(max(1, min(longest, int(values[upper - 1] + share * (values[upper] - values[upper - 1])))))
    return lengths


def timed(call: Any) -> tuple[Any, float]:
    """The result of a call and the CPU seconds it took: the machine may be busy with other work."""
    began = time.process_time()
    result = call()
    return result, time.process_time() - began


def trl_dataset(lengths: list[int], directory: str) -> Dataset:
    """Documents of the given lengths; tokens are zeros of one byte, so that little has to be written."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    tokens = pa.LargeListArray.from_arrays(offsets, pa.array(np.zeros(int(offsets[-1]), dtype=np.int8)))
    path = Path(directory) / "documents.parquet"
    pq.write_table(pa.table({"input_ids": tokens}), path)
    return Dataset.from_parquet(str(path), cache_dir=directory)


def batching_table(lengths: list[int], slots: int, seed: int) -> list[dict[str, Any]]:
    """Batches, fill and CPU seconds of each way to batch the same documents."""
    from trl import pack_dataset

    directory = tempfile.TemporaryDirectory()
    dataset = trl_dataset(lengths, directory.name)
    order = document_order(len(lengths), seed=seed, epoch=0)
    in_order = range(len(lengths))
    ways = {
        "2-D padded, dataset order": lambda: count_padded_batches(lengths, slots),
        "next-fit, dataset order": lambda: len(next_fit(lengths, in_order, slots)),
        "TRL 1.16 pack_dataset bfd": lambda: len(pack_dataset(dataset, slots, "bfd")),
        "ours: best-fit decreasing, blocks of 1,000": lambda: len(best_fit_decreasing(lengths, in_order, slots, 1000)),
        "ours: best-fit decreasing, windows of 32,768": lambda: len(best_fit_decreasing(lengths, order, slots)),
        "ours: fifo_close, window 128": lambda: len(fifo_close(lengths, order, slots)),
    }
    rows = []
    for name, call in ways.items():
        batches, seconds = timed(call)
        rows.append(
            {"batching": name, "batches": batches, "full": sum(lengths) / slots / batches, "cpu_seconds": seconds}
        )
    directory.cleanup()
    bound = -(-sum(lengths) // slots)
    rows.append({"batching": "bound", "batches": bound, "full": sum(lengths) / slots / bound, "cpu_seconds": None})
    return rows


def waiting_table(lengths: list[int], slots: int, quadratic: float, seed: int) -> list[dict[str, Any]]:
    """Step time / ideal for 8 and 32 ranks: ideal is no padding and no waiting."""
    order = document_order(len(lengths), seed=seed, epoch=0)

    def cost(pack: tuple[int, ...], padded_to: int = 0) -> float:
        held = [lengths[document] for document in pack]
        rest = max(0, padded_to - sum(held))
        return sum(held) + rest + quadratic * (sum(length * length for length in held) + rest * rest)

    ideal = sum(length + quadratic * length * length for length in lengths)
    padded, rows, longest = [], 0, 0
    for document in order:
        if (rows + 1) * max(longest, lengths[document]) > slots and rows:
            padded.append(rows * (longest + quadratic * longest * longest))
            rows, longest = 0, 0
        rows, longest = rows + 1, max(longest, lengths[document])
    padded.append(rows * (longest + quadratic * longest * longest))
    fifo = fifo_close(lengths, order, slots)
    found = []
    for ranks in (8, 32):
        steps = -(-len(fifo) // ranks)
        windows = {
            window: deal_packs(
                fifo, lengths, tokens_per_batch=slots, steps=steps, world_size=ranks, gradient_accumulation_steps=1,
                window_steps=window,
            )
            for window in (1, 8)
        }  # fmt: skip
        ways = {
            "2-D padded": _steps(padded, ranks),
            "next-fit, padding-free": _steps([cost(pack) for pack in next_fit(lengths, order, slots)], ranks),
            "best-fit in blocks of 1,000, padding-free": _steps(
                [cost(pack) for pack in best_fit_decreasing(lengths, order, slots, 1000)], ranks
            ),
            "fifo_close, fixed rows": [[cost(pack, slots) for pack in slot] for slot in windows[1]],
            "+ sorted in windows of 8 steps": [[cost(pack, slots) for pack in slot] for slot in windows[8]],
        }
        for name, step_costs in ways.items():
            waited = ranks * sum(max(step) for step in step_costs)
            found.append({"batching": name, "ranks": ranks, "slots": slots, "step_time_over_ideal": waited / ideal})
    return found


def _steps(costs: list[float], ranks: int) -> list[list[float]]:
    left = iter(costs)
    return [step for _ in range(-(-len(costs) // ranks)) if (step := list(islice(left, ranks)))]


def scale(documents: int, ranks: int) -> dict[str, Any]:
    """What one rank of many pays to plan an epoch: CPU seconds (one thread) and this process's peak memory so far."""
    lengths, drawing_s = timed(lambda: chat_lengths(documents, longest=8192))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sampler, planning_s = timed(lambda: PackedBatchSampler(lengths, tokens_per_batch=8192, world_size=ranks, rank=1))
    rows, dealing_s = timed(lambda: sum(1 for _ in sampler))
    return {
        "documents": documents,
        "ranks": ranks,
        "drawing_cpu_s": drawing_s,
        "planning_cpu_s": planning_s,
        "dealing_cpu_s": dealing_s,
        "rows_of_a_rank": rows,
        "packs": len(sampler.plan(0).packs),
        "full": sampler.plan(0).packing_efficiency,
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "peak_memory_before_planning_gib": before,
    }


def streaming(documents: int) -> dict[str, Any]:
    """What a packed stream of tokenized documents costs: CPU seconds, fill, and the size of its state."""
    dataset = chat_dataset(documents, vocabulary=1000, longest=8192)
    source = dataset.to_iterable_dataset(num_shards=4)
    _, source_s = timed(lambda: sum(1 for _ in source))
    stream = PackedStream(source, tokens_per_batch=8192)
    rows, seconds = timed(lambda: list(takewhile(lambda row: row.documents, stream)))
    tokens = rows[-1].state.report.real_tokens
    return {
        "documents": documents,
        "tokens": tokens,
        "rows": len(rows),
        "full": tokens / 8192 / len(rows),
        "cpu_seconds": seconds,
        "source_alone_cpu_seconds": source_s,
        "tokens_per_cpu_second": tokens / seconds,
        "state_bytes": len(json.dumps(rows[len(rows) // 2].state.to_dict())),
    }


def unequal_shares(documents: int, ranks: int, seed: int) -> dict[str, Any]:
    """Empty rows at the end of a pass where each rank has as many documents as the others: the fullest rank decides.

    The tokens of a share are drawn from the normal distribution with the mean and spread of the chat lengths.
    """
    lengths = np.array(chat_lengths(1_000_000, longest=8192, seed=seed))
    share = documents // ranks
    tokens = np.random.default_rng(seed).normal(lengths.mean() * share, lengths.std() * share**0.5, ranks)
    return {
        "documents": documents,
        "ranks": ranks,
        "documents_per_rank": share,
        "rows_per_rank": float(tokens.mean() / 8192),
        "empty_share": float(tokens.max() / tokens.mean() - 1),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--documents", type=int, default=207_865)
    parser.add_argument("--scale-documents", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    disable_progress_bars()

    flops = model_flops(qwen27b_config().to_dict())
    assert flops is not None
    quadratic = quadratic_per_token(flops)
    # First, so that its peak of memory is its own.
    scaled = scale(given.scale_documents, given.ranks) if given.scale_documents else None
    lengths = chat_lengths(given.documents, longest=8192, seed=given.seed)
    table = batching_table(lengths, 8192, given.seed)
    padded = table[0]["batches"]
    for row in table:
        seconds = "" if row["cpu_seconds"] is None else f"{row['cpu_seconds']:8.2f} s"
        print(
            f"{row['batching']:<48}{row['batches']:>8,}{1 - row['batches'] / padded:>8.1%}{row['full']:>9.2%}{seconds}"
        )
    long = long_chat_lengths(given.documents // 4, longest=65_536, seed=given.seed)
    waiting = waiting_table(lengths, 8192, quadratic, given.seed) + waiting_table(long, 65_536, quadratic, given.seed)
    for row in waiting:
        print(f"{row['slots']:>6} {row['ranks']:>3} ranks  {row['batching']:<44}{row['step_time_over_ideal']:.3f}")
    streamed = streaming(6_000)
    shares = unequal_shares(1_000_000_000, given.ranks, given.seed)
    print(json.dumps({"scale": scaled, "streaming": streamed, "unequal_shares": shares}, indent=1))
    result = {
        "what": "packing table",
        "date": date.today().isoformat(),
        "settings": {key: value for key, value in vars(given).items() if key != "out"},
        "environment": to_dict(collect_environment()),
        "quadratic_per_token": quadratic,
        "documents": {"documents": len(lengths), "tokens": sum(lengths), "source": "benchmarks/geometry.py"},
        "batchings": table,
        "waiting": waiting,
        "scale": scaled,
        "streaming": streamed,
        "unequal_shares": shares,
    }
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
