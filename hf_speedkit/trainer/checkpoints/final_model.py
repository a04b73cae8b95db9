"""The model at the end of a live run: room for it first, then one whole model on the process that writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_speedkit.trainer.checkpoints.export import (
    export_dtype,
    export_tensor,
    exported_tensors,
    is_fsdp2,
    model_bytes,
    needs_all_ranks,
    say_dtype,
)
from hf_speedkit.trainer.checkpoints.folder import named_failures, require_space
from hf_speedkit.trainer.ranks.agreement import agree

if TYPE_CHECKING:
    from hf_speedkit.trainer.checkpoints.safe import SafeCheckpoints

_NAME = "the final model"


def save_final_model(trainer: SafeCheckpoints, output_dir: Path, *, plain: Callable[[str], None]) -> None:
    """Save a model that `from_pretrained` loads, gathered tensor by tensor where it is sharded; see `needs_all_ranks`.

    Works whatever the state-dict type: Trainer (5.23, trainer.py:4097) writes nothing under SHARDED_STATE_DICT. Needs
    the model's size in its exported type in the writing process's memory: 54 GB for 27 billion parameters in bf16.

    Args:
        trainer: its trainer.
        output_dir: where the model goes.
        plain: Trainer's own `save_model`, for a model that is whole and keeps its type.

    Raises:
        CheckpointError: the disk has no room for it, before anything is gathered or written; or fills up meanwhile.
    """
    dtype = export_dtype(trainer.args, trainer.model)
    size, saves = model_bytes(trainer.model, dtype), trainer.args.should_save
    # Of a whole model one rank may call it alone, as people do with the Trainer's own: nothing is exchanged.
    together: Callable[[Callable[[], None]], None] = agree if needs_all_ranks(trainer) else _alone
    together(lambda: require_space(output_dir, size, what=_NAME) if saves else None)
    if dtype is None and not is_fsdp2(trainer):
        if saves:
            output_dir.mkdir(parents=True, exist_ok=True)
        with named_failures(output_dir, _NAME):
            plain(str(output_dir))
        return
    state = {}
    for name, tensor in exported_tensors(trainer.model):
        whole = export_tensor(name, tensor.detach(), dtype)
        if hasattr(whole, "full_tensor"):
            whole = whole.full_tensor()  # a collective: every rank takes part, one keeps the result
        if saves:
            state[name] = whole.cpu()
    together(lambda: _write(trainer, output_dir, state, dtype))
    if trainer.args.push_to_hub:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


def require_room_at_end(trainer: SafeCheckpoints) -> None:
    """Refuse a job that saves its model into `output_dir` at its end, and nothing before, where it has no room there.

    With checkpoints their own room is looked for before step 1, and they are larger. All ranks call it.

    Raises:
        CheckpointError: on every rank.
    """
    args = trainer.args
    if args.save_strategy == "no":
        size = model_bytes(trainer.model, export_dtype(args, trainer.model))
        agree(lambda: require_space(Path(args.output_dir), size, what=_NAME) if args.should_save else None)


def loadable_names(model: torch.nn.Module, state: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
    """Weights under the names that a loader looks for, where torch.compile has wrapped the model.

    accelerate 1.15 leaves the trainer such a wrapper of a model that FSDP2 shards: 21 of 21 saved names began with
    `_orig_mod.`, and from_pretrained would have drawn every weight anew.

    Args:
        model: the trainer's.
        state: what is to be saved; None for all of the model, as Trainer has it.
    """
    if not any("_orig_mod." in name for name, _ in model.named_parameters()):
        return state
    saved = model.state_dict() if state is None else state
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in saved.items()}


def _alone(act: Callable[[], None]) -> None:
    act()


def _write(
    trainer: SafeCheckpoints, output_dir: Path, state: dict[str, torch.Tensor], dtype: torch.dtype | None
) -> None:
    if trainer.args.should_save:
        output_dir.mkdir(parents=True, exist_ok=True)
    with named_failures(output_dir, _NAME):
        trainer._save(str(output_dir), state_dict=state)
    if trainer.args.should_save and dtype is not None:
        say_dtype(output_dir, dtype)
