"""The model at the end: plain safetensors that `from_pretrained` loads, from a live run or from a checkpoint."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from hf_speedkit.core.errors import CheckpointError, ConfigurationError, SpeedkitError
from hf_speedkit.trainer.checkpoints.files import damage, numbered_checkpoints, read_manifest
from hf_speedkit.trainer.checkpoints.folder import require_space
from hf_speedkit.trainer.checkpoints.resume import NO_WEIGHTS, reason_of, weights_damage
from hf_speedkit.trainer.checkpoints.sharded_weights import is_sharded, sharded_tensors

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # safetensors' own
# Decays of a GatedDeltaNet layer: rounded to bf16 they drift over long rows (case V43), and they are a few KB.
_KEPT_AS_TRAINED = ("A_log", "dt_bias")
# What a checkpoint holds for training to go on, and nobody needs beside a finished model.
_FOR_TRAINING = ("trainer_state.json", "training_args.bin", "speedkit_*", "*.pt", "*.pth", "*.bin", "*.safetensors",
                 "*.safetensors.index.json")  # fmt: skip


def export_dtype(args: Any, model: torch.nn.Module) -> torch.dtype | None:
    """The type that the final model's weights are brought to; None leaves them as they are.

    "auto" stores a model in the type it computes in: fp32 master weights of a bf16 run are not needed any more.
    Adapters stay as they were trained.
    """
    name = args.export_dtype
    if name == "auto":
        computes_in_bf16 = args.bf16 or any(p.dtype == torch.bfloat16 for p in model.parameters())
        name = "bfloat16" if computes_in_bf16 and not is_adapter_model(model) else "stored"
    dtype = DTYPES.get(name)
    changed = any(export_tensor(key, value, dtype).dtype != value.dtype for key, value in _meta(model))
    return dtype if changed else None


def export_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor in the type it is exported in."""
    if dtype is None or not tensor.is_floating_point() or name.rsplit(".", 1)[-1] in _KEPT_AS_TRAINED:
        return tensor
    return tensor.to(dtype)


def model_bytes(model: torch.nn.Module, dtype: torch.dtype | None) -> int:
    """Bytes of what `final_model.save_final_model` writes."""
    return sum(value.numel() * export_tensor(name, value, dtype).element_size() for name, value in _meta(model))


def is_adapter_model(model: torch.nn.Module) -> bool:
    """Whether only adapters of a frozen model are trained (peft)."""
    return hasattr(model, "peft_config")


def is_fsdp2(trainer: Any) -> bool:
    """Whether a trainer shards its model with fully_shard."""
    return bool(trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 2)


def needs_all_ranks(trainer: Any) -> bool:
    """Whether the weights are spread over the ranks, so that none can save the model alone."""
    spread = any(hasattr(weight, "full_tensor") for weight in trainer.model.parameters())
    return bool(spread or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)


def say_dtype(directory: Path, dtype: torch.dtype) -> None:
    """`save_pretrained` writes the model's own type into config.json, and a loader would go by that."""
    path = directory / "config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        config["dtype"] = str(dtype).removeprefix("torch.")
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def exported_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what is exported: tied weights once, of an adapter model what was trained."""
    once = dict(model.named_parameters())
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    adapters = is_adapter_model(model)
    for name, tensor in model.state_dict().items():
        tied_to_another = name in every and name not in once
        if not tied_to_another and not (adapters and (name not in once or not once[name].requires_grad)):
            yield name, tensor


def _meta(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in exported_tensors(model):
        yield name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def describe_model(model: Any, processing_class: Any, directory: Path) -> None:
    """Write config, generation config, tokenizer and chat template beside sharded weights, which come without them."""
    if is_adapter_model(model):
        settings = copy.copy(model.peft_config[model.active_adapter])
        settings.inference_mode = True  # as peft writes it
        settings.save_pretrained(str(directory))
    else:
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(directory)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(directory)
    if processing_class is not None:
        processing_class.save_pretrained(directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was exported.

    Args:
        source: the folder that it was taken from.
        others: names of checkpoints beside it that were not taken, newest first.
        size_bytes: of the written weights.
        dtype: of (most of) them, such as "float32".
    """

    source: Path
    others: tuple[str, ...]
    size_bytes: int
    dtype: str


