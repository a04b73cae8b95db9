"""FSDP2's gathers, corrected after accelerate has sharded a model; everything is put back with the context.

accelerate 1.15 lets one set when layers are resharded (`reshard_after_forward`) and nothing else: it shards every
layer, the input embedding, and final norm and output head together, and refuses `forward_prefetch`. What is left to do
goes through the public methods of `torch.distributed.fsdp.FSDPModule`. Measured figures: docs/fsdp2.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer.adapters import below_adapters
from hf_speedkit.trainer.gradient_memory import ReduceScatterInOneMemory

logger = logging.getLogger(__name__)


@contextmanager
def corrected_gathers(
    model: Any, *, prefetch_layers: int | None = None, backward_passes: int = 1
) -> Iterator[tuple[str, ...]]:
    """Let an FSDP2 model gather what it needs, when it needs it, for the time of the context.

    1. The output head, where it is alone in its group, is gathered before the fused loss reads its weight.
    2. The input embedding is not gathered for the backward pass, which needs the token ids only.
    3. A group whose head never ran is as new after an evaluation (torch before 2.13 leaves it half-way).
    4. With `prefetch_layers`, that many layers are gathered ahead, in forward and backward.
    5. In steps of one backward pass, gradients lie in the memory that activations were in (`gradient_memory`).

    Args:
        model: the prepared model; anything else passes through.
        prefetch_layers: None leaves torch's own: one layer ahead. Each more holds one more whole layer in memory.
        backward_passes: of an optimizer step.

    Yields:
        One line per thing that was changed.

    Raises:
        ConfigurationError: fewer than one layer ahead.
    """
    if prefetch_layers is not None and prefetch_layers < 1:
        raise ConfigurationError(
            f"fsdp_prefetch_layers={prefetch_layers} is no number of layers", mend="leave it out: torch gathers 1 ahead"
        )
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper is no FSDP2 unit itself
    with ExitStack() as stack:
        lines = []
        if is_sharded(model):
            lines = [
                line
                for line in (
                    _gather_lone_head(model, stack),
                    _spare_embedding(model, stack),
                    _finish_partial_groups(model, stack),
                    _prefetch(model, prefetch_layers, stack),
                    _one_memory(model, backward_passes, stack),
                )
                if line is not None
            ]
        for line in lines:
            logger.info("FSDP2: %s", line)
        yield tuple(lines)


def is_sharded(module: Any) -> bool:
    """Whether `fully_shard` was applied to this very module."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def group_of(module: Any) -> tuple[torch.nn.Module, ...]:
    """The modules that are gathered together with this one; empty where it is no FSDP2 unit.

    Reads a private attribute of torch, the same from 2.6 to 2.13 (`FSDPState._modules`); an unknown layout gives the
    module alone.
    """
    if not is_sharded(module):
        return ()
    modules: tuple[torch.nn.Module, ...] = getattr(module._get_fsdp_state(), "_modules", (module,))
    return modules


def _gather_lone_head(model: Any, stack: ExitStack) -> str | None:
    """Gather a head that is alone in its group when the layers below it are done.

    accelerate shards the head together with the final norm where it finds one, right below the model
    (`_find_final_norm`); in a vision-language model or under PEFT it finds none. TRL's fused loss then reads the weight
    of a head that no forward pass has gathered, and gathers it by `DTensor.full_tensor()` (trl 1.16
    trainer/utils.py:1637), whose backward keeps the local rank's gradient where the mean over the ranks belongs.
    Gathered here, the head's gradient is reduced like any other at the end of the backward pass.
    """
    head = model.get_output_embeddings()
    if head is None or group_of(head) != (head,):
        return None

    def gather(*_: Any) -> None:
        head.unshard()

    handle = _backbone(model).register_forward_hook(gather)
    stack.callback(handle.remove)
    return "the output head is gathered for the fused loss, and its gradient averaged over the ranks"


def _spare_embedding(model: Any, stack: ExitStack) -> str | None:
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, torch.nn.Embedding) or group_of(embedding) != (embedding,):
        return None  # tied to the head, or with an adapter: its backward needs the weight
    embedding.set_unshard_in_backward(False)  # type: ignore[operator]
    stack.callback(embedding.set_unshard_in_backward, True)  # type: ignore[arg-type]
    return "the input embedding is not gathered for the backward pass"


def _finish_partial_groups(model: Any, stack: ExitStack) -> str | None:
    """Clear what a forward pass leaves of groups that ran in part: the head is read, never called.

    torch before 2.13 clears it at the end of a backward pass only (`_finalize_backward`). After an evaluation it is
    still there, saving a checkpoint reshards the group, and the next step's norm meets a sharded weight: "got mixed
    torch.Tensor and DTensor".
    """
    states = {
        id(state): state
        for state in (module._get_fsdp_state() for module in model.modules() if is_sharded(module))
        if len(getattr(state, "_modules", ())) > 1 and hasattr(state, "_modules_to_run_forward")
    }
    if not states or hasattr(next(iter(states.values())), "_force_complete_incomplete_states"):
        return None

    def finish(*_: Any) -> None:
        if not torch.is_grad_enabled():
            for state in states.values():
                state._modules_to_run_forward.clear()

    handle = model.register_forward_hook(finish)
    stack.callback(handle.remove)
    return "groups that an evaluation ran in part are completed"


def _prefetch(model: Any, layers_ahead: int | None, stack: ExitStack) -> str | None:
    """Gather layers ahead of time.

    Source: FSDPModule.set_modules_to_forward_prefetch and set_modules_to_backward_prefetch.
    """
    layers = _layers(model)
    if not layers_ahead or len(layers) < 2:
        return None
    for place, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[place + 1 : place + 1 + layers_ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, place - layers_ahead) : place][::-1])
        stack.callback(layer.set_modules_to_forward_prefetch, [])
        stack.callback(layer.set_modules_to_backward_prefetch, [])
    return f"layers are gathered {layers_ahead} ahead"


def _one_memory(model: Any, backward_passes: int, stack: ExitStack) -> str | None:
    if backward_passes > 1 or not hasattr(model, "set_custom_reduce_scatter"):
        return None
    reduce_scatter = ReduceScatterInOneMemory(next(model.parameters()).device)
    for module in model.modules():
        if is_sharded(module):
            module.set_custom_reduce_scatter(reduce_scatter)
    handle = model.register_forward_pre_hook(reduce_scatter.release)
    stack.callback(reduce_scatter.close)
    stack.callback(handle.remove)
    return "gradients lie in the memory that activations were in"


def _layers(model: Any) -> list[Any]:
    """The sharded layers, in the order in which they run: the longest list of modules that are all FSDP2 units."""
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) and all(is_sharded(part) for part in module)
    ]
    return max(lists, key=len, default=[])


def _backbone(model: Any) -> Any:
    """The model without its head, also inside a PEFT wrapper."""
    return below_adapters(model).base_model
