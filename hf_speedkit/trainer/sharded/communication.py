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
from hf_speedkit.trainer.sharded.ahead import gather_next, let_go_of_unused, prefetch, reentrant
from hf_speedkit.trainer.sharded.gradient_memory import ReduceScatterInOneMemory
from hf_speedkit.trainer.sharded.units import group_of, is_sharded, parameter_groups
from hf_speedkit.trainer.sharded.zero_copy import ZeroCopyAllGather, ZeroCopyReduceScatter, obstacle, zero_copy
from hf_speedkit.trainer.sharded.zero_copy_proof import proven

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
    7. What was gathered ahead of layers that did not run is let go of with the pass (`let_go_of_unused`).

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
    compiled = hasattr(model, "_orig_mod")
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper is no FSDP2 unit itself
    with ExitStack() as stack:
        lines: list[str | None] = []
        if is_sharded(model):
            let_go_of_them = let_go_of_unused(model, stack, compiled=compiled)
            lines += [
                _gather_lone_head(model, stack),
                _spare_embedding(model, stack),
                _finish_partial_groups(model, stack),
                prefetch(model, prefetch_layers, stack),
            ]
            if hasattr(model, "set_custom_reduce_scatter"):
                memory = ReduceScatterInOneMemory(next(model.parameters()).device)
                lines.append(_one_memory(model, memory, backward_passes, stack))
                if without_copies:
                    gather = ZeroCopyAllGather(let_go_of_them)
                    lines.append(_without_copies(model, gather, memory, prefetch_layers or 1, stack))
        changed = tuple(line for line in lines if line is not None)
        for line in changed:
            logger.info("FSDP2: %s", line)
        yield changed


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


def _one_memory(model: Any, memory: ReduceScatterInOneMemory, backward_passes: int, stack: ExitStack) -> str | None:
    if backward_passes > 1:
        memory.close()
        return None
    _communicate(model, stack, reduce_scatter=memory)
    handle = model.register_forward_pre_hook(memory.release)
    stack.callback(memory.close)
    stack.callback(handle.remove)
    return "gradients lie in the memory that activations were in"


def _without_copies(
    model: Any, gather: ZeroCopyAllGather, memory: ReduceScatterInOneMemory, layers_ahead: int, stack: ExitStack
) -> str | None:
    if not hasattr(model, "set_custom_all_gather"):
        return None
    with ExitStack() as own:
        reason = obstacle() or reentrant(model)
        if reason is None:
            own.enter_context(zero_copy())
            _communicate(model, own, gather=gather, reduce_scatter=ZeroCopyReduceScatter(memory))
            try:
                found = proven(parameter_groups(model))
                reason = found.wrong
            except (AttributeError, TypeError) as error:  # torch's private parts have changed, and on all ranks alike
                reason = f"torch {torch.__version__} is made in another way ({error})"
        if reason is not None:
            logger.warning("FSDP2 copies weights and gradients, as it does by itself: %s", reason)
            return None
        if not found.gathered and not found.reduced:
            logger.info("FSDP2 copies weights and gradients, as it does by itself: %s", found.why_none)
            return None
        if found.gathered:
            gather_next(model, layers_ahead, own)
        stack.enter_context(own.pop_all())
    return found.line


def _communicate(model: Any, stack: ExitStack, *, reduce_scatter: Any, gather: Any = None) -> None:
    """Let all groups use these, and what they used before when it ends (torch has a method for the first only)."""
    for group in parameter_groups(model):
        for name in ("_all_gather_comm", "_reduce_scatter_comm"):
            if hasattr(group, name):
                stack.callback(setattr, group, name, getattr(group, name))
    for module in model.modules():
        if is_sharded(module):
            module.set_custom_reduce_scatter(reduce_scatter)
            if gather is not None:
                module.set_custom_all_gather(gather)


def _backbone(model: Any) -> Any:
    """The model without its head, also inside a PEFT wrapper."""
    return below_adapters(model).base_model
