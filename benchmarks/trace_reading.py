"""What reading a trace costs: CPU time, peak memory and linearity, each size in a fresh process.

    python benchmarks/trace_reading.py                         # 2.24 M events, 0.6 GB of JSON, and a quarter of it
    python benchmarks/trace_reading.py --launches 20000        # quick
    python benchmarks/trace_reading.py --read FILE             # one file, one line of JSON

The file has the proportions of a published traced step of 269,448 launches (launches : CPU operations : flows =
1 : 5.3 : 1) in the layout torch 2.13 writes. The result goes to benchmarks/results/trace_reading.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

RESULTS = Path(__file__).parent / "results" / "trace_reading.json"
LAUNCHES = 272_000
REPETITIONS = 3

OPERATORS = ("aten::bmm", "aten::mul", "aten::copy_", "aten::empty", "aten::matmul", "aten::add")
KERNEL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, at::detail::Array<char*, 3> >"
    "(int, at::native::AddFunctor<float>)"
)
STEP_US = 53  # per launch, as in that step: 14.4 s / 269,448


def write_trace(path: Path, launches: int) -> int:
    """Write a trace with that many launches; returns the size of its JSON in bytes."""
    size = 0
    with gzip.open(path, "wt", compresslevel=1) as file:
        head = '{\n  "schemaVersion": 1,\n  "deviceProperties": [\n    {"id": 0, "name": "synthetic"}\n  ],\n'
        size += file.write(head + '  "displayTimeUnit": "ms",\n  "traceEvents": [\n' + _mark(launches))
        for i in range(launches):
            size += file.write("".join(_block(i)))
        size += file.write('\n  ],\n  "traceName": "synthetic"\n}\n')
    return size


def _mark(launches: int) -> str:
    return (
        '  {\n    "ph": "X", "cat": "user_annotation", "name": "ProfilerStep#20", "pid": 1, "tid": 1,\n'
        f'    "ts": 2400000000000.000, "dur": {launches * STEP_US}.000\n  }}'
    )


def _block(i: int) -> list[str]:
    """One launch with the operators around it."""
    base = 2_400_000_000_000.0 + i * STEP_US
    count = 5 + (i % 10 < 3)
    lines = [
        f',\n  {{\n    "ph": "X", "cat": "cpu_op", "name": "{OPERATORS[(i + j) % 6]}", "pid": 4052, "tid": 4052,\n'
        f'    "ts": {base + j * 0.5:.3f}, "dur": {40 - j * 5:.3f},\n    "args": {{\n'
        f'      "External id": {6 * i + j},"Record function id": 0, '
        + (f'"Sequence number": {i}, "Fwd thread id": 0, ' if j < 3 else "")
        + f'"Ev Idx": {6 * i + j}\n    }}\n  }}'
        for j in range(count)
    ]
    lines.append(
        ',\n  {\n    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 4052, "tid": 4052,\n'
        f'    "ts": {base + 6:.3f}, "dur": 4.125,\n    "args": {{\n'
        f'      "External id": {6 * i}, "cbid": 211, "correlation": {i + 1}\n    }}\n  }}'
    )
    lines.append(
        f',\n  {{\n    "ph": "X", "cat": "kernel", "name": "{KERNEL}", "pid": 0, "tid": 7,\n'
        f'    "ts": {base + 12:.3f}, "dur": 38.016,\n    "args": {{\n      "External id": {6 * i}, "queued": 0, '
        f'"device": 0, "context": 1,\n      "stream": 7, "correlation": {i + 1},\n      "registers per thread": 32, '
        '"shared memory": 0,\n      "blocks per SM": 0.030303, "warps per SM": 0.121212,\n      "grid": [4, 1, 1], '
        '"block": [128, 1, 1],\n      "est. achieved occupancy %": 0\n    }\n  }'
    )
    for phase, ts in (("s", base + 6), ("f", base + 12)) if i % 50 == 0 else (("s", base + 6),):
        lines.append(
            f',\n  {{\n    "ph": "{phase}", "id": {i + 1}, "pid": 4052, "tid": 4052, "ts": {ts:.3f},\n'
            '    "cat": "ac2g", "name": "ac2g", "bp": "e"\n  }'
        )
    return lines


def read(path: Path) -> dict[str, float]:
    """CPU seconds (process time of the reading, imports apart) and peak memory of this process."""
    from hf_speedkit.measure.trace import summarize_trace

    began = time.process_time()
    summary = summarize_trace(path)
    return {
        "events": summary.events,
        "launches": summary.launches or 0,
        "cpu_s": round(time.process_time() - began, 3),
        "peak_memory_gb": round(peak_memory_bytes() / 1e9, 3),
    }


def peak_memory_bytes() -> int:
    """Peak resident memory of this program. getrusage's keeps the peak of the process that started it (Linux)."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_in_fresh_process(path: Path) -> dict[str, float]:
    """`read` in a process of its own: peak memory is per process."""
    command = [sys.executable, __file__, "--read", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def measure(launches: int, folder: Path) -> dict[str, object]:
    """One size: written once, read `REPETITIONS` times."""
    path = folder / f"{launches}.json.gz"
    json_bytes = write_trace(path, launches)
    runs = [read_in_fresh_process(path) for _ in range(REPETITIONS)]
    path.unlink()
    return {
        "events": runs[0]["events"],
        "launches": launches,
        "json_mb": round(json_bytes / 1e6, 1),
        "cpu_s_median": median(run["cpu_s"] for run in runs),
        "cpu_s_all": [run["cpu_s"] for run in runs],
        "peak_memory_gb": max(run["peak_memory_gb"] for run in runs),
        "cpu_us_per_event": round(median(run["cpu_s"] for run in runs) / runs[0]["events"] * 1e6, 3),
    }


def main() -> None:
    """Measure both sizes and write the result with its provenance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=LAUNCHES)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.read is not None:
        print(json.dumps(read(given.read)))
        return
    from hf_speedkit.core.records import to_dict
    from hf_speedkit.measure.environment import collect_environment

    with tempfile.TemporaryDirectory() as folder:
        sizes = [measure(launches, Path(folder)) for launches in (given.launches // 4, given.launches)]
    result = {
        "what": "summarize_trace of one synthetic traced step, process CPU time and peak resident memory",
        "command": "python benchmarks/trace_reading.py",
        "environment": to_dict(collect_environment()),
        "msgspec": _version("msgspec"),
        "repetitions": REPETITIONS,
        "sizes": sizes,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(sizes, indent=1))


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
