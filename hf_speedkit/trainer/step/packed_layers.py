"""What a model's layers run on while packed rows go through it; put back afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hf_speedkit.kernels.attention import attention_flags, register, unsupported_reason
from hf_speedkit.kernels.bindings import bind_references
from hf_speedkit.trainer.adapters import below_adapters

logger = logging.getLogger(__name__)

_MASKED = ("sdpa", "eager")


@contextmanager
def packed_layers(
    model: Any, *, device: torch.device, references: bool, attention: str, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, ...]]:
    """Make a model's layers ready for packed rows for the time of the context.

    Args:
        model: the transformers model (a PEFT wrapper is fine).
        device: where it runs.
        references: bind boundary-aware references where only transformers' fallback is there, which cannot keep
            documents apart. False in strict mode: there the fallback is refused, by the name it has.
        attention: "auto" replaces sdpa and eager attention with torch's variable-length attention where it can do
            what the model needs; "keep" leaves it.
        dtype: of the activations under mixed precision, whose weights may be fp32; the weights' own if None.

    Yields:
        One line per thing that was changed.
    """
    with ExitStack() as stack:
        changed: list[str] = []
        if references:
            bound = stack.enter_context(bind_references(model)).functions
            if bound:
                names = ", ".join(sorted({name.rpartition(".")[2] for name in bound}))
                changed.append(f"{names}: transformers' fallback -> hf_speedkit reference")
        if attention == "auto" and _use_varlen_attention(model, device, dtype):
            before = model.config._attn_implementation
            model.set_attn_implementation(register())
            stack.callback(model.set_attn_implementation, before)
            changed.append(f"attention: {before} -> {model.config._attn_implementation}")
        for line in changed:
            logger.info("packed layers: %s", line)
        yield tuple(changed)


@contextmanager
def padded_attention(model: Any) -> Iterator[None]:
    """Give padded batches an attention that reads masks, inside `packed_layers`."""
    before = model.config._attn_implementation
    if before != register():
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _use_varlen_attention(model: Any, device: torch.device, dtype: torch.dtype | None) -> bool:
    if getattr(model.config, "_attn_implementation", None) not in _MASKED:
        return False
    if dtype is None:
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
    flash, settable = attention_flags(below_adapters(model))
    text = model.config.get_text_config()
    reason = unsupported_reason(text, dtype=dtype, device=device, flash=flash, settable=settable)
    if reason is not None:
        logger.info("packed attention stays on %s: %s", model.config._attn_implementation, reason)
    return reason is None
