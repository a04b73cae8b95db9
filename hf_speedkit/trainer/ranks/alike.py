"""What must be the same on every rank before training begins: settings, and weights that each rank shards by itself.

With other settings ranks log, save or end at different steps and wait for one another in calls that do not match, or
take different steps with the same gradient, silently. FSDP2 takes each rank's part from that rank's own copy of the
model: of two different checkpoints it makes one model that nobody has trained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from importlib import metadata
from typing import Any

from transformers import TrainingArguments

from hf_speedkit.core.errors import CheckpointError, ConfigurationError

_OF_ONE_RANK = frozenset(
    {
        "local_rank", "run_name", "logging_dir", "report_to", "project", "disable_tqdm", "log_level",
        "log_level_replica", "log_on_each_node", "hub_token", "hub_model_id", "push_to_hub", "ddp_timeout", "data_seed",
        "dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory", "use_cpu", "deepspeed",
        "dataset_num_proc", "peak_tflops", "throughput", "step_log", "tf32",
    }
)  # fmt: skip
"""Settings that may differ: names, what is shown and by whom, and how each host reads its data."""

_PACKAGES = ("torch", "triton", "transformers", "accelerate", "trl", "peft", "flash-linear-attention", "causal-conv1d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What one rank trains with.

    Args:
        settings: by name, as text.
        stack: versions of packages and the kind of the GPU, by name.
        layout: a checksum of the model's names, shapes, dtypes and what of it is trained.
        weights: a sample of its weights before they are sharded; empty where none of its own are used.
    """

    settings: Mapping[str, str]
    stack: Mapping[str, str]
    layout: str = ""
    weights: str = ""


def surroundings(args: TrainingArguments, model: Any, weights: str = "") -> Surroundings:
    """What this rank trains with.

    Args:
        args: its settings.
        model: what it trains.
        weights: `weight_sample`, where the ranks shard copies of their own.
    """
    names = [field.name for field in fields(args) if field.init and field.name not in _OF_ONE_RANK]
    settings = {name: _text(getattr(args, name)) for name in names}
    # `seed` is for dropout as well, and may follow the rank where another seed orders the data.
    settings["seed"] = _text(args.seed if args.data_seed is None else args.data_seed)
    if args.save_on_each_node:
        settings.pop("output_dir", None)
    return Surroundings(settings=settings, stack=_stack(args), layout=_layout(model), weights=weights)


def refuse_unlike(ranks: Sequence[Surroundings]) -> tuple[str, ...]:
    """Refuse ranks that cannot train together.

    Args:
        ranks: the surroundings of every rank, in rank order, the same on all of them.

    Returns:
        Lines about what differs and does not stop a run: versions, kinds of GPU.

    Raises:
        ConfigurationError: with the settings that differ, and the first rank of each that differs; or another model.
        CheckpointError: the ranks have read other weights.
    """
    settings = _differences([rank.settings for rank in ranks])
    if settings:
        raise ConfigurationError(
            f"the ranks have different settings: {', '.join(settings)}",
            evidence=tuple(settings.values())[:8],
            mend="give all of them the same; a script must not make them from the rank, the clock or the host",
        )
    layouts = _unlike_the_first([rank.layout for rank in ranks])
    if layouts:
        raise ConfigurationError(
            f"{len(layouts)} of {len(ranks)} ranks have another model than rank 0: names, shapes, dtypes or what is "
            "frozen differ",
            evidence=(f"rank {', '.join(map(str, layouts[:8]))}",),
            mend="make it on every rank by the same lines, from the same files and with the same packages",
        )
    weights = _unlike_the_first([rank.weights for rank in ranks])
    if weights:
        raise CheckpointError(
            f"{len(weights)} of {len(ranks)} ranks have read other weights than rank 0, and FSDP2 would make one model "
            "of parts of both",
            evidence=(f"rank {', '.join(map(str, weights[:8]))}: a sample of the weights was compared",),
            mend="let all hosts read the same files, and seed what is drawn (set_seed before the model is made); or "
            "fsdp_config: cpu_ram_efficient_loading: true, with which all get rank 0's",
        )
    return tuple(_differences([rank.stack for rank in ranks]).values())


def _unlike_the_first(values: Sequence[str]) -> list[int]:
    return [number for number, value in enumerate(values) if value != values[0]]


def weight_sample(model: Any) -> str:
    """A checksum of four numbers of every weight as it was read; adapters, which are drawn anew, are left out.

    Empty for a model of which weights are still to come, or are sharded already.
    """
    found = hashlib.sha256()
    for name, weight in model.named_parameters():
        if weight.device.type == "meta" or hasattr(weight, "placements"):
            return ""
        if "lora_" not in name and weight.numel():
            step = max(1, weight.numel() // 4)
            # At start-up only: where the model is on a device already, one small copy a weight.
            values = weight.detach().reshape(-1)[::step][:4].float().cpu()
            found.update(name.encode() + values.numpy().tobytes())
    return found.hexdigest()


def _differences(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """A line for every name whose value is not the same everywhere."""
    lines = {}
    for name in {name: None for rank in ranks for name in rank}:
        values = [rank.get(name, "none") for rank in ranks]
        other = next((number for number, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            lines[name] = f"{name}: {values[0]} on rank 0, {values[other]} on rank {other}"
    return lines


def _layout(model: Any) -> str:
    parts = [(name, str(one.dtype), *one.shape, one.requires_grad) for name, one in model.named_parameters()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _text(value: object) -> str:
    value = value.value if isinstance(value, Enum) else value
    # An object has an address in its text, which is another one in every process.
    text = json.dumps(value, sort_keys=True, default=lambda part: type(part).__name__)
    return text if len(text) <= 200 else f"{text[:100]}... ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _stack(args: TrainingArguments) -> dict[str, str]:
    import torch

    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if args.device.type == "cuda":
        found["GPU"] = torch.cuda.get_device_name(args.device)
    return found
