"""A prepared model read into a `PreparedModel`: no judgement here, and nothing is gathered or changed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_speedkit.core.sharding import DecayParameters, PreparedModel, ShardGroup
from hf_speedkit.trainer.sharded.units import decoder_layers, is_sharded

if TYPE_CHECKING:
    from hf_speedkit.trainer.sft import SpeedSFTTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """A model's weights before they are prepared.

    Args:
        dtype: of the trained parameters; the commonest where there are several.
        trained_bytes: of the trained parameters.
        total_bytes: of all.
    """

    dtype: str
    trained_bytes: int
    total_bytes: int


def loaded_weights(model: Any) -> LoadedWeights:
    """Take note of a model's weights; call it before the trainer prepares the model. Shells on meta count as well."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return LoadedWeights(
        dtype=_commonest_dtype(trained),
        trained_bytes=_bytes(trained),
        total_bytes=_bytes(model.parameters()),
    )


def prepared_model(trainer: SpeedSFTTrainer, loaded: LoadedWeights) -> PreparedModel:
    """Read what accelerate has made of a trainer's model, and the settings that decide its memory.

    Args:
        trainer: in `on_train_begin`, where its model is prepared.
        loaded: the model's weights before.
    """
    model, args = trainer.model, trainer.args
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    trained = [p for p in model.parameters() if p.requires_grad]
    row_slots = args.row_slots if trainer.packing_active else args.max_length
    wanted, tied = _tie(model)
    groups = shard_groups(model)
    return PreparedModel(
        ranks=args.world_size,
        shards=_shards(model),
        sharding_asked=(args.fsdp_plugin_args or {}).get("fsdp_version") == 2,
        groups=groups,
        loaded_dtype=loaded.dtype,
        stored_dtype=_commonest_dtype(trained),
        loaded_bytes=loaded.trained_bytes,
        stored_bytes=_bytes(trained),
        weight_bytes=loaded.total_bytes,
        decay=_decay(model),
        odd_one=None if groups else _odd_one(model),
        tied_wanted=wanted,
        tied=tied,
        layers_checkpointed_twice=_checkpointed_twice(model),
        accumulation_steps=args.gradient_accumulation_steps,
        reduces_each=bool(trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)),
        train_slots=row_slots and row_slots * args.per_device_train_batch_size,
        eval_slots=row_slots and row_slots * args.per_device_eval_batch_size if trainer.eval_dataset else None,
        loads_once=bool(plugin is not None and plugin.cpu_ram_efficient_loading),
        quantized=bool(getattr(model, "is_quantized", False)),
    )


def shard_groups(model: Any) -> tuple[ShardGroup, ...]:
    """The FSDP2 groups of a model in the order of its modules; empty where nothing is sharded.

    Args:
        model: as `fully_shard` has left it.
    """
    names = {id(module): name for name, module in model.named_modules()}
    layers = {id(layer) for layer in decoder_layers(model)}
    groups: dict[int, tuple[Any, dict[str, Any], list[int]]] = {}
    for module, owner in _with_owner(model, None):
        if owner is None:
            continue
        _, parameters, held = groups.setdefault(id(owner), (owner, {}, [0]))
        held[0] += id(module) in layers
        for name, parameter in module.named_parameters(recurse=False):
            parameters[f"{names[id(module)]}.{name}".lstrip(".")] = parameter
    return tuple(_group(state, parameters, held[0], names) for state, parameters, held in groups.values() if parameters)


def peak_host_growth(model: Any, status: Path = Path("/proc/self/status")) -> int:
    """Bytes of host memory this process once held and no longer does, weights that are still there counted as gone.

    Args:
        model: its parameters on the CPU belong to the growth.
        status: where Linux keeps the peak (VmHWM) and the present size (VmRSS); 0 is returned where it does not.
    """
    if not status.is_file():
        return 0
    sizes = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    peak, now = (int(sizes[key].split()[0]) * 1024 if key in sizes else 0 for key in ("VmHWM", "VmRSS"))
    here = _bytes(local for local in map(_local, model.parameters()) if local.device.type == "cpu")
    return max(0, peak - now + here)


