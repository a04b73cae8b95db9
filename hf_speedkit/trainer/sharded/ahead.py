"""Groups that are gathered before their layers run: which, and what becomes of them where those then do not run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from hf_speedkit.trainer.adapters import below_adapters
from hf_speedkit.trainer.sharded.put_back import forget_gradients, put_back
from hf_speedkit.trainer.sharded.units import is_sharded, lists_of_units, parameter_groups, sharded_layers

logger = logging.getLogger(__name__)


def prefetch(model: Any, layers_ahead: int | None, stack: ExitStack) -> str | None:
    """Gather a decoder's layers ahead of time, in forward and backward.

    Args:
        model: the sharded model.
        layers_ahead: None leaves torch's own choice.
        stack: ends it.

    Returns:
        What was changed. Source: FSDPModule.set_modules_to_forward_prefetch and set_modules_to_backward_prefetch.
    """
    layers = sharded_layers(model)
    if not layers_ahead or len(layers) < 2:
        return None
    if (reason := reentrant(model)) is not None:
        logger.warning(
            "FSDP2 gathers ahead what it does by itself, not fsdp_prefetch_layers=%d: %s", layers_ahead, reason
        )
        return None
    for place, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[place + 1 : place + 1 + layers_ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, place - layers_ahead) : place][::-1])
        stack.callback(layer.set_modules_to_forward_prefetch, [])
        stack.callback(layer.set_modules_to_backward_prefetch, [])
    return f"layers are gathered {layers_ahead} ahead"


def gather_next(model: Any, layers_ahead: int, stack: ExitStack) -> None:
    """Let each group of a forward pass gather those behind it: the layers of every list, embedding and head around the
    decoder's.

    Without copies a gather waits for the memory that it writes to, which the training stream gives back. Begun with its
    own layer, as in torch's forward passes, it would wait for the layer before to end, and training for the gather.
    """
    chains = lists_of_units(model)
    decoder = sharded_layers(model)
    embedding = model.get_input_embeddings()
    inside = {id(part) for chain in chains for layer in chain for part in layer.modules()}
    behind = _behind(model, decoder, inside)
    for chain in chains:
        if chain == decoder:
            chain = [*([embedding] if is_sharded(embedding) else []), *chain, *([behind] if behind is not None else [])]
        for place, group in enumerate(chain):
            group.set_modules_to_forward_prefetch(chain[place + 1 : place + 1 + layers_ahead])
            stack.callback(group.set_modules_to_forward_prefetch, [])


def _behind(model: Any, decoder: list[Any], inside: set[int]) -> Any:
    """The unit that runs behind the decoder's layers: the head's, or else the first one defined behind them."""
    if is_sharded(head := model.get_output_embeddings()):
        return head
    modules = list(model.modules())
    last = modules.index(decoder[-1]) if decoder else len(modules)
    units = (module for module in modules[last + 1 :] if is_sharded(module) and id(module) not in inside)
    return next(units, None)


def reentrant(model: Any) -> str | None:
    """Why nothing may be gathered ahead, if checkpointing is reentrant; else None.

    It runs FSDP2's forward hooks in the backward pass: each layer would gather the one behind it again, which is done,
    and the whole model would lie gathered at the end of the step.
    """
    for module in model.modules():
        by_transformers = getattr(module, "_gradient_checkpointing_func", None)
        on = getattr(module, "gradient_checkpointing", True)  # the function stays when it is switched off
        function = (by_transformers if on else None) or getattr(module, "checkpoint_fn", None)
        if (getattr(function, "keywords", None) or {}).get("use_reentrant"):
            return "checkpointing is reentrant, and would gather every layer ahead once more in the backward pass"
    return None


def let_go_of_unused(model: Any, stack: ExitStack, *, compiled: bool = False) -> Callable[..., None]:
    """Let go, with every forward pass and at the end, of what was gathered for layers that then did not run.

    A layer that is skipped, a pass that ends early or fails: torch leaves such a gather pending, waits for it in the
    layer's next forward pass, and takes it for the layer's weights (torch 2.13, `FSDPParamGroup.unshard`: "already
    called, pending wait"), although an optimizer step or a checkpoint has changed those. And what is gathered without
    copies keeps its memory. After a forward pass that raised, and a training that did, what torch keeps of the pass is
    put back too.

    Args:
        model: the sharded model.
        stack: ends it.
        compiled: the hooks are called in what torch.compile captures, and change what it must not.

    Returns:
        What does it, for the end of a backward pass.
    """
    groups = parameter_groups(model)
    if not all(hasattr(group, "_all_gather_result") for group in groups):
        groups = []  # torch's private parts have changed: it is left as it is

    def drop(*_: Any) -> None:
        for group in groups:
            _drop(group)

    def after(module: Any, given: Any, output: Any) -> None:
        drop()
        if output is None:  # it raised: torch calls this all the same, since it is to be called in any case
            put_back(model, groups)

    def leave(kind: Any, *_: Any) -> None:
        try:
            drop()
            if kind is not None:
                put_back(model, groups)
                forget_gradients(groups)
        except RuntimeError as error:  # a device that is lost: what ended the training is to be seen, not this
            logger.warning("FSDP2 was not put back: %s", str(error).partition("\n")[0])

    disable: Any = torch.compiler.disable if compiled else lambda hook: hook
    stack.push(leave)
    # Some losses call the model below the head, without a pass of the whole model around it.
    for module in (model, below_adapters(model).base_model):
        stack.callback(module.register_forward_pre_hook(disable(drop), prepend=True).remove)
    stack.callback(model.register_forward_hook(disable(after), always_call=True).remove)
    return drop


def _drop(group: Any) -> None:
    """Forget a gather that nobody has waited for, and free what it wrote to."""
    if (result := group._all_gather_result) is not None:
        if result.all_gather_event is not None:
            group.device_handle.current_stream().wait_event(result.all_gather_event)
        if isinstance(result.all_gather_work, dist.Work):
            result.all_gather_work.wait()
        group._all_gather_result = None
    # torch's own flat result is gone with it; the weights' own memory is in use with gathered weights only. All of a
    # group's is taken and freed together, so the first one tells.
    written = group.fsdp_params[0].all_gather_outputs if group.is_sharded and group.fsdp_params else ()
    if written and written[0].untyped_storage().size():
        # torch's end of a backward pass has forgotten the gather without holding training up for it: on two H200 (torch
        # 2.11) weights were written into the tensors that took this memory next, in 20 of 22 backward passes behind a
        # pass without one (benchmarks/results/first_look/2026-11-30_2xh200_gathers_let_go_of.json).
        stream = getattr(group.comm_ctx, "all_gather_stream", None)
        if stream is not None:
            group.device_handle.current_stream().wait_stream(stream)
        for param in group.fsdp_params:
            param.free_unsharded_param()
