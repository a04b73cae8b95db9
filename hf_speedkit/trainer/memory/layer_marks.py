"""Says when the forward and the backward pass of each layer begin, recomputation left out, and lies over a forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch


def mark_layers(
    layers: Sequence[torch.nn.Module],
    *,
    forward: Callable[[int], None],
    backward: Callable[[int], None],
) -> list[Any]:
    """Call `forward(number)` before a layer's forward pass and `backward(number)` before its backward pass.

    A checkpointed layer's forward pass runs again inside the backward pass; that one is not announced. Forward passes
    without gradients are.

    Args:
        layers: first layer first.
        forward, backward: called with the layer's place.

    Returns:
        Handles; remove them to end it.
    """
    handles: list[Any] = []
    for number, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(_before(number, forward)))
        handles.append(layer.register_forward_hook(_after(number, backward)))
    return handles


def lay_over(layer: torch.nn.Module, around: Callable[..., Any]) -> Callable[[], None]:
    """Let `around(former, *args, **kwargs)` stand for a layer's forward, `former`; a copy of the layer keeps its own.

    Returns:
        What takes it away again, unless something else lies over the forward by then.
    """
    former, own = layer.forward, layer.__dict__.get("forward")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not layer:  # deepcopy binds it to the copy: `former` would compute with this layer's weights
            return type(self).forward(self, *args, **kwargs)
        return around(former, *args, **kwargs)

    bound = MethodType(forward, layer)
    layer.forward = bound

    def undo() -> None:
        if layer.__dict__.get("forward") is not bound:
            return
        if own is None:
            del layer.forward
        else:
            layer.forward = own

    return undo


def _before(number: int, call: Callable[[int], None]) -> Any:
    def entered(*_: Any) -> None:
        if not recomputes():
            call(number)

    return entered


def _after(number: int, call: Callable[[int], None]) -> Any:
    def left(_: Any, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad and not recomputes():
            # The gradient of the layer's output arrives right before the layer's backward pass.
            hidden.register_hook(lambda _: call(number))

    return left


def recomputes() -> bool:
    """Whether this runs inside a backward pass; that is how torch.utils.checkpoint tells it."""
    return torch._C._current_graph_task_id() != -1
