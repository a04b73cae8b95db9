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
from hf_speedkit.trainer.sharded.gradient_memory import ReduceScatterInOneMemory
from hf_speedkit.trainer.sharded.zero_copy import ZeroCopyAllGather, ZeroCopyReduceScatter, obstacle, zero_copy
from hf_speedkit.trainer.sharded.zero_copy_proof import difference

logger = logging.getLogger(__name__)


@contextmanager
def corrected_gathers(
    model: Any, *, prefetch_layers: int | None = None, backward_passes: int = 1, without_copies: bool = True
) -> Iterator[tuple[str, ...]]:
    """Let an FSDP2 model gather what it needs, when it needs it, for the time of the context.

    1. The output head, where it is alone in its group, is gathered before the fused loss reads its weight.
    2. The input embedding is not gathered for the backward pass, which needs the token ids only.
    3. A group whose head never ran is as new after an evaluation (torch before 2.13 leaves it half-way).
    4. With `prefetch_layers`, that many layers are gathered ahead, in forward and backward.
    5. In steps of one backward pass, gradients lie in the memory that activations were in (`gradient_memory`).
    6. Weights are gathered into the parameters and gradients reduced from where they are, without copies (`zero_copy`).

    Args:
        model: the prepared model; anything else passes through.
        prefetch_layers: None leaves torch's own: one layer ahead. Each more holds one more whole layer in memory.
        backward_passes: of an optimizer step.
        without_copies: whether to do 6, where this torch allows it.

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
                    *_one_memory(model, backward_passes, without_copies, prefetch_layers or 1, stack),
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


def _one_memory(
    model: Any, backward_passes: int, without_copies: bool, layers_ahead: int, stack: ExitStack
) -> Iterator[str]:
    if not hasattr(model, "set_custom_reduce_scatter"):
        return
    memory = ReduceScatterInOneMemory(next(model.parameters()).device)
    if backward_passes > 1:
        memory.close()
    else:
        for module in model.modules():
            if is_sharded(module):
                module.set_custom_reduce_scatter(memory)
        handle = model.register_forward_pre_hook(memory.release)
        stack.callback(memory.close)
        stack.callback(handle.remove)
        yield "gradients lie in the memory that activations were in"
    if without_copies and (line := _without_copies(model, memory, layers_ahead, stack)) is not None:
        yield line


def _without_copies(model: Any, memory: ReduceScatterInOneMemory, layers_ahead: int, stack: ExitStack) -> str | None:
    if not hasattr(model, "set_custom_all_gather"):
        return None
    units = [module for module in model.modules() if is_sharded(module)]
    with ExitStack() as own:
        reason = obstacle() or _reentrant(model)
        if reason is None:
            own.enter_context(zero_copy())
            gather, reduce_scatter = ZeroCopyAllGather(), ZeroCopyReduceScatter(memory)
            for module in units:
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(reduce_scatter)
            try:
                reason = difference(layer for layers in _lists_of_layers(model) for layer in layers)
            except (AttributeError, TypeError) as error:  # torch's private parts have changed, and on all ranks alike
                reason = f"torch {torch.__version__} is made in another way ({error})"
        if reason is not None:
            logger.warning("FSDP2 copies weights and gradients, as it does by itself: %s", reason)
            return None
        _gather_ahead(model, layers_ahead, own)
        stack.enter_context(own.pop_all())
    return "weights are gathered into the parameters and gradients reduced from where they are, without copies"


def _reentrant(model: Any) -> str | None:
    """Reentrant checkpointing runs FSDP2's forward hooks in the backward pass: each layer would gather the one behind
    it again, which is done, and the whole model would lie gathered at the end of the step."""
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None) or getattr(module, "checkpoint_fn", None)
        if (getattr(function, "keywords", None) or {}).get("use_reentrant"):
            return "checkpointing is reentrant, and would gather every layer ahead once more in the backward pass"
    return None


def _gather_ahead(model: Any, layers_ahead: int, stack: ExitStack) -> None:
    """Let each group of a forward pass gather those behind it.

    Without copies a gather waits for the memory that it writes to, which the training stream gives back. Begun with its
    own layer, as in torch's forward passes, it would wait for the layer before to end, and training for the gather.
    """
    chains = _lists_of_layers(model)
    longest = _layers(model)
    within = {id(part) for chain in chains for layer in chain for part in layer.modules()}
    embedding = model.get_input_embeddings()
    behind = next(
        (m for m in model.modules() if is_sharded(m) and m not in (model, embedding) and id(m) not in within), None
    )
    for chain in chains:
        if chain == longest:
            chain = [*([embedding] if is_sharded(embedding) else []), *chain, *([behind] if behind is not None else [])]
        for place, group in enumerate(chain):
            group.set_modules_to_forward_prefetch(chain[place + 1 : place + 1 + layers_ahead])
            stack.callback(group.set_modules_to_forward_prefetch, [])


def _layers(model: Any) -> list[Any]:
    """The sharded layers, in the order in which they run: the longest list of modules that are all FSDP2 units."""
    return max(_lists_of_layers(model), key=len, default=[])


def _lists_of_layers(model: Any) -> list[list[Any]]:
    lists = [
        [_within_wrapper(part) for part in module]
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList)
    ]
    return [layers for layers in lists if layers and all(is_sharded(layer) for layer in layers)]


def _within_wrapper(module: Any) -> Any:
    """The layer in FSDP's own activation checkpointing: accelerate shards it, and the wrapper around what is left."""
    while (inner := getattr(module, "_checkpoint_wrapped_module", None)) is not None:
        module = inner
    return module


def _backbone(model: Any) -> Any:
    """The model without its head, also inside a PEFT wrapper."""
    return below_adapters(model).base_model
