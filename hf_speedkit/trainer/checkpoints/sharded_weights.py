"""Sharded checkpoints (torch.distributed.checkpoint) read into a model that is not sharded, or into files."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hf_speedkit.trainer.checkpoints.resume import OPTIMIZER_FOLDER, WEIGHTS_FOLDER

_GROUP_BYTES = 4 << 30


def is_sharded(checkpoint: str | Path) -> bool:
    """Whether a checkpoint holds its weights as torch.distributed.checkpoint writes them."""
    return (Path(checkpoint) / WEIGHTS_FOLDER / ".metadata").is_file()


def load_sharded_weights(model: torch.nn.Module, checkpoint: Path) -> None:
    """Load a sharded checkpoint's weights into a model that is whole on this process; each process reads them all.

    Args:
        model: the model, or a peft model, whose adapters alone are in the checkpoint then.
        checkpoint: the checkpoint-N folder.
    """
    adapters = hasattr(model, "peft_config")
    if adapters:
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        state = get_peft_model_state_dict(model)
    else:
        state = model.state_dict()  # shares memory with the model: reading into it is loading
    _read({"model": state}, checkpoint / WEIGHTS_FOLDER)
    if adapters:
        set_peft_model_state_dict(model, state)


def load_sharded_optimizer(model: torch.nn.Module, optimizer: Any, scheduler: Any, checkpoint: Path) -> None:
    """Load a sharded checkpoint's optimizer state, by parameter name, and its learning-rate schedule."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    optimizer = getattr(optimizer, "optimizer", optimizer)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    _read(state, checkpoint / OPTIMIZER_FOLDER)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    with warnings.catch_warnings():
        # Torch warns that the schedule was loaded before the optimizer stepped; it was saved behind a step.
        warnings.simplefilter("ignore", UserWarning)
        scheduler.load_state_dict(torch.load(checkpoint / "scheduler.pt", weights_only=True))


def sharded_tensors(checkpoint: Path, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of a sharded checkpoint, without GPUs, process group or the model's code.

    At most 4 GiB (or one tensor) are held in the stored type at a time, besides what the caller keeps.

    Args:
        checkpoint: the checkpoint-N folder.
        dtype: type for floating tensors; None leaves them as stored. See `export.export_tensor`.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from hf_speedkit.trainer.checkpoints.export import export_tensor

    entries = {
        name.removeprefix("model."): entry
        for name, entry in FileSystemReader(checkpoint / WEIGHTS_FOLDER).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    for group in _groups(entries):
        tensors = {name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in group}
        _read({"model": tensors}, checkpoint / WEIGHTS_FOLDER)
        for name in group:
            yield name, export_tensor(name, tensors.pop(name), dtype)


def _read(state: dict[str, Any], folder: Path) -> None:
    """Fill the tensors in `state` from a folder; this process alone, whether or not there is a process group."""
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # just what was asked for
        load(state, checkpoint_id=folder, no_dist=True)


def _groups(entries: dict[str, Any]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name, entry in entries.items():
        group.append(name)
        size += entry.size.numel() * entry.properties.dtype.itemsize
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
