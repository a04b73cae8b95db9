"""Holds a fused attention forward against the layer's own: what attention is handed, the output, every gradient.

The projections are taken out (their outputs are given), and attention is one that adds up what it is handed, so that a
comparison costs neither a product of matrices nor T^2, and every slot of training's row can take part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_speedkit.kernels.fused_attention import heads_of, is_gated
from hf_speedkit.kernels.fused_parity import (
    COMPARED_ROWS,
    Given,
    Parity,
    first_run,
    judge,
    not_finite,
    other_dtype,
    plain_twin,
)
from hf_speedkit.kernels.probe import TOLERANCES, first_words

_NAME = "speedkit_adds_up"
COMPARED_SLOTS = 1024
"""Of the end of the row, where offsets are largest; those before them run too."""

_DOCUMENT_SLOTS = 409  # positions begin again there; a prime, so that no block of a kernel ends where a document does


@dataclass(slots=True, kw_only=True)
class _Handed:
    """What a forward handed to attention.

    Args:
        tensors: queries, keys and values.
        arguments: all others.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


def compare_attention(
    module: Any, forward: Callable[..., Any], *, slots: int, device: torch.device, dtype: torch.dtype
) -> Parity:
    """Run `forward` and the layer's own forward on the same random projections, in positions that begin again.

    Args:
        module: the layer; only its class, settings and sizes are used, never its weights.
        forward: see `fused_attention.attention_forward`.
        slots: of training's row; at most `COMPARED_ROWS` run.
        device, dtype: of the activations.
    """
    slots = min(slots, COMPARED_ROWS)
    generator = torch.Generator(device).manual_seed(0)
    norms: dict[str, Any] = {"q_norm": module.q_norm, "k_norm": module.k_norm}
    # FSDP2, whose weights have a mesh, hands them over in the dtype of the activations.
    weight_dtype = dtype if hasattr(module.q_norm.weight, "device_mesh") else module.q_norm.weight.dtype
    weights = {name: _random(norm.weight.shape, generator, device, weight_dtype) for name, norm in norms.items()}
    given = {name: _random((1, slots, width), generator, device, dtype) for name, width in _widths(module).items()}
    examined = slice(max(0, slots - COMPARED_SLOTS), slots)
    incoming = _random((1, slots, _output_width(module)), generator, device, dtype)
    incoming[:, : examined.start] = 0
    # In the weights' dtype: the rotary tables come in that of the embeddings, float32 under autocast.
    tables = _tables(_rotary_dim(module), slots, device, weight_dtype)
    own = type(module).forward
    exact = {name: value[:, examined].float() for name, value in given.items()}
    exact_tables = tuple(table[:, examined].float() for table in tables)
    one_slot = {name: value[:, :1] for name, value in given.items()}
    with _attention_that_adds_up(module) as twin:
        try:
            wanted_weights = {name: value.float() for name, value in weights.items()}
            wanted, wanted_hands = _run(twin, own, exact, wanted_weights, exact_tables, incoming[:, examined].float())
            one_tables = tuple(table[:, :1] for table in tables)
            plain, plain_hands = _run(twin, own, one_slot, weights, one_tables, incoming[:, :1])
        except Exception as error:  # noqa: BLE001 (any model's own code)
            return Parity(problem=f"its own forward does not run by itself ({first_words(error)})")
        outcome = first_run(lambda: _run(twin, forward, given, weights, tables, incoming), device)
    if isinstance(outcome, Parity):
        return outcome
    (found, hands), seconds = outcome
    if hands.arguments != wanted_hands.arguments:
        return Parity(problem=_other_arguments(hands.arguments, wanted_hands.arguments))
    everything = {**found, **hands.tensors}
    other = other_dtype(everything, {"the output": plain["the output"], **plain_hands.tensors})
    problem = other or not_finite(everything)
    if problem is not None:
        return problem
    found = {name: value if name in weights else value[:, examined] for name, value in found.items()}
    found |= {name: value[:, :, examined] for name, value in hands.tensors.items()}
    count = examined.stop - examined.start
    return judge(
        found, {**wanted, **wanted_hands.tensors}, [*weights, *hands.tensors], count, TOLERANCES[dtype], seconds
    )