def _with_owner(module: Any, owner: Any) -> Iterator[tuple[Any, Any]]:
    """Every module with the FSDP2 state of the group it belongs to."""
    if is_sharded(module):
        # Private, the same from torch 2.6 to 2.13; a layout without it leaves no groups, and nothing is claimed.
        owner = getattr(module, "_get_fsdp_state", lambda: None)()
    yield module, owner
    for child in module.children():
        yield from _with_owner(child, owner)


def _group(state: Any, parameters: dict[str, Any], layers: int, names: dict[int, str]) -> ShardGroup:
    policy = getattr(state, "_mp_policy", None)
    compute, reduce = (getattr(policy, kind, None) for kind in ("param_dtype", "reduce_dtype"))
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    dtypes = [p.dtype for p in trained.values()]
    rarest = min(dtypes, key=dtypes.count, default=None)
    odd = next((name for name, p in trained.items() if p.dtype == rarest), None) if len(set(dtypes)) > 1 else None
    modules = [names.get(id(module), "") or type(module).__name__ for module in getattr(state, "_modules", ())]
    return ShardGroup(
        name=" + ".join(modules) or next(iter(parameters)),
        layers=layers,
        trained_dtypes=tuple(sorted({_name(dtype) for dtype in dtypes})),
        odd_one=odd,
        stored_bytes=_bytes(parameters.values()),
        gathered_bytes=sum(p.numel() * (compute or p.dtype).itemsize for p in parameters.values()),
        gradient_bytes=sum(p.numel() * (reduce or compute or p.dtype).itemsize for p in trained.values()),
    )


def _shards(model: Any) -> int:
    """Over how many ranks one copy of the parameters is spread."""
    sharded = next((p for p in model.parameters() if hasattr(p, "placements")), None)
    if sharded is None:
        return 1
    return math.prod(
        size for size, placed in zip(sharded.device_mesh.shape, sharded.placements, strict=True) if placed.is_shard()
    )


def _decay(model: Any) -> DecayParameters | None:
    recurrent = [
        (module.A_log, owner)
        for module, owner in _with_owner(model, None)
        if isinstance(getattr(module, "A_log", None), torch.nn.Parameter) and hasattr(module, "dt_bias")
    ]
    if not recurrent:
        return None
    a_log, owner = recurrent[0]
    cast = getattr(getattr(owner, "_mp_policy", None), "param_dtype", None)
    return DecayParameters(stored=_name(a_log.dtype), computed=_name(cast or a_log.dtype), layers=len(recurrent))


def _tie(model: Any) -> tuple[bool, bool]:
    """Whether input embedding and output head are to be one tensor, and whether they are."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if inputs is None or outputs is None or hasattr(model, "peft_config"):
        return False, False  # adapters put modules of their own in between
    config = model.config.get_text_config()
    if not hasattr(config, "tie_word_embeddings"):  # Qwen2.5-VL: only the whole one has it
        config = model.config
    return bool(config.tie_word_embeddings), inputs.weight is outputs.weight


def _odd_one(model: Any) -> str | None:
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    counts = Counter(trained.values())
    if len(counts) < 2:
        return None
    rarest = min(counts, key=counts.__getitem__)
    return next(f"{name} in {_name(dtype)}" for name, dtype in trained.items() if dtype == rarest)


def _checkpointed_twice(model: Any) -> int:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    return sum(
        any(getattr(part, "gradient_checkpointing", False) for part in module.modules())
        for module in model.modules()
        if isinstance(module, CheckpointWrapper)
    )


def _local(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _bytes(parameters: Any) -> int:
    return sum(int(p.numel() * p.element_size()) for p in parameters)


def _commonest_dtype(parameters: Any) -> str:
    sizes: dict[torch.dtype, int] = {}
    for parameter in parameters:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return _name(max(sizes, key=lambda dtype: sizes[dtype])) if sizes else "no"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
