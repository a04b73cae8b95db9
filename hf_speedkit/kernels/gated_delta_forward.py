"""A GatedDeltaNet's forward with one convolution each for q, k and v, so that the rule copies none of them.

transformers runs one convolution over the channels of q, k and v and splits its output, so the three are strided views,
and fla's rule makes each contiguous first (fla 0.6.0, utils/decorators.py, input_guard). A depthwise convolution works
channel by channel: three of them on slices of the same projection give the same numbers in memory of their own. The
convolution and the rule are those that the layer's modeling file would call at that moment.

Checked against transformers 5.17.0, 5.23.0 and 5.24.0; each is compared with the layer's own forward on the device
before it is used (`gated_delta_parity.py`), so a changed class is not bound rather than wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from hf_speedkit.kernels.layout import BoundTo, effective_forward, live_layers, names_used

if TYPE_CHECKING:
    from torch import Tensor, nn

CONVOLUTION, RULE = "causal_conv1d_fn", "chunk_gated_delta_rule"

# Channels that causal-conv1d's kernel loads at once: it wants channels and strides in multiples of these, and reads 16
# bytes at a time (causal-conv1d 1.7, csrc/causal_conv1d.cpp; csrc/causal_conv1d_fwd.cu).
_CHANNELS, _BYTES = 8, 16

_JOINT = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
"""Children of Qwen3.5's and 3.6's layers: q, k and v lie behind one another in one projection."""

_PER_HEAD = {"in_proj_qkvz", "in_proj_ba"}
"""Children of Qwen3-Next's layers: q, k, v and z of a head lie behind one another."""

_SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "key_dim", "value_dim")

# What only the layer's own forward knows to handle; transformers 5.24 calls cache_params cache.
_OWN_ARGUMENTS = ("cache_params", "cache", "attention_mask")


def is_gated_delta_net(module: nn.Module) -> bool:
    """Whether a layer has the parts that `split_forward` puts together anew, and no others."""
    if not type(module).__name__.endswith("GatedDeltaNet"):
        return False
    projections = set(module._modules) - {"conv1d", "norm", "out_proj"}
    known = len(module._modules) - len(projections) == 3 and projections in (_JOINT, _PER_HEAD)
    return known and all(isinstance(getattr(module, name, None), int) for name in _SIZES)


