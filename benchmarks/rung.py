"""One run of one rung in a process of its own: a real Trainer run, its BenchResult as JSON.

    python benchmarks/rung.py speedkit --out result.json [--workload 27b-8] [--steps 30] [--trace 25]
    torchrun --nproc_per_node 2 benchmarks/rung.py speedkit --out result.json --layers 64 --steps 12      # FSDP2

benchmarks/ladder.py calls it. Rungs and workloads: benchmarks/rungs.py. All train on the same documents of chat
lengths (benchmarks/geometry.py), bf16 weights, AdamW, activation checkpointing on every layer unless the rung says
otherwise. The figures are those that ThroughputCallback makes; what it calls warm-up is left out by its rule, not by
hand. The rungs `seed` and `stock-fallback` hide the kernel packages, as if they were not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rungs import RUNGS, WORKLOADS, Rung, Workload

SEED = 0
FSDP2 = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "reshard_after_forward": True,
        "transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"],
        "cpu_ram_efficient_loading": False,  # the weights are made on the device, the same on every rank
    },
}
# Unlike a missing package or memory, a setting of another version is no failure: the ladder goes on without the rung.
UNKNOWN_SETTING = 3


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rung", choices=RUNGS, metavar="RUNG", help=", ".join(RUNGS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workload", choices=WORKLOADS, default="27b-8")
    parser.add_argument("--layers", type=int, help="instead of the workload's")
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of the rung's")
    parser.add_argument("--repetition", type=int, default=1)
    parser.add_argument("--logging-steps", type=int, default=5)
    parser.add_argument("--trace", type=int, help="optimizer step to trace")
    parser.add_argument(
        "--keep-trace", nargs="?", type=float, const=1.0, metavar="SHARE",
        help="put this share of the traced step beside the result; of a fallback's, a few hundredths are large enough",
    )  # fmt: skip
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings to change")
    parser.add_argument("--commit", help="commit of the tree, where git is not at hand")
    return parser.parse_args(argv)


def padded_sampler(lengths: list[int], slots: int) -> Any:
    """Batches of 2-D padding in the data set's order: rows x longest <= slots."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    class PaddedBatches(BatchRebalanceSampler):
        def __init__(self) -> None:
            self.lengths, self.batches, batch, longest = lengths, [], [], 0
            for index, length in enumerate(lengths):
                if batch and (len(batch) + 1) * max(longest, length) > slots:
                    self.batches.append(batch)
                    batch, longest = [], 0
                batch, longest = [*batch, index], max(longest, length)
            self.batches.append(batch)

        def __len__(self) -> int:
            return len(self.batches)

        def __iter__(self) -> Iterator[list[int]]:
            return iter(self.batches)

        def set_epoch(self, epoch: int) -> None:
            """The order does not change."""

    return PaddedBatches()


def padded(trainer: type, slots: int) -> type:
    """The trainer class on padded batches of that many slots."""

    class Padded(trainer):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return padded_sampler([len(row) for row in self.train_dataset["input_ids"][:]], slots)

    return Padded


