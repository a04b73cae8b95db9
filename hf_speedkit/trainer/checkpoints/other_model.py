"""A checkpoint is of the model that goes on from it: its config and the shapes of its weights, before any is read.

torch lists every tensor whose size differs, on every rank, once all of them were read; and where heads alone are
counted otherwise nothing differs in size, and the run goes on as another model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_speedkit.core.errors import CheckpointError
from hf_speedkit.trainer.checkpoints.resume import WEIGHTS_FOLDER

# What makes two models of a family different ones; a model's other numbers (lengths, ids, dropout) may be changed.
_OF_A_MODEL = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
               "num_key_value_heads", "head_dim", "vocab_size", "num_experts", "num_experts_per_tok",
               "linear_num_key_heads", "linear_num_value_heads", "tie_word_embeddings")  # fmt: skip
_OF_ADAPTERS = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "rank_pattern",
                "alpha_pattern")  # fmt: skip
_SHOWN = 5


def refuse_other_model(model: Any, checkpoint: Path) -> None:
    """Refuse a checkpoint of another model than this run's.

    Args:
        model: as the trainer has it before it is sharded: a transformers model, or a peft model.
        checkpoint: the checkpoint-N folder.

    Raises:
        CheckpointError: what differs, in the config and in a weight.

    Cost: config.json and the heads of the weights' files; no tensor is read.
    """
    adapters = hasattr(model, "peft_config")
    if adapters:
        lines = _differences(_saved(checkpoint / "adapter_config.json"), _adapter_config(model), _OF_ADAPTERS)
    else:
        own = model.config.get_text_config().to_dict() if hasattr(model, "config") else {}
        saved = _saved(checkpoint / "config.json")
        lines = _differences(saved.get("text_config") or saved, own, _OF_A_MODEL)
    lines += _other_shapes(_saved_shapes(checkpoint), _own_shapes(model, adapters=adapters))
    if not lines:
        return
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    raise CheckpointError(
        f"{checkpoint} is of {'other adapters' if adapters else 'another model'} than this run",
        evidence=(*lines[:_SHOWN], *more),
        mend=f"resume with the {'adapters' if adapters else 'model'} that it was saved from, or name a checkpoint of "
        "this run",
        regardless=None if adapters else f"start a new run from its weights: model_name_or_path={checkpoint}",
    )


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    found = []
    for name in names:
        # None: worked out by the model's code, in one version of it or the other.
        if saved.get(name) is None or own.get(name) is None:
            continue
        then, now = _plain(saved[name]), _plain(own[name])
        if then != now:
            found.append(f"{name}: {_short(then)} in the checkpoint, {_short(now)} here")
    return found


def _plain(value: Any) -> Any:
    """JSON knows no sets, and enum members by their value; names of adapted layers have no order."""
    value = getattr(value, "value", value)
    return sorted(map(str, value)) if isinstance(value, set | frozenset | list | tuple) else value


def _short(value: Any) -> str:
    return str(value) if len(str(value)) <= 80 else f"{str(value)[:80]} ..."


def _saved(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # of a checkpoint that somebody else wrote; its weights are looked at all the same
        return {}
    return read if isinstance(read, dict) else {}


def _adapter_config(model: Any) -> dict[str, Any]:
    name = model.active_adapter
    return dict(model.peft_config[name].to_dict()) if isinstance(name, str) else {}  # of several nothing is said


def _own_shapes(model: Any, *, adapters: bool) -> dict[str, tuple[int, ...]]:
    if not adapters:
        # DeepSpeed's third stage keeps nothing of a weight between its uses, and its shape beside it.
        return {name: tuple(getattr(weight, "ds_shape", weight.shape)) for name, weight in model.named_parameters()}
    from peft import get_peft_model_state_dict

    if not isinstance(model.active_adapter, str):
        return {}
    state = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _saved_shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the saved weights by name; none where they lie in a form that tells nothing before it is read."""
    if (checkpoint / WEIGHTS_FOLDER / ".metadata").is_file():
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        saved = FileSystemReader(checkpoint / WEIGHTS_FOLDER).read_metadata().state_dict_metadata
        return {name.removeprefix("model."): tuple(e.size) for name, e in saved.items() if hasattr(e, "size")}
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def _other_shapes(saved: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Weights of one name and another size. transformers saves some transposed: their number of elements counts."""
    other = [name for name in own if name in saved and math.prod(saved[name]) != math.prod(own[name])]
    if not other:
        return []
    name = other[0]
    count = f"; so do {len(other) - 1} more" if len(other) > 1 else ""
    return [f"{name}: {list(saved[name])} in the checkpoint, {list(own[name])} here{count}"]