def projection_widths(layer: Any) -> dict[str, int]:
    """Channels that each projection of a layer gives, in the order in which the layer's own forward runs them."""
    mixed, values, heads = 2 * layer.key_dim + layer.value_dim, layer.value_dim, layer.num_v_heads
    if set(layer._modules) >= _JOINT:
        return {"in_proj_qkv": mixed, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    return {"in_proj_qkvz": mixed + values, "in_proj_ba": 2 * heads}


def why_not_split(layer: Any) -> str | None:
    """Why a GatedDeltaNet keeps its own forward; None if nothing is known against it.

    Args:
        layer: one that `is_gated_delta_net` knows, without an override of `forward`.
    """
    weight = layer.conv1d.weight
    if weight.ndim != 3 or weight.shape[0] != 2 * layer.key_dim + layer.value_dim or not weight.is_floating_point():
        return f"its convolution has a weight of {list(weight.shape)} in {weight.dtype}"
    if layer.key_dim % _CHANNELS or layer.value_dim % _CHANNELS:
        return f"{layer.key_dim} and {layer.value_dim} channels are no multiples of {_CHANNELS}"
    own = effective_forward(layer)
    taken = set(inspect.signature(own).parameters) if own is not None else set()
    if not {"self", "hidden_states"} <= taken <= {"self", "hidden_states", "kwargs", *_OWN_ARGUMENTS}:
        return f"its forward takes {', '.join(sorted(taken)) or 'nothing that can be read'}"
    bindings = _bindings(layer)
    for function in (CONVOLUTION, RULE):
        binding = bindings[function][1] if function in bindings else BoundTo.UNKNOWN
        if binding in (BoundTo.TORCH, BoundTo.UNKNOWN):
            return f"its {function} is bound to {binding.value}, for which nothing would be gained"
    return None


def split_forward(layer: Any) -> Callable[..., Any]:
    """The forward (module, hidden_states [B, T, H], ...) -> [B, T, H] for layers of this one's class.

    With a cache or a padding mask, below accelerate's hooks for offloaded weights and while torch compiles, which lays
    out memory by itself and cannot follow questions about it, it is the layer's own.

    Raises:
        KeyError: the class calls no convolution or no rule, see `why_not_split`.
    """
    from torch.compiler import is_compiling

    own: Callable[..., Any] = type(layer).forward
    plain = effective_forward(layer)
    assert plain is not None, "why_not_split has read it"
    bindings = _bindings(layer)
    convolution, rule = bindings[CONVOLUTION][0], bindings[RULE][0]
    namespace = plain.__globals__
    # transformers 5.17 repeats the heads of q and k itself; since 5.23 the rule takes fewer of them.
    repeats = layer.num_v_heads // layer.num_k_heads if "repeat_interleave" in names_used(plain, type(layer)) else 1

    # wraps: whatever reads the model (`layout.py`, inspect.signature) finds the own forward and its globals behind it.
    @wraps(own)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        asked = args or any(kwargs.get(name) is not None for name in _OWN_ARGUMENTS)
        if asked or hasattr(self.conv1d, "_hf_hook") or is_compiling():
            return own(self, hidden_states, *args, **kwargs)
        options = {name: value for name, value in kwargs.items() if name not in _OWN_ARGUMENTS}
        mixed, z, b, a = _projected(self, hidden_states)
        q, k, v = _convolved(self, mixed, namespace[convolution], options)
        if repeats > 1:
            q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
        borders = options.pop("cu_seq_lens_q", None)
        output, _ = namespace[rule](
            q,
            k,
            v,
            g=_decay(self, a),
            beta=b.sigmoid(),
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=borders,
            **options,
        )
        batch, slots, _ = hidden_states.shape
        output = self.norm(output.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
        return self.out_proj(output.reshape(batch, slots, -1))

    return forward


def _projected(layer: Any, hidden_states: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """What goes into the convolutions, one after the other of [B, T, channels]; z; and what beta and g are made of."""
    import torch

    if "in_proj_qkv" in layer._modules:
        # One split: its backward is one cat, where three slices would be three times zeros and two additions.
        sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
        mixed = list(torch.split(_sliceable(layer.in_proj_qkv(hidden_states)), sizes, dim=-1))
        return mixed, layer.in_proj_z(hidden_states), layer.in_proj_b(hidden_states), layer.in_proj_a(hidden_states)
    both = layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
    *heads, z, b, a = layer.fix_query_key_value_ordering(*both)
    return [x.reshape(*x.shape[:2], -1) for x in heads], z, b, a


def _sliceable(x: Tensor) -> Tensor:
    """`x` [B, T, C] as causal-conv1d can read slices of its channels, which is how a projection leaves it."""
    import torch

    strides = x.stride(-1) == 1 and x.stride(0) % _CHANNELS == 0 and x.stride(1) % _CHANNELS == 0
    if strides and x.storage_offset() * x.element_size() % _BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _convolved(layer: Any, mixed: list[Tensor], convolve: Callable[..., Any], options: dict[str, Any]) -> list[Tensor]:
    """q, k and v, [B, T, heads, channels of a head], each contiguous."""
    import torch

    sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
    weights = torch.split(layer.conv1d.weight.squeeze(1), sizes)
    bias = layer.conv1d.bias
    biases = torch.split(bias, sizes) if bias is not None else (None, None, None)
    parts = []
    for x, weight, own_bias, dim in zip(
        mixed, weights, biases, (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim), strict=True
    ):
        part = convolve(x.transpose(1, 2), weight, own_bias, activation=layer.activation, **options).transpose(1, 2)
        parts.append(part.reshape(*part.shape[:2], -1, dim))
    return parts


def _decay(layer: Any, a: Tensor) -> Tensor:
    from torch.nn.functional import softplus

    # In float32, as the layer does it: in fp16 exp(A_log) can be infinite.
    decay: Tensor = -layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias)
    return decay


def _bindings(layer: nn.Module) -> dict[str, tuple[str, BoundTo]]:
    """(name of the global, what it is bound to) of each function that a layer calls, children left aside."""
    found = next((live for live in live_layers(layer) if live.name == ""), None)
    return {f.function: (f.global_name, f.binding) for f in (found.functions if found is not None else ())}