def export_checkpoint(checkpoint: Path, output_dir: Path, *, dtype: str = "stored") -> Exported:
    """Turn a checkpoint into a plain safetensors model (or peft adapters), without GPUs and without the launcher.

    Args:
        checkpoint: a checkpoint-N folder, sharded or whole, whose checksums are compared first; of a run's folder that
            holds no model of its own, the newest checkpoint.
        output_dir: a new or empty folder.
        dtype: "stored" leaves the weights as they are; "bfloat16", "float16" or "float32". Adapters stay as they were
            trained.

    Raises:
        CheckpointError: damaged, without a config, or the disk is full.
        ConfigurationError: `output_dir` holds something.
    """
    checkpoint, others = _chosen(checkpoint)
    problems = _damage(checkpoint)
    if problems:
        raise CheckpointError(
            f"{str(checkpoint)!r} is damaged",
            evidence=tuple(problems[:5]),
            mend=f"export another checkpoint{': ' if others else ''}{', '.join(others[:5])}",
        )
    if output_dir.exists() and any(output_dir.iterdir()):
        raise ConfigurationError(f"{str(output_dir)!r} is not empty", mend="name a folder that does not exist yet")
    if (checkpoint / "adapter_config.json").is_file():
        _export_adapters(checkpoint, output_dir)
    elif (checkpoint / "config.json").is_file():
        _export_model(checkpoint, output_dir, DTYPES.get(dtype))
    else:
        raise CheckpointError(
            f"{str(checkpoint)!r} holds no config.json, so nobody knows what its weights are",
            mend="copy config.json and the tokenizer's files of the model that was trained into it",
        )
    skipped = shutil.ignore_patterns(*_FOR_TRAINING)("", [path.name for path in checkpoint.iterdir()])
    for path in checkpoint.iterdir():
        if path.is_file() and path.name not in skipped and not (output_dir / path.name).exists():
            shutil.copy(path, output_dir / path.name)
    size = sum(path.stat().st_size for path in output_dir.glob("*.safetensors"))
    return Exported(source=checkpoint, others=others, size_bytes=size, dtype=_dtype_of(output_dir))


