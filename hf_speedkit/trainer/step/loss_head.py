"""Puts kernels.loss_head into a model, which then returns sums over targets instead of logits when asked to."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_speedkit.kernels.attention import no_search_for_documents
from hf_speedkit.kernels.loss_head import target_sums

# Config entries by which some families change their logits; TRL's head knows them, ours does not.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


@dataclass
class TargetOutput(ModelOutput):  # type: ignore[misc]
    """What a model returns when called with `target_positions`: see `kernels.loss_head.TargetSums`."""

    targets: torch.Tensor | None = None
    nll: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    correct: torch.Tensor | None = None


def head_refusal(model: PreTrainedModel) -> str | None:
    """Why this model's loss cannot run on our head; None if it can. TRL's head serves it then."""
    config = model.config.get_text_config()
    head: Any = model.get_output_embeddings()
    changed = [name for name in _LOGIT_CHANGES if getattr(config, name, None) not in (None, 1.0)]
    if changed:
        return f"its logits are changed by {', '.join(changed)}"
    if model.base_model is model:
        return f"its base_model_prefix {model.base_model_prefix!r} names nothing in it"
    if type(head) is not torch.nn.Linear or getattr(head, "bias", None) is not None:
        return f"its output layer is a {type(head).__name__}, not a Linear without bias"
    if not head.weight.is_floating_point() or head.weight.dtype == torch.float16:
        return f"its output layer is held in {head.weight.dtype}"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "its layers lie on several devices (device_map)"
    if getattr(config, "output_router_logits", False):
        return "its loss has an auxiliary part for the experts' balance"
    return None


def add_loss_head(model: PreTrainedModel) -> None:
    """Let `model.forward` take `target_positions`, int64 [N] into the row [1, T], and return a TargetOutput.

    The forward stays the model's own without them, so that generation and evaluation on padded batches do not change.
    It must be added before the model is wrapped (DDP, FSDP2, autocast): wrappers then see an ordinary forward.
    """
    former = model.forward

    @functools.wraps(former)
    def forward(
        self: Any,
        *args: Any,
        target_positions: torch.Tensor | None = None,
        fused_lm_head: bool = False,
        **kwargs: Any,
    ) -> Any:
        if target_positions is None:
            # Said only where it is asked for: without TRL's head a model does not know the word.
            return former(*args, **kwargs, **({"fused_lm_head": True} if fused_lm_head else {}))
        labels = kwargs.pop("labels")
        with no_search_for_documents(self.config.get_text_config()):
            hidden = self.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
        # Looked up on each call: FSDP2 replaces parameters.
        weight = self.get_output_embeddings().weight
        if isinstance(weight, DTensor):
            raise RuntimeError(
                "the output layer's weight is sharded while the loss reads it, so that each rank would train its own "
                "part on its own documents. Let accelerate put it into its [final norm, output layer] group "
                "(fsdp_version: 2, transformer_layer_cls_to_wrap); with adapters leave torch_compile out; or set "
                "loss_head=trl and check the gradients"
            )
        targets = labels.flatten().index_select(0, target_positions + 1)
        sums = target_sums(hidden.flatten(0, 1).index_select(0, target_positions), weight, targets)
        return TargetOutput(**sums._asdict())

    model.forward = types.MethodType(forward, model)
