"""Does the fast path learn what the plain path learns? Two loss curves, and how far seeds alone move the plain one.

    python benchmarks/accuracy.py tiny --out FILE.json          # the tiny hybrid, 200 steps
    python benchmarks/accuracy.py 27b-8 --out FILE.json         # the 27B geometry cut to 8 layers, 50 steps, one GPU
    python benchmarks/accuracy.py tiny --device cpu --steps 20  # the same path without a GPU; prints only

Both are SpeedSFTTrainer on the same packed rows of documents that can be learned, in the same order. The fast path
has all defaults; the plain path has every optimisation that touches arithmetic off (`PLAIN`). Each seed makes other
initial weights. Per step and seed, the gap is the difference of the two paths' losses; the noise is the difference
between the plain paths of two seeds. The fast path passes if its gap is no larger than the noise, over all steps and at
the end, for every seed. A repetition of the plain path with the same seed stands beside it: what the device varies by.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

PLAIN: Mapping[str, Any] = {
    "fused_layers": False,
    "packed_attention": "keep",
    "loss_head": "trl",
    "fused_optimizer": False,
    "activation_checkpointing_layers": "all",
    "kernel_assertion": "off",
    "isolation_check": False,
}
"""What the plain path switches off; settings that this version does not have are left out."""

LANGUAGE_TOKENS = 512
"""Tokens that the documents use; few, so that 50 steps learn much of what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is learned, and how fast."""

    geometry: str
    layers: int
    slots: int
    mean_tokens: float
    steps: int
    learning_rate: float


TASKS = {
    "tiny": Task(geometry="tiny", layers=4, slots=1024, mean_tokens=200, steps=200, learning_rate=2e-3),
    "27b-8": Task(geometry="27b", layers=8, slots=8192, mean_tokens=1258.9, steps=50, learning_rate=1e-4),
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="commit of the tree, where git is not at hand")
    return parser.parse_args(argv)


def loss_curve(task: Task, *, steps: int, seed: int, device: str, settings: Mapping[str, Any]) -> list[float]:
    """The loss of every step of one run."""
    import torch
    from geometry import GEOMETRIES, learnable_dataset, random_model, stub_tokenizer

    from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer

    config = GEOMETRIES[task.geometry](task.layers)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    documents = int(steps * task.slots / task.mean_tokens * 1.1) + 10
    known = {one.name for one in fields(SpeedSFTConfig)}
    with tempfile.TemporaryDirectory() as directory:
        trainer = SpeedSFTTrainer(
            model=random_model(config, device=device, dtype=dtype, seed=seed),
            args=SpeedSFTConfig(
                output_dir=f"{directory}/run",
                max_steps=steps,
                tokens_per_batch=task.slots,
                learning_rate=task.learning_rate,
                lr_scheduler_type="cosine",
                warmup_steps=max(1, steps // 10),
                optim="adamw_torch_fused" if device == "cuda" else "adamw_torch",
                bf16=False,
                use_cpu=device == "cpu",
                activation_checkpointing=True,
                activation_checkpointing_kwargs={"use_reentrant": False},
                logging_steps=1,
                save_strategy="no",
                disable_tqdm=True,
                report_to="none",
                **{key: value for key, value in settings.items() if key in known},
            ),
            train_dataset=learnable_dataset(
                documents, vocabulary=LANGUAGE_TOKENS, longest=task.slots, mean_tokens=task.mean_tokens
            ),
            processing_class=stub_tokenizer(),
        )
        trainer.train()
        losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    del trainer
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()  # the next run's weights need the room
    return losses


def judge(plain: Sequence[Sequence[float]], fast: Sequence[Sequence[float]], again: Sequence[float]) -> dict[str, Any]:
    """Whether the fast curves lie within the noise of the plain ones.

    Args:
        plain: a curve for each seed, two or more.
        fast: the same seeds.
        again: the plain path of the first seed once more.

    Returns:
        Mean and final gap of the worst seed, mean and final noise (of the two seeds that are nearest to one another),
        the repetition's gap, and `passed`.
    """
    pairs = list(combinations(plain, 2))
    found = {
        "gap": max(_apart(a, b) for a, b in zip(fast, plain, strict=True)),
        "noise": min(_apart(a, b) for a, b in pairs),
        "final_gap": max(abs(_final(a) - _final(b)) for a, b in zip(fast, plain, strict=True)),
        # Ends of curves are single numbers that can fall together by chance: the widest pair is their noise.
        "final_noise": max(abs(_final(a) - _final(b)) for a, b in pairs),
        "repetition_gap": _apart(again, plain[0]),
    }
    learned = min(curve[0] - _final(curve) for curve in plain)
    passed = found["gap"] <= found["noise"] and found["final_gap"] <= found["final_noise"]
    return {**found, "learned": learned, "passed": passed}


def _apart(first: Sequence[float], second: Sequence[float]) -> float:
    return fmean(abs(a - b) for a, b in zip(first, second, strict=True))


def _final(curve: Sequence[float]) -> float:
    return fmean(curve[-max(1, len(curve) // 10) :])


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """All curves and the verdict, with where they come from."""
    from dataclasses import asdict

    from hf_speedkit.core.records import to_dict
    from hf_speedkit.measure.environment import collect_environment

    task = TASKS[given.task]
    steps = given.steps or task.steps
    common: dict[str, Any] = {"steps": steps, "device": given.device}
    plain, fast = [], []
    for seed in range(given.seeds):
        plain.append(loss_curve(task, seed=seed, settings=PLAIN, **common))
        fast.append(loss_curve(task, seed=seed, settings={}, **common))
        print(f"seed {seed}: plain {plain[-1][-1]:.4f}, fast {fast[-1][-1]:.4f} after {steps} steps", flush=True)
    again = loss_curve(task, seed=0, settings=PLAIN, **common)
    environment = to_dict(collect_environment())
    return {
        "what": f"loss of the fast path beside the plain path, {given.task}, {steps} steps",
        "settings": {"task": asdict(task), **common, "plain": dict(PLAIN), "language_tokens": LANGUAGE_TOKENS},
        "seeds": {"weights": list(range(given.seeds)), "data": 0},
        "environment": {**environment, "commit": given.commit or environment["commit"]},
        "verdict": judge(plain, fast, again),
        "plain": plain,
        "fast": fast,
        "plain_again": again,
    }


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; 1 where the fast path does not pass."""
    given = arguments(argv)
    result = measure(given)
    verdict = result["verdict"]
    print(json.dumps(verdict))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items()]
        given.out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
