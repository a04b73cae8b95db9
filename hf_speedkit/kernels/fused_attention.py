"""A forward for attention layers that normalise and rotate their heads, with `qk_rotary` and `output_gate` in it.

For transformers' Qwen3.5, Qwen3-Next, Qwen3, Qwen3-MoE and layers of the same structure; checked against 5.23. The
whole forward is replaced, not the norms and the rotation by themselves: those are three calls, of which the rotation is
a global of the modeling file that does not see the norms' weights, and the copies are made between them. What a layer
does beyond this (a rotation in some layers only, another order) shows in the comparison with its own forward
(`attention_parity.py`), and the layer is left as it was.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from hf_speedkit.kernels.layout import effective_forward

if TYPE_CHECKING:
    from torch import Tensor, nn

VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
QK_ROTARY = "qk_rotary"

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_hf_hook")

_MOST_ELEMENTS = 2**31
"""Of the queries: the kernels find a head by its number times its stride in 32 bits."""

_ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask")
_CACHES = ("past_key_values", "cache")
"""What a layer's own forward takes, in this order; others change what it computes. transformers 5.24: cache."""


def has_head_norms(module: nn.Module) -> bool:
    """Whether a layer is an attention that normalises each head of its queries and keys, by its structure."""
    if set(module._modules) != {*_PROJECTIONS, *_NORMS} or module._parameters:
        return False
    heads, head_dim = heads_of(module), getattr(module, "head_dim", None)
    norms: list[Any] = [getattr(module, name) for name in _NORMS]
    if heads is None or not isinstance(head_dim, int) or any(_width(norm) != head_dim for norm in norms):
        return False
    needed = ("scaling", "attention_dropout")
    return all(hasattr(module, name) for name in needed) and type(norms[0]) is type(norms[1])


def heads_of(module: Any) -> tuple[int, int] | None:
    """Heads of queries and of keys; None where the layer does not say them or its projections have other widths."""
    config, head_dim = getattr(module, "config", None), getattr(module, "head_dim", 0)
    counts = tuple(getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    widths = [getattr(getattr(module, name, None), "out_features", None) for name in _PROJECTIONS[:3]]
    q_heads, k_heads = counts
    if not isinstance(q_heads, int) or not isinstance(k_heads, int):
        return None
    fits = widths[0] in (q_heads * head_dim, 2 * q_heads * head_dim) and widths[1] == widths[2] == k_heads * head_dim
    return (q_heads, k_heads) if fits else None


def is_gated(module: Any) -> bool:
    """Whether the query projection makes a gate for the output too."""
    return bool(module.q_proj.out_features == 2 * module.config.num_attention_heads * module.head_dim)


def why_not_fused(module: nn.Module) -> str | None:
    """Why an attention layer keeps its own forward; None if nothing is known against it.

    The comparison can only hand over what it knows: a layer that takes something else, a second sequence say, would
    look the same there and be wrong in training.
    """
    own = effective_forward(module)
    parameters = list(inspect.signature(own).parameters.values()) if own is not None else []
    names = [parameter.name for parameter in parameters]
    known = any(names[:5] == ["self", *_ARGUMENTS, cache] for cache in _CACHES)
    if not known or any(parameter.kind is not VAR_KEYWORD for parameter in parameters[5:]):
        return f"its forward takes {', '.join(names[1:]) or 'nothing that can be read'}"
    return None


def attention_forward(*, one_plus: bool, norm_and_rotate: Any = None, gated: Any = None) -> Any:
    """A forward (module, hidden_states, position_embeddings, ...) -> (output, attention weights or None).

    With a cache, with positions in another form than [B, T, R], with hooks on a norm and while torch compiles, which
    fuses by itself what nothing here has proven compiled, it is the layer's own.

    Args:
        one_plus: whether the layer's norms multiply by 1 + weight.
        norm_and_rotate, gated: what runs; the functions of those names in `qk_rotary` and `output_gate` if None.
    """
    from torch.compiler import is_compiling

    from hf_speedkit.kernels import output_gate, qk_rotary
    from hf_speedkit.kernels.fused_forwards import epsilon

    turn, gate_by = norm_and_rotate or qk_rotary.norm_and_rotate, gated or output_gate.gated

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        *cache: Any,
        **kwargs: Any,
    ) -> Any:
        own, turns = type(self).forward, _can_turn(self, hidden_states, position_embeddings)
        cached = any(x is not None for x in (*cache, *(kwargs.get(name) for name in _CACHES)))
        if cached or not turns or norms_have_hooks(self) or is_compiling():
            return own(self, hidden_states, position_embeddings, attention_mask, *cache, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in _CACHES}
        shape = hidden_states.shape[:-1]
        norms = qk_rotary.HeadNorms(
            query_weight=self.q_norm.weight,
            key_weight=self.k_norm.weight,
            query_eps=epsilon(self.q_norm) or 0.0,
            key_eps=epsilon(self.k_norm) or 0.0,
            one_plus=one_plus,
        )
        # By the size of a head, not by their number: of a layer that is split over GPUs some heads are elsewhere.
        queries = self.q_proj(hidden_states).view(*shape, -1, self.head_dim * (2 if is_gated(self) else 1))
        keys = self.k_proj(hidden_states).view(*shape, -1, self.head_dim)
        values = self.v_proj(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
        queries, keys, gate = turn(queries, keys, norms, *position_embeddings)
        if hasattr(self, "sliding_window"):
            kwargs["sliding_window"] = self.sliding_window
        output, weights = _attention_of(self, own)(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        if gate is not None:
            output = gate_by(output, gate)
        return self.o_proj(output.reshape(*shape, -1)), weights

    return forward


def _attention_of(module: Any, own: Any) -> Any:
    """The attention that the layer's own forward would call, looked up where that looks it up."""
    names = inspect.unwrap(own).__globals__
    implementation = module.config._attn_implementation
    return names["ALL_ATTENTION_FUNCTIONS"].get_interface(implementation, names["eager_attention_forward"])


def _can_turn(module: Any, hidden_states: Tensor, tables: Any) -> bool:
    """Whether positions come as cosine and sine [B or 1, T, R]: the comparison makes its own, not the model's."""
    if not isinstance(tables, tuple) or len(tables) != 2 or hidden_states.ndim != 3:
        return False
    (cos, sin), (batch, slots, _) = tables, hidden_states.shape
    if cos.ndim != 3 or cos.shape != sin.shape or cos.requires_grad or sin.requires_grad:
        return False
    if batch * slots * module.q_proj.out_features >= _MOST_ELEMENTS:
        return False
    rotary_dim = cos.shape[-1]
    fits = cos.shape[0] in (1, batch) and cos.shape[1] == slots
    return fits and rotary_dim % 2 == 0 and rotary_dim <= module.head_dim


def norms_have_hooks(module: Any) -> bool:
    """Whether anybody waits for a norm's own call: to look at it, or to load its weight (FSDP2, accelerate)."""
    return any(has_hooks(getattr(module, name)) for name in _NORMS)


def has_hooks(module: Any) -> bool:
    """Whether anybody waits for a module's own call."""
    return any(map(module.__dict__.get, _HOOKS))


def _width(norm: Any) -> int | None:
    from hf_speedkit.kernels.fused_forwards import RMS_NORM, part_of

    return int(norm.weight.shape[0]) if part_of(norm) == RMS_NORM else None
