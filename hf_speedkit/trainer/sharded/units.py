"""The FSDP2 units of a model, their groups, and the lists of layers among them; nothing is changed here."""

from __future__ import annotations

from typing import Any

import torch


def is_sharded(module: Any) -> bool:
    """Whether `fully_shard` was applied to this very module."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def group_of(module: Any) -> tuple[torch.nn.Module, ...]:
    """The modules that are gathered together with this one; empty where it is no FSDP2 unit.

    Reads a private attribute of torch, the same from 2.6 to 2.13 (`FSDPState._modules`); an unknown layout gives the
    module alone.
    """
    if not is_sharded(module):
        return ()
    modules: tuple[torch.nn.Module, ...] = getattr(module._get_fsdp_state(), "_modules", (module,))
    return modules


def parameter_groups(model: Any) -> list[Any]:
    """What is gathered at once, in the order of the modules; empty in an unknown layout.

    Private to torch: `FSDPState._fsdp_param_groups` in 2.13, one `_fsdp_param_group` before.
    """
    found: dict[int, Any] = {}
    for module in model.modules():
        if is_sharded(module):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            found.update((id(group), group) for group in groups if group is not None)
    return list(found.values())


def decoder_layers(model: Any) -> list[Any]:
    """A model's layers: the longest of the outermost module lists beside its input embedding.

    Beside it: below the innermost module that holds both. A vision tower has a list of its own, which may be longer.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    # Innermost first: a module comes behind those that it lies in.
    for holder in [model] if embedding is None else reversed(list(model.modules())):
        if embedding is not None and all(part is not embedding for part in holder.modules()):
            continue
        named = holder.named_modules()
        lists = [(name.count("."), list(part)) for name, part in named if isinstance(part, torch.nn.ModuleList)]
        if any(part for _, part in lists):
            outermost = min(depth for depth, part in lists if part)
            return max((part for depth, part in lists if depth == outermost), key=len)
    return []


def sharded_layers(model: Any) -> list[Any]:
    """The decoder's layers, in the order in which they run, if each is an FSDP2 unit; else empty."""
    layers = [within_wrapper(layer) for layer in decoder_layers(model)]
    return layers if all(map(is_sharded, layers)) else []


def lists_of_units(model: Any) -> list[list[Any]]:
    """All lists of modules that are FSDP2 units: the decoder's layers, and those of a vision tower."""
    lists = [
        [within_wrapper(part) for part in module]
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList)
    ]
    return [layers for layers in lists if layers and all(map(is_sharded, layers))]


def within_wrapper(module: Any) -> Any:
    """The layer in FSDP's own activation checkpointing: accelerate shards it, and the wrapper around what is left."""
    while (inner := getattr(module, "_checkpoint_wrapped_module", None)) is not None:
        module = inner
    return module
