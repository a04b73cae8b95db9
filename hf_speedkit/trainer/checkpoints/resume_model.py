"""A checkpoint holds the weights of the model that they are loaded into, under its names or those they are saved by."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_speedkit.core.errors import CheckpointError

logger = logging.getLogger(__name__)


def refuse_missing_weights(model: Any, load_result: Any) -> None:
    """Refuse a checkpoint without some of the model's parameters: Trainer only warns, and trains them from scratch.

    Args:
        model: that was loaded into.
        load_result: torch's, with `missing_keys`.

    Raises:
        CheckpointError: names some of them.
    """
    # Each tensor once: of tied weights a checkpoint holds one.
    own = {name for name, _ in model.named_parameters()}
    missing = [name for name in load_result.missing_keys if name in own]
    if missing and set(missing) != set(getattr(model, "_keys_to_ignore_on_save", None) or ()):
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of the model's {len(own)} parameters",
            evidence=(f"the first: {', '.join(missing[:3])}",),
            mend="resume with the model that the checkpoint was saved from",
        )


@contextmanager
def taking_saved_names(model: Any) -> Iterator[None]:
    """While it lasts, `model.load_state_dict` also takes the names under which transformers saves a model.

    `save_pretrained` splits experts and renames modules into the form a model has on the Hub, and `from_pretrained`
    puts them together again; Trainer (5.23, trainer.py:3696 and 3827) resumes with torch's `load_state_dict`, which
    finds none of those names: Mixtral's or Qwen3-MoE's experts would go on from where the run began, with a warning
    (https://github.com/huggingface/transformers/issues/48805).

    Args:
        model: a transformers model; adapters and other modules are left alone.

    Cost: where names differ, the weights are in host memory once more while they are loaded.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        yield
        return
    original = model.load_state_dict

    def load_state_dict(state_dict: dict[str, torch.Tensor], strict: bool = True, assign: bool = False) -> Any:
        _say_other_dtype(state_dict.values(), model.parameters())
        if set(state_dict) <= set(model.state_dict()):
            return original(state_dict, strict, assign)
        dtypes = {weight.dtype for weight in state_dict.values() if weight.is_floating_point()}
        own, found = type(model).from_pretrained(
            None,
            config=copy.deepcopy(model.config),
            state_dict=state_dict,
            # One dtype for all: fp32 holds every other one exactly.
            dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32,
            output_loading_info=True,
        )
        result = original(own.state_dict(), strict=False)
        return type(result)(list(found["missing_keys"]), list(found["unexpected_keys"]))

    model.load_state_dict = load_state_dict
    try:
        yield
    finally:
        del model.load_state_dict  # the class's method shows again


def _say_other_dtype(saved: Iterable[torch.Tensor], held: Iterable[torch.Tensor]) -> None:
    """A run that goes on in another precision is another run: small updates come and go with the bits."""
    from hf_speedkit.trainer.ranks.agreement import is_first

    kinds = [
        sorted({str(weight.dtype).removeprefix("torch.") for weight in weights if weight.is_floating_point()})
        for weights in (saved, held)
    ]
    if kinds[0] != kinds[1] and is_first():
        logger.warning(
            "the checkpoint holds its weights in %s and this run in %s: it does not go on as it was; for the same run "
            "load the model with dtype=%s",
            " and ".join(kinds[0]), " and ".join(kinds[1]), kinds[0][0],
        )  # fmt: skip
