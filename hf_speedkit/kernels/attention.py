"""Packed attention from `torch.nn.attention.varlen`: no mask, no package to install, cost by the sum of squares.

transformers gives sdpa a boolean [T, T] mask for a packed row: 64 MiB at 8,192 slots, 4 GiB at 65,536, and attention
over T^2 instead of the sum of the documents' squares. torch's own variable-length attention takes the boundaries
instead. It is registered through transformers' AttentionInterface under the name below; select it with
`attn_implementation="speedkit_varlen"` after `register()`, or let SpeedSFTTrainer choose it.

On a device without that kernel (a CPU) each document goes through scaled_dot_product_attention on its own: the same
numbers, which is what the tests compare.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_speedkit.core.errors import ConfigurationError, KernelAssertionError

# transformers takes names that contain "flash" for its own packages (utils/generic.py, is_flash_attention_requested).
NAME = "speedkit_varlen"
MAX_HEAD_DIM = 256
# Text models of transformers 5.23 and 5.24 whose layers hand attention a learned sink.
SINKS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4_vl_text", "mimo_v2_flash", "openai_privacy_filter")
# What layers of transformers 5.23 hand to their attention and only some implementations read; sinks by another name.
_NOT_HERE = ("position_bias", "sinks", "indices", "block_indices")
# What transformers 5.23's configurations call dropout of attention weights (GPT-2 and its kin: attn_pdrop).
_DROPOUT_NAMES = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def register() -> str:
    """Make the implementation known to transformers; returns its name. Registering twice is harmless."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionInterface.register(NAME, varlen_attention)
    # Without a mask function of its own a name gets no mask at all, padding included (masking_utils.py:841).
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    return NAME


@contextmanager
def no_search_for_documents(config: Any) -> Iterator[None]:
    """Keep transformers from looking for documents in position_ids while a packed row runs on this attention.

    Where an attention has a mask function, transformers 5.23 compares all positions on the device in each forward pass
    and waits on the host for the answer (masking_utils.py:776), whatever the function makes of it: ours makes nothing,
    since the boundaries come with the row. Without the function it does not ask (masking_utils.py:841). For a forward
    pass with cu_seq_lens only; the function must be there for rows with padding.

    Args:
        config: the text config of the model; nothing changes if it names another attention.
    """
    from transformers.masking_utils import AttentionMaskInterface

    named = config._attn_implementation == NAME and not torch.compiler.is_compiling()
    function = AttentionMaskInterface._global_mapping.pop(NAME, None) if named else None
    try:
        yield
    finally:
        if function is not None:
            AttentionMaskInterface.register(NAME, function)


def unsupported_reason(
    config: Any, *, dtype: torch.dtype, device: torch.device, flash: bool = True, settable: bool = True
) -> str | None:
    """Why a model cannot use this attention on this device; None if it can.

    Args:
        config: the text config of the model.
        dtype: dtype of the activations.
        device: where it will run.
        flash: the model's class can do without a mask (`_supports_flash_attn`): chunked or indexed attention cannot.
        settable: the model's class takes its attention from AttentionInterface.
    """
    if not settable:
        return "its class has an attention of its own, which cannot be replaced"
    if not flash:
        return "its class cannot do without a mask"
    head_dim = _head_size(config)
    if getattr(config, "attn_logit_softcapping", None):
        return "it soft-caps attention logits"
    for name in _DROPOUT_NAMES:
        if getattr(config, name, 0.0):
            return f"{name}={getattr(config, name)}"
    if config.model_type in SINKS:
        return "it uses attention sinks"
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"torch has no variable-length attention on {device.type}"
    if head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is above {MAX_HEAD_DIM}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel takes bf16 and fp16, not {dtype}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"the kernel needs compute capability 8.0, this GPU has {torch.cuda.get_device_capability(device)}"
    try:
        from torch.nn.attention import varlen  # noqa: F401
    except ImportError as error:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen ({error})"
    return None


