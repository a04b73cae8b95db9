"""Seconds of the kernel proof at the sizes of a 27B model: caches empty, then filled, each in a process of its own.

    python benchmarks/probe_seconds.py --out benchmarks/results/2026-11-29_h200_probe_27b.json

Needs a GPU with the kernel packages; no network. Exit 1: a function is not fused, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEFINITIONS = {
    "process_s": "wall time of the whole process `hf-speedkit doctor --probe --json`, imports included",
    "probe_s": "wall time of the probe: layers made, small layers compared, every function run and compared",
    "first_call_s": "first forward and backward of a function, compilation and tuning included",
    "call_s": "a later forward and backward of the same sizes, waited for",
}


def probe(model: Path, caches: Path, slots: int) -> tuple[dict[str, Any], float]:
    """What doctor says in a fresh process with its caches in `caches`, and the seconds of that process."""
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TILELANG_CACHE_DIR": str(caches / "tilelang"),
    }
    start = "from hf_speedkit.cli.main import main; main()"
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", start, "doctor", str(model), "--probe", "--json", "--tokens-per-batch", str(slots)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise SystemExit(f"doctor ended with {done.returncode}:\n{done.stdout}")
    return json.loads(done.stdout.splitlines()[-1]), seconds


def result(runs: Mapping[str, tuple[Mapping[str, Any], float]], *, slots: int, measured_at: str) -> dict[str, Any]:
    """The file's content.

    Args:
        runs: "cold" and "warm" -> (doctor's JSON, seconds of its process).
        slots: of the packed row.
        measured_at: UTC, ISO 8601.
    """
    environments = [found["environment"] for found, _ in runs.values()]
    return {
        "kind": "probe",
        "format": 1,
        "what": "seconds of the kernel proof (hf-speedkit doctor --probe), with empty caches and with filled ones",
        "workload": f"qwen3.5-27B text geometry, 4 of 64 layers, bf16, one packed row of {slots:,} slots",
        "measured_at": measured_at,
        "environment": environments[0],
        "definitions": DEFINITIONS,
        "runs": [
            {
                "caches": state,
                "process_s": round(seconds, 2),
                "probe_s": round(found["probe_s"], 2),
                "new_files": {cache["compiler"]: cache["new_files"] for cache in found["caches"]},
                "put_in_place": found["changed"],
                "functions": [
                    {key: check[key] for key in ("function", "layer", "verdict", "evidence", "first_call_s", "call_s")}
                    for check in found["checks"]
                ],
            }
            for state, (found, seconds) in runs.items()
        ],
    }


def main() -> None:
    """Measure twice and write one file."""
    from geometry import qwen27b_config

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True, type=Path, help="the result file")
    parser.add_argument("--tokens-per-batch", type=int, default=8192, help="slots of a packed row")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, caches = Path(folder) / "model", Path(folder) / "caches"
        qwen27b_config().save_pretrained(model)
        runs = {state: probe(model, caches, given.tokens_per_batch) for state in ("cold", "warm")}
    measured_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    text = json.dumps(result(runs, slots=given.tokens_per_batch, measured_at=measured_at), indent=1, allow_nan=False)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(text + "\n")
    for state, (found, seconds) in runs.items():
        print(f"{state}: process {seconds:.1f} s, probe {found['probe_s']:.1f} s")


if __name__ == "__main__":
    main()
