"""Which operation of a layer lets documents see one another: convolution, recurrence or attention.

A leak seen from outside does not say where it is, and a convolution leak hides a recurrence leak behind it. So each
operation is asked on its own: when it is called for the first time, it is called twice more, as it was and with every
other document's inputs replaced, and its output for the document under test must not move. Where a leak is seen and no
first call shows it, every call of every layer is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Module globals that mix positions, as transformers 5.23's modeling files name them (`use_kernelized_func`).
_FUNCTIONS = {
    "causal_conv1d_fn": "convolution",
    "torch_chunk_gated_delta_rule": "recurrence",
    "chunk_kimi_delta_attention": "recurrence",
    "mamba_selective_scan": "recurrence",
    "mamba2_chunk_scan": "recurrence",
    # Both in one kernel of mamba_ssm; without it they give None, and the layer calls the two above.
    "mamba_inner_fn": "convolution and recurrence",
    "mamba2_split_conv1d_scan_combined": "convolution and recurrence",
}


class OperationProbe:
    """While active, checks the first call of each position-mixing operation of a model.

    Args:
        model: the model whose forward is about to run.
        start, stop: positions of the document under test.
        slots: length of the row, T.
        every_call: check all of them; costs two more calls of each.
    """

    def __init__(self, model: torch.nn.Module, start: int, stop: int, slots: int, *, every_call: bool = False) -> None:
        self._model, self._start, self._stop, self._slots = model, start, stop, slots
        self._every_call, self._asking = every_call, False
        self._moved: dict[str, float] = {}
        self._undo: list[Callable[[], None]] = []

    def operations(self) -> tuple[str, ...]:
        """Names of the operations that were reached."""
        return tuple(self._moved)

    def leaks(self) -> tuple[str, ...]:
        """Names of the operations whose output moved."""
        return tuple(name for name, change in self._moved.items() if change > 0.0)

    def __enter__(self) -> OperationProbe:
        for module in self._modeling_files():
            for function, name in _FUNCTIONS.items():
                original = vars(module).get(function)
                if callable(original):
                    setattr(module, function, self._watched(original, name))
                    self._undo.append(lambda m=module, f=function, o=original: setattr(m, f, o))  # type: ignore[misc]
        for layer in self._model.modules():
            if type(layer).__name__.endswith("Attention") and not _has_decay(layer):
                handle = layer.register_forward_hook(self._attention_hook, with_kwargs=True)
                self._undo.append(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()

    def _modeling_files(self) -> list[ModuleType]:
        names = {type(layer).__module__ for layer in self._model.modules()}
        return [sys.modules[name] for name in sorted(names) if name in sys.modules]

    def _watched(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            output = function(*args, **kwargs)
            if output is not None:
                self._ask(name, function, args, kwargs)
            return output

        return watched

    def _attention_hook(self, layer: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        # A cross-attention has a second input; only self-attention over the row can be asked this way.
        # `forward` and not the module: the call is inside its own hook, and under FSDP2 its weights are here now.
        self._ask("attention", layer.forward, args, kwargs)

    def _ask(self, name: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        if self._asking or (name in self._moved and not self._every_call):
            return
        self._asking = True  # a nested call is part of this one
        try:
            moved = self._movement(name, call, args, kwargs)
        finally:
            self._asking = False
        if moved is not None:
            self._moved[name] = max(moved, self._moved.get(name, 0.0))

    def _movement(self, name: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> float | None:
        """How far the document's output moves when the others' inputs are replaced; None without a position axis."""
        import torch

        before = _first(self._repeat(call, args, kwargs))
        square = 2 if name == "convolution" else 1  # transformers calls it with [B, channels, T]
        changed = (
            tuple(self._replaced(a, square) for a in args),
            {k: self._replaced(v, square) for k, v in kwargs.items()},
        )
        after = _first(self._repeat(call, *changed))
        axis = self._axis(before, square)
        if axis is None:
            return None
        difference = (after.float() - before.float()).abs().narrow(axis, self._start, self._stop - self._start)
        return float(torch.nan_to_num(difference, nan=float("inf")).max())

    def _repeat(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A call on the side: no graph, the same dropout each time, and the random state of the pass untouched."""
        import torch

        device = next(iter(self._model.parameters())).device
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            return call(*args, **kwargs)

    def _replaced(self, value: Any, square: int) -> Any:
        """The tensor with other documents' positions changed; anything without a position axis as it is."""
        import torch

        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        axis = self._axis(value, square)
        if axis is None:
            return value
        # Negated and halved: other numbers, but the same range, so that decays and gates stay what they are.
        one_sign = bool((value <= 0).all()) or bool((value >= 0).all())
        changed = value.detach() * (0.5 if one_sign else -0.5)
        inside = value.detach().narrow(axis, self._start, self._stop - self._start)
        changed.narrow(axis, self._start, self._stop - self._start).copy_(inside)
        return changed

    def _axis(self, value: torch.Tensor, square: int) -> int | None:
        """The position axis of [B, T, ...] or of a channels-first [B, D, T]; None where there is none.

        `square` decides where D equals T: 8,192 channels of a convolution in a row of 8,192 slots are no rarity.
        """
        if value.ndim < 2:
            return None
        if value.ndim == 3 and value.shape[2] == self._slots and (value.shape[1] != self._slots or square == 2):
            return 2
        return 1 if value.shape[1] == self._slots else None


def _has_decay(layer: torch.nn.Module) -> bool:
    """Whether a layer is a recurrence, whatever its class is called (KimiLinearDeltaAttention)."""
    return any(name.rsplit(".", 1)[-1] == "A_log" for name, _ in layer.named_parameters())


def _first(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return tensor