def attention_flags(model: Any) -> tuple[bool, bool]:
    """`flash` and `settable` of `unsupported_reason` for a live model, as its class says."""
    # FSDP2 puts a class of torch's in front, whose file transformers would look into instead of the model's.
    plain: Any = next((kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch.")), type(model))
    settable = getattr(plain, "_can_set_attn_implementation", None)  # private; checked against transformers 5.23
    return bool(getattr(plain, "_supports_flash_attn", False)), settable is None or bool(settable())


def _head_size(config: Any) -> int:
    """Size of a query's head; in latent attention (MLA) `head_dim` is that of its rotated part only."""
    parts = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if all(isinstance(part, int) for part in parts):
        return sum(part for part in parts if part is not None)
    # Of Gemma 4 each layer has its own size, and the common config raises for it (transformers 5.23).
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return max(int(getattr(x, "head_dim", None) or x.hidden_size // x.num_attention_heads) for x in layers)


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention inside each document of one packed row.

    Args:
        module: the attention layer.
        query: [1, H, T, D]; key: [1, H_kv, T, D]; value: [1, H_kv, T, D_v]; H is a multiple of H_kv.
        attention_mask: must be None for a packed row.
        scaling: factor of the scores; None means 1 / sqrt(D).
        dropout, softcap, s_aux, and in `kwargs` biases and indices: refused when set, the kernel has none of them.
        is_causal: whether a position sees only those before it; what the layer says of itself if None.
        sliding_window: positions a query sees, its own included; None for all.
        cu_seq_lens_q, cu_seq_lens_k: int32 [N + 1], document edges; max_length_q, max_length_k: longest document.

    Returns:
        ([1, T, H, D_v], None), as transformers expects it.

    Raises:
        KernelAssertionError: dropout, soft-capping or sinks were asked for.
        ConfigurationError: boundaries together with a padding mask or with more than one row.
    """
    asked_for = {"dropout": dropout > 0.0, "softcap": bool(softcap), "s_aux (sinks)": s_aux is not None}
    asked_for |= {name: kwargs.get(name) is not None for name in _NOT_HERE}
    for name, asked in asked_for.items():
        if asked:
            raise KernelAssertionError(
                f"packed attention has no {name}", mend='attn_implementation="sdpa" or "eager" for this model'
            )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        return _one_document_a_row(module, query, key, value, attention_mask, scaling, sliding_window, causal, kwargs)
    if query.shape[0] != 1 or attention_mask is not None:
        raise ConfigurationError(
            "packed attention takes one row and no mask",
            evidence=(f"got {query.shape[0]} rows" + ("" if attention_mask is None else " and an attention_mask"),),
            mend="collate with hf_speedkit.PackedCollator",
        )
    run = _by_document if query.device.type == "cpu" else _by_kernel
    lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    output = run(query, key, value, *lengths, scaling, sliding_window, causal)
    return output.unsqueeze(0), None


def _one_document_a_row(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    sliding_window: int | None,
    causal: bool,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Rows without boundaries (generation in a callback, a batch of one document): sdpa with its causal mask."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    slots = key.shape[2]
    if attention_mask is not None and attention_mask.shape != (query.shape[0], slots):
        raise ConfigurationError(
            f"{NAME} reads padding masks of one entry a key, [{query.shape[0]}, {slots}] here",
            evidence=(f"got {list(attention_mask.shape)}; a static cache brings such masks",),
            mend='model.set_attn_implementation("sdpa") for these calls',
        )
    mask = None
    if attention_mask is not None or (sliding_window is not None and slots > sliding_window):
        mask = _padded_mask(attention_mask, query.shape[2], slots, sliding_window, causal, query.device)
    output, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, is_causal=causal, **kwargs)
    return output, None


def _padded_mask(
    real: torch.Tensor | None, queries: int, keys: int, sliding_window: int | None, causal: bool, device: torch.device
) -> torch.Tensor:
    """What padded rows may look at, bool [B or 1, 1, queries, keys]; queries are the last of the keys."""
    at = torch.arange(keys, device=device)
    distance = at[keys - queries :, None] - at[None, :]
    allowed = distance >= (0 if causal else -keys)
    if sliding_window is not None:
        allowed = allowed & (distance.abs() < sliding_window)
    if real is not None:
        allowed = allowed & real[:, None, :].bool()
    # Padding sees itself: a query that sees nothing would be NaN, and NaN spreads through the next layer's sums.
    allowed = allowed | (distance == 0)
    return allowed.view(-1, 1, queries, keys)


def _by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    max_length_q: int | None,
    max_length_k: int | None,
    scaling: float | None,
    sliding_window: int | None,
    causal: bool,
) -> torch.Tensor:
    """Torch's kernel: [1, H, T, D] in, [T, H, D_v] out."""
    from torch.nn.attention.varlen import varlen_attn

    slots = query.shape[2]
    # Not tensor[0]: its backward pass fills a tensor of zeros and copies the gradient into it.
    queries, keys, values = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    dtype = values.dtype
    if queries.dtype != dtype:  # rotary embeddings in fp32 under autocast
        queries, keys = queries.to(dtype), keys.to(dtype)
    # Latent attention (MLA) has narrower values; the kernel takes one size. Zeros change neither scores nor outputs.
    scaling = queries.shape[-1] ** -0.5 if scaling is None else scaling
    size, value_size = max(queries.shape[-1], values.shape[-1]), values.shape[-1]
    queries, keys, values = (_widened(tensor, size) for tensor in (queries, keys, values))
    options: dict[str, Any] = {}
    # torch 2.13 checks the head counts and wants enable_gqa; 2.11 has no such parameter and its kernel shares heads by
    # itself (the same aten kernel; parity is a gpu test).
    if queries.shape[1] != keys.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    back = -1 if sliding_window is None else sliding_window - 1
    window = (back, 0 if causal else back)
    output = varlen_attn(
        queries,
        keys,
        values,
        cu_seq_lens_q,
        cu_seq_lens_k,
        slots if max_length_q is None else max_length_q,
        slots if max_length_k is None else max_length_k,
        scale=scaling,
        window_size=window,
        **options,
    )
    assert isinstance(output, torch.Tensor), "a pair comes only with return_aux"
    return output[..., :value_size]


def _widened(tensor: torch.Tensor, size: int) -> torch.Tensor:
    missing = size - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    max_length_q: int | None,
    max_length_k: int | None,
    scaling: float | None,
    sliding_window: int | None,
    causal: bool,
) -> torch.Tensor:
    """The same on a CPU, one document at a time: [1, H, T, D] in, [T, H, D_v] out."""
    edges = cu_seq_lens_q.tolist()  # host memory: no device to wait for
    outputs = []
    for start, stop in pairwise(edges):
        part = slice(start, stop)
        mask = _window_mask(stop - start, sliding_window, causal, query.device)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, part],
                key[:, :, part],
                value[:, :, part],
                attn_mask=mask,
                is_causal=causal and mask is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def _window_mask(length: int, sliding_window: int | None, causal: bool, device: torch.device) -> torch.Tensor | None:
    if sliding_window is None or length <= sliding_window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= (0 if causal else -length)) & (distance.abs() < sliding_window)