def _chosen(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """What to export of a folder, and the checkpoints that lie there as well."""
    inside = [path for _, path in numbered_checkpoints(folder)]
    if inside and weights_damage(folder) == [NO_WEIGHTS]:
        return inside[0], tuple(path.name for path in inside[1:])
    return folder, tuple(path.name for path in inside)


def _dtype_of(directory: Path) -> str:
    """The type that most weights of a safetensors folder have."""
    from safetensors import safe_open

    sizes: Counter[str] = Counter()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                part = file.get_slice(name)
                sizes[part.get_dtype()] += math.prod(part.get_shape())
    most = sizes.most_common(1)
    return _NAMES.get(most[0][0], most[0][0]) if most else "unknown"


def _damage(checkpoint: Path) -> list[str]:
    try:
        manifest = read_manifest(checkpoint)
    except (ValueError, OSError) as error:
        return [f"its manifest cannot be read: {error}"]
    return weights_damage(checkpoint) if manifest is None else damage(checkpoint, manifest)


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    """Errors of whoever reads a checkpoint as one that says which it was."""
    try:
        yield
    except SpeedkitError:
        raise
    except (CheckpointException, OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{str(checkpoint)!r} cannot be read",
            evidence=(f"{type(error).__name__}: {reason_of(error)}",),
            mend="export another checkpoint, or mend what is named",
        ) from error


def _refuse_other_config(model: torch.nn.Module, state: Mapping[str, object], checkpoint: Path) -> None:
    missing = [name for name, _ in exported_tensors(model) if name not in state]
    unknown = [name for name in state if name not in model.state_dict()]
    if missing or unknown:
        raise CheckpointError(
            f"config.json in {str(checkpoint)!r} describes another model than the one whose weights are there",
            evidence=tuple(
                f"{len(names)} weights {what}, such as {names[0]}"
                for names, what in ((missing, "are missing"), (unknown, "have no place"))
                if names
            ),
            mend="copy config.json of the model that was trained into it",
        )


def _export_model(checkpoint: Path, output_dir: Path, dtype: torch.dtype | None) -> None:
    import transformers

    weights = sorted(checkpoint.glob("model*.safetensors"))
    whole = [*weights, *checkpoint.glob("model.safetensors.index.json")]
    compiled = not is_sharded(checkpoint) and any(map(_has_compiled_names, weights))
    if dtype is None and whole and not is_sharded(checkpoint) and not compiled:
        # It is a model already, and loading would bring all of it to one type, fp32 decays among bf16 weights too.
        require_space(output_dir, sum(path.stat().st_size for path in whole), what="the model")
        output_dir.mkdir(parents=True, exist_ok=True)
        for path in whole:
            shutil.copy(path, output_dir)
        return

    with _reading(checkpoint):
        config = transformers.AutoConfig.from_pretrained(checkpoint)
    kind = getattr(transformers, (config.architectures or ["?"])[0], transformers.AutoModelForCausalLM)
    if is_sharded(checkpoint) or compiled:
        # transformers writes it, from a model without memory: names, tied weights and parts are its business.
        with torch.device("meta"):
            model = kind._from_config(config) if hasattr(kind, "_from_config") else kind.from_config(config)
        with _reading(checkpoint):
            state = (
                {name: export_tensor(name, tensor, dtype) for file in weights for name, tensor in _named(file)}
                if compiled
                else dict(sharded_tensors(checkpoint, dtype))
            )
        _refuse_other_config(model, state, checkpoint)
    else:
        with _reading(checkpoint):
            model, loading = kind.from_pretrained(checkpoint, dtype="auto", output_loading_info=True)
        if loading["missing_keys"]:  # they would be exported as they were drawn
            there = set(model.state_dict()) - set(loading["missing_keys"])
            _refuse_other_config(model, dict.fromkeys(there), checkpoint)
        state = {name: export_tensor(name, tensor, dtype) for name, tensor in exported_tensors(model)}
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    require_space(output_dir, size, what="the model")
    model.save_pretrained(output_dir, state_dict=state)
    written = DTYPES.get(_dtype_of(output_dir))
    if written is not None:
        say_dtype(output_dir, written)


def _export_adapters(checkpoint: Path, output_dir: Path) -> None:
    from safetensors.torch import save_file

    output_dir.mkdir(parents=True, exist_ok=True)
    if is_sharded(checkpoint):
        with _reading(checkpoint):
            state = {name: tensor.contiguous() for name, tensor in sharded_tensors(checkpoint, None)}
        save_file(state, output_dir / "adapter_model.safetensors", metadata={"format": "pt"})
    elif _has_compiled_names(adapters := checkpoint / "adapter_model.safetensors"):
        save_file(dict(_named(adapters)), output_dir / adapters.name, metadata={"format": "pt"})
    else:
        shutil.copy(adapters, output_dir)


def _has_compiled_names(file: Path) -> bool:
    """Whether weights are named as the wrapper of torch.compile names them: other trainers save them so under FSDP2."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        names: list[str] = opened.keys()  # a method of its own: it is no dict
    return any("_orig_mod." in name for name in names)


def _named(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a file of weights, by the names that a loader looks for."""
    from safetensors.torch import load_file

    for name, tensor in load_file(file).items():
        yield name.replace("_orig_mod.", ""), tensor