def settings_of(rung: Rung, workload: Workload, given: argparse.Namespace, directory: str) -> dict[str, Any]:
    """The settings of the rung's config: what all have, the way's own, the rung's, the command line's."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    values: dict[str, Any] = {
        "output_dir": directory,
        "max_steps": steps_of(rung, workload, given.steps),
        "gradient_accumulation_steps": workload.accumulation,
        "learning_rate": 1e-5,
        "optim": "adamw_torch_fused",
        "bf16": False,
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "logging_steps": given.logging_steps,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        **({"use_cpu": True, "optim": "adamw_torch"} if workload.device == "cpu" else {}),
        **(FSDP2 if world > 1 else {}),
    }
    if rung.way == "speedkit":
        values |= {"tokens_per_batch": workload.slots, "accelerator_config": {"non_blocking": True}}
        values |= {"dataloader_num_workers": 2 if workload.device == "cuda" else 0}
    elif rung.way == "trl":
        values |= {"packing": True, "packing_strategy": "bfd", "max_length": workload.slots}
        values |= {"per_device_train_batch_size": 1}
    else:
        values |= {"max_length": None}
    given_here = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in given.set)}
    values |= {**rung.settings, **given_here}
    if rung.way == "speedkit" and not values.get("packing", True):
        values |= {"tokens_per_batch": None, "max_length": None}
    return values


def steps_of(rung: Rung, workload: Workload, given: int | None) -> int:
    """Optimizer steps: fewer where one holds more tokens, never too few to tell warm-up from the rest."""
    larger = workload.accumulation * workload.slots / 8192
    return given or max(8, round(rung.steps / max(1.0, larger)))


def build(rung: Rung, workload: Workload, settings: Mapping[str, Any]) -> Any:
    """The rung's trainer."""
    import torch
    from geometry import GEOMETRIES, MEAN_TOKENS, chat_dataset, random_model, stub_tokenizer
    from trl import SFTConfig, SFTTrainer

    from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer

    ours = rung.way == "speedkit"
    config_class, trainer_class = (SpeedSFTConfig, SpeedSFTTrainer) if ours else (SFTConfig, SFTTrainer)
    unknown = sorted(set(settings) - {one.name for one in fields(config_class)})
    if unknown:
        print(f"{rung.name}: {config_class.__name__} of this version has no {', '.join(unknown)}", file=sys.stderr)
        raise SystemExit(UNKNOWN_SETTING)
    cuda, world = workload.device == "cuda", int(os.environ.get("WORLD_SIZE", "1"))
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    config = GEOMETRIES[workload.geometry](workload.layers)
    # The same seed on every rank: FSDP2 shards what is there, so each rank must hold the same weights.
    model = random_model(config, device=workload.device, dtype=torch.bfloat16 if cuda else torch.float32, seed=SEED)
    mean = workload.mean_tokens or MEAN_TOKENS
    # Padded batches hold about 0.6 of the tokens, so that many documents are enough for every rung. An epoch's last
    # steps share its rows evenly, so with accumulation it is longer than the run: 10 steps of 37 rows have 3 empty.
    # One GPU with two micro-batches and two with one draw the same, so that their losses can be compared.
    epochs = 1.1 if workload.accumulation * world == 1 else 8.0
    documents = int(settings["max_steps"] * workload.accumulation * world * workload.slots / mean * epochs) + 10
    shared: dict[str, Any] = {
        "model": model,
        "train_dataset": chat_dataset(
            documents, vocabulary=config.vocab_size, longest=workload.slots, seed=SEED, mean_tokens=mean
        ),
        "processing_class": stub_tokenizer(),
    }
    if workload.lora_rank is not None:
        from peft import LoraConfig

        shared["peft_config"] = LoraConfig(
            r=workload.lora_rank, lora_alpha=2 * workload.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    if not settings.get("packing", ours):
        trainer_class = padded(trainer_class, workload.slots)
    return trainer_class(args=config_class(**settings), **shared)


@contextmanager
def run_folder(out: Path) -> Iterator[str]:
    """A folder that goes again: the same one on every rank of a launch, since ranks must agree on `output_dir`."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        with tempfile.TemporaryDirectory() as alone:
            yield alone
        return
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "") + os.environ.get("MASTER_PORT", "")
    folder = Path(tempfile.gettempdir()) / f"rung_{out.stem}_{launch}"
    folder.mkdir(exist_ok=True)
    try:
        yield str(folder)
    finally:
        if int(os.environ.get("RANK", "0")) == 0:  # the others may end before it has put the trace beside the result
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run, write the result."""
    given = arguments()
    rung, workload = RUNGS[given.rung], WORKLOADS[given.workload]
    if given.layers:
        workload = replace(workload, layers=given.layers, name=f"{workload.geometry}-{given.layers}")
    os.environ.update(rung.environment)
    given.out.parent.mkdir(parents=True, exist_ok=True)  # before what is to be written costs minutes
    with ExitStack() as open_now:
        if rung.way in ("seed", "stock-fallback"):
            # As if they were not installed: import raises ModuleNotFoundError and find_spec gives None.
            sys.modules.update(dict.fromkeys(("fla", "causal_conv1d")))  # type: ignore[arg-type]
        if rung.way == "seed":
            import seed_fallback

            open_now.enter_context(seed_fallback.bound())
        directory = Path(open_now.enter_context(run_folder(given.out)))
        # A folder of its own inside: SpeedSFTTrainer refuses one that holds another run.
        settings = settings_of(rung, workload, given, str(directory / "run"))
        result = run(rung, workload, given, settings)
        if int(os.environ.get("RANK", "0")) != 0:
            return
        from hf_speedkit.measure.trace_trim import trim_trace

        for path in sorted((directory / "run" / "traces").glob("*.json.gz")) if given.keep_trace else ():
            kept = given.out.with_name(f"{given.out.stem}_{path.name}")
            if given.keep_trace < 1:
                trim_trace(path, kept, share=given.keep_trace, python=False)
            else:
                shutil.copy(path, kept)
    write(given.out, result)


def run(rung: Rung, workload: Workload, given: argparse.Namespace, settings: Mapping[str, Any]) -> Any:
    """Build, train, and put the result together."""
    from hf_speedkit.trainer.benchmark import BenchLabel, measured_run

    trainer = build(rung, workload, settings)
    shown = {key: value for key, value in settings.items() if key not in ("output_dir", "report_to", "disable_tqdm")}
    label = BenchLabel(
        name=rung.name,
        workload=workload.name,
        repetition=given.repetition,
        settings={"rung": asdict(rung), "workload": asdict(workload), "config": shown, "trace": given.trace},
        seeds={"weights": SEED, "data": SEED},
        commit=given.commit,
    )
    return measured_run(trainer, label, trace_step=given.trace)


def write(path: Path, result: Any) -> None:
    """The result as a file, and its figures on the screen."""
    from hf_speedkit.core.bench_records import as_text

    path.write_text(as_text(result), encoding="utf-8")
    print(result.workload, result.name, json.dumps({key: round(value, 4) for key, value in result.rates.items()}))


if __name__ == "__main__":
    main()