def _run(
    twin: Any,
    forward: Callable[..., Any],
    given: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    tables: tuple[Tensor, ...],
    incoming: Tensor,
) -> tuple[dict[str, Tensor], _Handed]:
    leaves = {name: value.detach().clone().requires_grad_() for name, value in given.items()}
    norms: dict[str, Any] = {
        name: plain_twin(getattr(twin, name), {"weight": weight}) for name, weight in weights.items()
    }
    projections = {name: Given(leaf) for name, leaf in leaves.items()}
    twin._modules = {**projections, "o_proj": nn.Identity(), **norms}
    handed = twin.config.handed = _Handed()
    parameters = {name: norm.weight for name, norm in norms.items()}
    hidden = incoming[..., :1]
    with torch.enable_grad(), torch.autocast(incoming.device.type, enabled=False):
        arguments = {"hidden_states": hidden, "position_embeddings": tables, "attention_mask": None}
        output, _ = forward(twin, **arguments, position_ids=_NAME, cu_seq_lens_q=_NAME)
        targets = [*leaves.values(), *parameters.values()]
        values = torch.autograd.grad(output, targets, incoming.to(output.dtype))
    names = [*(f"the gradient of {name}'s output" for name in leaves), *parameters]
    return {"the output": output.detach(), **dict(zip(names, values, strict=True))}, handed


@contextmanager
def _attention_that_adds_up(module: nn.Module) -> Iterator[nn.Module]:
    """The layer with an attention that returns queries + keys + values and notes what it was handed."""
    from transformers import AttentionInterface

    twin = plain_twin(module, {})
    # Before the first step a model may still be in evaluation mode, and its dropout 0 as most are: any other would do.
    twin.__dict__.update(training=True, attention_dropout=0.125)
    config: Any = copy.copy(module.config)
    config._attn_implementation_internal = _NAME  # the setter would change the configs inside, which are shared
    twin.__dict__["config"] = config
    AttentionInterface.register(_NAME, _add_up)
    try:
        yield twin
    finally:
        AttentionInterface._global_mapping.pop(_NAME)  # private; there is no public way to take a name out


def _add_up(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
) -> tuple[Tensor, None]:
    handed = module.config.handed
    handed.tensors = {"the query": query.detach(), "the key": key.detach(), "the value": value.detach()}
    handed.arguments = {"attention_mask": attention_mask, **arguments}
    shared = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    return sum(shared, query).transpose(1, 2).contiguous().to(value.dtype), None


def _other_arguments(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    missing = object()
    names = sorted(n for n in found.keys() | wanted.keys() if found.get(n, missing) != wanted.get(n, missing))
    parts = [f"{n}={d[n]}" if n in d else f"no {n}" for d in (found, wanted) for n in names]
    return f"it hands attention {', '.join(parts[: len(names)])}, the layer {', '.join(parts[len(names) :])}"


def _widths(module: Any) -> dict[str, int]:
    q_heads, k_heads = heads_of(module) or (0, 0)
    keys = k_heads * module.head_dim
    return {"q_proj": q_heads * module.head_dim * (2 if is_gated(module) else 1), "k_proj": keys, "v_proj": keys}


def _output_width(module: Any) -> int:
    return int(module.head_dim * module.config.num_attention_heads)


def _rotary_dim(module: Any) -> int:
    """Columns of a head that turn; of several kinds of positions in one config the first's."""
    config = module.config
    settings = getattr(config, "rope_parameters", None) or {}
    if settings and all(isinstance(value, dict) for value in settings.values()):
        settings = next(iter(settings.values()))
    factor = settings.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return int(module.head_dim * (1.0 if factor is None else factor))


def _tables(rotary_dim: int, slots: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, rotary_dim, 2, device=device) / rotary_dim
    angles = (torch.arange(slots, device=device) % _DOCUMENT_SLOTS)[:, None] * 10_000.0**-half
    angles = torch.cat((angles, angles), dim=-1)[None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _random(shape: Any, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, device=device).to(dtype)
