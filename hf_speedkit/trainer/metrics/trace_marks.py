"""Name the building of attention masks in a trace.

Mask kernels are ordinary comparisons and sums; without a named range around them nothing tells them from the rest of
the forward (case V60). transformers looks its mask functions up in AttentionMaskInterface, an official extension
point (checked with 5.23, masking_utils.py): while steps are traced, each is wrapped in a range.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

MASK_RANGE = "hf_speedkit: mask build"


@contextlib.contextmanager
def marked_mask_building(model: Any) -> Iterator[None]:
    """Wrap every registered mask function in a named range; put the old ones back afterwards.

    A compiled model is left alone: its guards would see the change and recompile inside the traced step.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    if model is None or _is_compiled(model):
        yield
        return
    originals = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()}
    for name, function in originals.items():
        AttentionMaskInterface.register(name, _named(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            AttentionMaskInterface.register(name, function)


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_range(*args: Any, **kwargs: Any) -> Any:
        from torch.profiler import record_function

        with record_function(MASK_RANGE):
            return function(*args, **kwargs)

    return with_range


def _is_compiled(model: Any) -> bool:
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )
