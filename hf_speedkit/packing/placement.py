"""A document means the same wherever it lies in a row: it is scored at the row's start as it is in the middle.

Documents may be kept apart and yet be trained wrong: by positions that count the row's slots where the model has
learned ones, by attention cut at slots of the row, by a choice of keys that looks at the whole row. Replacing the other
documents shows none of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hf_speedkit.packing.boundaries import Document

if TYPE_CHECKING:
    import torch

# Of log-probabilities, in fp32. A CPU rounds by 5e-7; matrix products of a GPU may be in TF32, which has 11 bits.
_CPU_TOLERANCE = 1e-4
_GPU_TOLERANCE = 0.2


def placement_tolerance(device: torch.device) -> float:
    """The largest change that rounding explains in fp32, in log-probability."""
    return _CPU_TOLERANCE if device.type == "cpu" else _GPU_TOLERANCE


def placement_change(
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    documents: Sequence[Document],
    index: int,
    score: Callable[[Mapping[str, Any]], torch.Tensor],
) -> float | None:
    """Largest change of a document's log-probabilities when it moves to the start of its row.

    Args:
        model: as prepared for training; it is in evaluation mode for two forward passes (dropout draws by slot).
        inputs: one packed row, tensors [1, T] and `cu_seq_lens_*`.
        documents: of the row.
        index: the document to move.
        score: the inputs' log-probabilities, [1, T - 1].

    Returns:
        None where a product is computed in 16 bits, which round too much to tell.
    """
    import torch

    weights = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if weights & {torch.bfloat16, torch.float16}:  # no forward pass for nothing
        return None
    order = [index, *(i for i in range(len(documents)) if i != index)]
    document = documents[index]
    with _evaluating(model), _computed_in(model) as types, torch.no_grad():
        before = score(inputs)[0, document.start : document.stop - 1]
        if types - {torch.float32, torch.float64}:  # autocast, or FSDP2's mixed precision: weights do not say so
            return None
        after = score(_reordered(inputs, [documents[i] for i in order]))[0, : document.length - 1]
    return float(torch.nan_to_num((after - before).abs().float(), nan=float("inf")).max())


@contextmanager
def _computed_in(model: torch.nn.Module) -> Iterator[set[torch.dtype]]:
    """The floating-point types that a model's innermost layers give, seen as they are called."""
    import torch

    types: set[torch.dtype] = set()

    def note(_layer: object, _given: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            types.add(output.dtype)

    innermost = [layer for layer in model.modules() if next(layer.children(), None) is None]
    handles = [layer.register_forward_hook(note) for layer in innermost]
    try:
        yield types
    finally:
        for handle in handles:
            handle.remove()


def _reordered(inputs: Mapping[str, Any], documents: Sequence[Document]) -> dict[str, Any]:
    """The row with its documents in another order; what says where they begin is made anew."""
    import torch

    ids = inputs["input_ids"]
    slots = torch.cat([torch.arange(d.start, d.stop, device=ids.device) for d in documents])
    lengths = torch.tensor([d.length for d in documents], device=ids.device)
    moved: dict[str, Any] = {}
    for key, value in inputs.items():
        if key == "chunk_indices":  # made from the lengths by whoever needs it
            continue
        if key.startswith("cu_seq_lens"):
            value = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(value.dtype)
        elif key == "seq_idx":
            value = torch.repeat_interleave(torch.arange(len(lengths), device=ids.device), lengths)[None].to(
                value.dtype
            )
        elif isinstance(value, torch.Tensor) and value.shape == ids.shape:
            value = value[:, slots]
        moved[key] = value
    return moved


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
