"""Low-rank adapters and 4-bit weights for a memory trace: what peft and bitsandbytes do to a layer, without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters beside frozen linear maps.

    Args:
        rank: of each.
        targets: names of the linear maps (their last part) that get one; empty means all of the layers'.
        dtype_bytes: 4 where peft keeps them in fp32, 2 for bf16.
        fused: beside weights that are not packed they run as in `lora.py`, which holds no input in fp32.
    """

    rank: int = 16
    targets: tuple[str, ...] = ()
    dtype_bytes: int = 4
    fused: bool = False


def adapt(layer: nn.Module, adapters: Adapters, *, four_bit: bool) -> None:
    """Freeze a layer and put adapters beside its linear maps, as peft's lora.Linear does (peft 0.21 layer.py:1074)."""
    import torch
    from torch import nn

    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    dtype = torch.float32 if adapters.dtype_bytes == 4 else torch.bfloat16
    for name, module in list(layer.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        adapted = not adapters.targets or name.rpartition(".")[2] in adapters.targets
        if adapted or four_bit:
            rank = adapters.rank if adapted else None
            parent = layer.get_submodule(name.rpartition(".")[0])
            fused = adapters.fused and not four_bit
            setattr(parent, name.rpartition(".")[2], _adapted_linear(module, rank, dtype, four_bit, fused))


def _adapted_linear(base: nn.Linear, rank: int | None, dtype: torch.dtype, four_bit: bool, fused: bool) -> nn.Module:
    from torch import nn

    from hf_speedkit.kernels.lora import Adapter, adapted_linear
    from hf_speedkit.kernels.saved_tensors import FourBitLinear

    unpacked: Any = FourBitLinear

    class AdaptedLinear(nn.Module):
        """A frozen linear map and, beside it, two narrow trained ones."""

        def __init__(self) -> None:
            super().__init__()
            self.base = base
            self.in_features, self.out_features = base.in_features, base.out_features  # as peft's layers say them
            self.down = None if rank is None else nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
            self.up = None if rank is None else nn.Linear(rank, base.out_features, bias=False, dtype=dtype)

        def forward(self, x: torch.Tensor) -> Any:
            """The map's output plus the adapter's."""
            if fused and self.down is not None and self.up is not None:
                adapter = Adapter(down=self.down.weight, up=self.up.weight, scaling=2.0)
                return adapted_linear(x, base.weight.to(x.dtype), base.bias, adapter)
            shape = (base.out_features, base.in_features)
            result = unpacked.apply(x, *shape) if four_bit else self.base(x)
            if self.down is None or self.up is None:
                return result
            return (result + self.up(self.down(x.to(dtype))) * 2.0).to(result.dtype)

    return AdaptedLinear()
