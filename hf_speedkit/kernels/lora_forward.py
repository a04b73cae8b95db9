"""A forward for peft's adapted linear maps with `lora.adapted_linear` in it, and peft's own wherever that cannot serve.

Checked against peft 0.18.1 and 0.21.2 (tuners/lora/layer.py, Linear.forward). What decides is read at every call: an
adapter that is switched, disabled, merged or scaled after the override was put there is honoured.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_speedkit.kernels.fused_attention import has_hooks

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

logger = logging.getLogger(__name__)

LORA = "lora"

_CHILDREN = {"base_layer", "lora_A", "lora_B", "lora_dropout"}
_CLASS = "peft.tuners.lora.layer.Linear"


class Parts(NamedTuple):
    """What one active adapter beside a frozen map computes with."""

    base: Any
    down: Any
    up: Any
    scaling: float


def has_adapters(module: nn.Module) -> bool:
    """Whether a module is a layer that peft has put low-rank adapters beside, of whatever kind."""
    return set(module._modules) >= _CHILDREN


def why_not_adapted(layer: Any) -> str | None:
    """Why a layer keeps peft's own forward as it stands; None if nothing is known against it."""
    kind = type(layer)
    if (name := f"{kind.__module__}.{kind.__qualname__}") != _CLASS:
        return f"its class is {name}, not {_CLASS}"
    found = parts_of(layer)
    return found if isinstance(found, str) else None


def active_adapters(layer: Any) -> list[str]:
    """Names of the active adapters that this layer has."""
    adapters = layer.lora_A
    return [name for name in layer.active_adapters if name in adapters]


def parts_of(layer: Any) -> Parts | str:
    """What is computed with in the state that adapters and modules are in, or why peft's own forward is to run.

    Looked at before every product; some 15 us of the host's time.
    """
    if layer.disable_adapters:
        return "its adapters are disabled"
    if layer.merged:
        return "an adapter is merged into its weight"
    names = active_adapters(layer)
    if len(names) != 1:
        return f"{len(names)} adapters are active, not one"
    (name,) = names
    if (variant := layer.lora_variant.get(name)) is not None:
        return f"its adapter is a {type(variant).__name__}"
    if getattr(layer.lora_dropout[name], "p", 0.0) > 0:
        return "its adapter has dropout"
    scaling = layer.scaling[name]
    if not isinstance(scaling, (int, float)):
        return f"its scaling is a {type(scaling).__name__}, not a number"
    parts = Parts(layer.base_layer, layer.lora_A[name], layer.lora_B[name], scaling)
    if parts.up.bias is not None or parts.down.bias is not None:
        return "its adapter has a bias"
    return _why_not_maps(parts) or parts


def _why_not_maps(parts: Parts) -> str | None:
    from torch.nn import Linear

    for what, module in zip(("base_layer", "lora_A", "lora_B"), parts[:3], strict=True):
        if type(module) is not Linear:
            return f"its {what} is a {type(module).__name__}, not a Linear"
        if has_hooks(module):
            return f"its {what} has hooks"
        if "forward" in module.__dict__ and (module is not parts.base or _keeper(module) is None):
            return f"its {what} has a forward of somebody else"
        # FSDP2's have a mesh outside of the layer's forward; quantised ones are of a class of their own.
        weight = module.weight
        if not _is_plain(weight) and not hasattr(weight, "device_mesh"):
            return f"its {what} has a weight of {type(weight).__name__}"
    weight, bias = parts.base.weight, parts.base.bias
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return "its own weight or bias is trained"
    if not weight.is_floating_point() or weight.itemsize == 1:
        return f"its weight is {weight.dtype}"
    return None


def adapted_forward() -> Any:
    """A forward (module, x [..., in]) -> [..., out].

    It is peft's own, with the reason in the log once, where `parts_of` says so, with other arguments (a batch of
    several adapters), where weights are split over ranks while it runs, and where x is of another dtype than the weight
    without autocast. Below torch.compile, which fuses by itself, it is peft's own without a word.
    """
    from torch.compiler import is_compiling

    said: set[str] = set()

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return type(self).forward(self, x, *args, **kwargs)
        more = args or any(value is not None for value in kwargs.values())
        parts = "it is called with more than its input" if more else parts_of(self)
        reason = parts if isinstance(parts, str) else _why_not_tensors(parts, x)
        if reason is None and not isinstance(parts, str):
            return _adapted(parts, x)
        if reason not in said:
            said.add(str(reason))
            logger.info("%s of %d -> %d runs peft's forward: %s", LORA, self.in_features, self.out_features, reason)
        return type(self).forward(self, x, *args, **kwargs)

    return forward


def _adapted(parts: Parts, x: Tensor) -> Tensor:
    from hf_speedkit.kernels.lora import Adapter, adapted_linear

    base, dtype = parts.base, _dtype(x)
    adapter = Adapter(parts.down.weight, parts.up.weight, parts.scaling)
    x, weight, bias = x.to(dtype), base.weight.to(dtype), base.bias
    bias = None if bias is None else bias.to(dtype)
    keeper = _keeper(base)
    if keeper is None:
        return adapted_linear(x, weight, bias, adapter)
    kept: Tensor = keeper(
        x, lambda take: adapted_linear(x, weight, bias, adapter, kept=take), beside=adapter.up.numel()
    )
    return kept


def _keeper(base: nn.Module) -> Any:
    """What keeps a map's output for its recomputation: a function (x, make, beside) -> make(take).

    `trainer/memory/kept_products.py` lies over the forward of linear maps; here the sum is what it keeps. `take` gives
    the kept output or None, `beside` is the size of the adapter's matrix that is then not multiplied again.
    """
    return getattr(getattr(base.__dict__.get("forward"), "__self__", None), "through", None)


def _dtype(x: Tensor) -> torch.dtype:
    """The dtype that a layer computes in."""
    import torch

    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _why_not_tensors(parts: Parts, x: Tensor) -> str | None:
    """Why peft's forward is the one to run for what this call holds."""
    import torch

    weight = parts.base.weight
    # Autocast casts all but float64.
    autocast = torch.is_autocast_enabled(x.device.type)
    if torch.float64 in (x.dtype, weight.dtype) if autocast else x.dtype != weight.dtype:
        return f"its input is {x.dtype}, its weight {weight.dtype}"
    if not (_is_plain(weight) and _is_plain(parts.down.weight) and _is_plain(parts.up.weight)):
        return "its weights are split over ranks while it runs"
    return None


def _is_plain(weight: Tensor) -> bool:
    from torch import Tensor
    from torch.nn import Parameter

    return type(weight) in (Parameter, Tensor)
