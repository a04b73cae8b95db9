"""The memory plan against torch's own peak: three steps of the 8-layer cut of the 27B on one GPU, in five settings.

    python benchmarks/memory_plan.py --out benchmarks/results/2026-11-29_h200_memory_plan.json

Each setting is planned from the job's settings as SpeedSFTTrainer plans it before loading, then trained. The peak is
that of the steps after the first, when the optimizer's moments are there; what the process held before the model was
made is taken off and stated. They take about two minutes with warm kernels; a setting that fails is recorded with
its error, and the exit code is 1 if it did or if a plan is more than 10 % off.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

LAYERS, SLOTS, STEPS, TARGET = 8, 8192, 3, 0.10
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "pure bf16, checkpointing": {},
    "pure bf16, no checkpointing": {"activation_checkpointing": False},
    "pure bf16, every second layer": {
        "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
    },
    "LoRA r16, checkpointing": {"lora": 16},
    "fp32 master weights, checkpointing": {"dtype": "float32", "bf16": True},
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--commit", help="commit of the tree, where git is not at hand")
    return parser.parse_args(argv)


def compare(name: str, config: Any, *, slots: int = SLOTS) -> dict[str, Any]:
    """Plan one setting, train three steps of it, and put both side by side.

    Args:
        name: one of `SETTINGS`.
        config: the model's configuration.
        slots: of a row.
    """
    import torch

    began = time.perf_counter()
    before = torch.cuda.memory_allocated()
    with tempfile.TemporaryDirectory() as directory:
        planned, trained = _run(dict(SETTINGS[name]), config, slots, directory)
    gc.collect()
    torch.cuda.empty_cache()
    measured = trained["steps_peak"] - before
    return {
        "setting": name,
        "planned_gib": planned.allocated / 2**30,
        "measured_gib": measured / 2**30,
        "planned_over_measured": planned.allocated / measured,
        "phase": planned.phase,
        "parts_gib": {part: size / 2**30 for part, size in planned.parts.items()},
        "job": asdict(planned.job),
        "kept_as": asdict(planned.setting),
        "whole_run_peak_gib": trained["run_peak"] / 2**30,
        "reserved_gib": trained["reserved"] / 2**30,
        "beside_the_allocator_gib": trained["beside"] / 2**30,
        "held_before_gib": before / 2**30,
        "changed_layers": trained["changed_layers"],
        "loss": trained["loss"],
        "seconds": time.perf_counter() - began,
    }


def _run(changes: dict[str, Any], config: Any, slots: int, directory: str) -> tuple[Any, dict[str, Any]]:
    import torch
    from geometry import chat_dataset, random_model, stub_tokenizer

    from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
    from hf_speedkit.core.memory_plan import plan_memory
    from hf_speedkit.trainer.memory.settings import planned_job

    rank, dtype = changes.pop("lora", None), changes.pop("dtype", "bfloat16")
    config.save_pretrained(Path(directory) / "config")
    args = SpeedSFTConfig(**_settings(changes, slots, directory))
    adapters = _adapters(rank)
    planned = planned_job(
        str(Path(directory) / "config"), args, peft_config=adapters, weight_bits=16, dtype=dtype, revision=None
    )
    if isinstance(planned, str):
        raise RuntimeError(f"nothing was planned: {planned}")
    plan = plan_memory(planned.sizes(planned.setting, planned.job), planned.setting, planned.job)
    torch.cuda.reset_peak_memory_stats()
    trainer = SpeedSFTTrainer(
        model=random_model(config, device="cuda", dtype=getattr(torch, dtype)),
        args=args,
        train_dataset=chat_dataset(STEPS * 10 + 20, vocabulary=config.vocab_size, longest=slots),
        processing_class=stub_tokenizer(),
        peft_config=adapters,
        callbacks=[_peak_of_steps()],
    )
    peaks = next(callback for callback in trainer.callback_handler.callbacks if hasattr(callback, "first_peak"))
    trainer.train()
    free, total = torch.cuda.mem_get_info()
    result = {
        "steps_peak": torch.cuda.max_memory_allocated(),
        "run_peak": max(peaks.first_peak, torch.cuda.max_memory_allocated()),
        "reserved": torch.cuda.memory_reserved(),
        "beside": total - free - torch.cuda.memory_reserved(),
        "changed_layers": list(trainer.summary().changed_layers),
        "loss": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
    trainer.accelerator.free_memory()
    return plan, result


def _settings(changes: Mapping[str, Any], slots: int, directory: str) -> dict[str, Any]:
    common = {
        "output_dir": str(Path(directory) / "run"),
        "tokens_per_batch": slots,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-5,
        "optim": "adamw_torch_fused",
        "bf16": False,
        "activation_checkpointing": True,
        "activation_checkpointing_layers": "all",  # auto would fill the memory that is left
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "isolation_check": False,  # not what is measured here
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
    }
    return {**common, **changes}


def _adapters(rank: int | None) -> Any:
    if rank is None:
        return None
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def _peak_of_steps() -> Any:
    """A callback that starts the measurement at the second step."""
    import torch
    from transformers import TrainerCallback

    class PeakOfSteps(TrainerCallback):
        first_peak = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                self.first_peak = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()

    return PeakOfSteps()


def main(argv: list[str] | None = None) -> int:
    """Compare, write, and print one line a setting."""
    given = arguments(argv)
    from geometry import qwen27b_config

    from hf_speedkit.core.records import to_dict
    from hf_speedkit.measure.environment import collect_environment

    rows = []
    for name in given.settings:
        try:
            rows.append(compare(name, qwen27b_config(given.layers)))
        except Exception as error:  # noqa: BLE001 (the other settings are worth having)
            rows.append({"setting": name, "error": f"{type(error).__name__}: {error}"})
        print(json.dumps(rows[-1], default=str), flush=True)
    result = {
        "what": "memory plan against torch.cuda.max_memory_allocated, depth-cut 27B on one GPU",
        "settings": {"layers": given.layers, "slots": SLOTS, "steps": STEPS, "seeds": {"weights": 0, "data": 0}},
        "commit": given.commit,
        "environment": to_dict(collect_environment()),
        "target": TARGET,
        "rows": rows,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    good = [abs(row.get("planned_over_measured", 9.0) - 1) <= TARGET for row in rows]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
