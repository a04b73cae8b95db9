"""Puts the boundary-aware references where a model would run transformers' torch fallback, and takes them out again.

The fallback refuses packed rows (`ValueError: ... can't keep packed sequences apart`, transformers 5.23,
integrations/hub_kernels.py:1032), so a packed model cannot train without a GPU package. There is no official extension
point for these functions: `kernels` mappings need a hub kernel, and no version of `kernels` on PyPI is accepted by
transformers 5.23. So the global that the layer looks up at call time is replaced, in the modeling files that the live
model really uses, by one function that can be undone. Waits for an upstream fallback that honours boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from hf_speedkit.core.errors import KernelAssertionError
from hf_speedkit.kernels.layout import BoundTo, LiveFunction, LiveLayer, live_layers
from hf_speedkit.kernels.requirements import FUNCTIONS

if TYPE_CHECKING:
    from torch import nn

_BOUNDARY_ARGUMENT = {"causal_conv1d_fn": "seq_idx", "chunk_gated_delta_rule": "cu_seqlens"}


class BoundReference:
    """Stands where a fallback stood: calls with boundaries go to the reference, all others to the fallback.

    Args:
        original: the object that was there.
        reference: the boundary-aware function.
        boundary_argument: the keyword that says a call is packed.
    """

    def __init__(
        self, original: Callable[..., object], reference: Callable[..., object], boundary_argument: str
    ) -> None:
        self.speedkit_original = original
        self.reference = reference
        self.boundary_argument = boundary_argument
        self.holders = 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the reference if this is a packed call, and the original if not."""
        # Generation, evaluation of single documents and everything after undo() keep the results they had.
        if self.holders == 0 or kwargs.get(self.boundary_argument) is None:
            return self.speedkit_original(*args, **kwargs)
        return self.reference(*args, **kwargs)


class Binding:
    """The references put in place by one `bind_references` call; undo it by `undo()` or by leaving a `with` block.

    Args:
        places: (namespace, name of the global, what was put there), one per function.
    """

    def __init__(self, places: tuple[tuple[dict[str, object], str, BoundReference], ...]) -> None:
        self._places = places
        self._held = True

    @classmethod
    def of(cls, places: tuple[tuple[dict[str, object], str, BoundReference], ...]) -> Binding:
        """Put everything in its place and hold it."""
        for namespace, name, reference in places:
            reference.holders += 1
            namespace[name] = reference
        return cls(places)

    @property
    def functions(self) -> tuple[str, ...]:
        """Full names of the globals bound, e.g. `transformers.models.qwen3_5.modeling_qwen3_5.causal_conv1d_fn`."""
        return tuple(f"{namespace['__name__']}.{name}" for namespace, name, _ in self._places)

    def undo(self) -> None:
        """Put back what was there. Twice is once; while another model's binding holds the same file, it stays bound."""
        if not self._held:
            return
        self._held = False
        for namespace, name, reference in self._places:
            reference.holders -= 1
            # Something bound on top of ours since then stays: with no holder left, ours only hands calls on.
            if reference.holders == 0 and namespace.get(name) is reference:
                namespace[name] = reference.speedkit_original

    def __enter__(self) -> Binding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def bind_references(model: nn.Module) -> Binding:
    """Let `model` train on packed rows where only transformers' torch fallback is there.

    Replaces `causal_conv1d_fn` and `chunk_gated_delta_rule` (by whatever name) in the modeling files of the layers that
    `model` has, and only where they are the torch fallback: a fused kernel is never touched. Works on wrapped models
    (PEFT, DDP, FSDP2), survives `copy.deepcopy`, gradient checkpointing and a second call. The change is per process
    and per modeling file, so other models of the same family see it as well, until `undo()`.

    Args:
        model: any module; one without such layers gets a binding that holds nothing.

    Returns:
        The `Binding`; undo it when training ends.

    Raises:
        KernelAssertionError: a layer's training would run a fallback that has no boundary-aware reference (Mamba,
            Kimi delta attention, ...). Nothing was changed.
    """
    layers = live_layers(model)
    _refuse_without_reference(layers)
    places: dict[tuple[int, str], tuple[dict[str, object], str, BoundReference]] = {}
    for layer in layers:
        for function in layer.functions:
            key = (id(layer.namespace), function.global_name)
            reference = None if key in places else _reference_for(function)
            if reference is not None:
                places[key] = (layer.namespace, function.global_name, reference)
    return Binding.of(tuple(places.values()))


def _reference_for(function: LiveFunction) -> BoundReference | None:
    """What belongs in the place of `function`: the reference already there, a new one, or None to leave it alone."""
    if function.binding is BoundTo.REFERENCE and isinstance(function.called, BoundReference):
        return function.called
    if function.binding is not BoundTo.TORCH or function.function not in _BOUNDARY_ARGUMENT:
        return None
    from hf_speedkit.kernels import reference

    return BoundReference(function.called, getattr(reference, function.function), _BOUNDARY_ARGUMENT[function.function])


def _refuse_without_reference(layers: tuple[LiveLayer, ...]) -> None:
    missing: dict[tuple[str, str], int] = {}
    for layer in layers:
        for function in layer.functions:
            requirement = FUNCTIONS.get(function.function)
            training = requirement is None or requirement.training
            if training and function.binding is BoundTo.TORCH and function.function not in _BOUNDARY_ARGUMENT:
                key = (function.function, layer.kind)
                missing[key] = missing.get(key, 0) + 1
    if not missing:
        return
    functions = sorted({function for function, _ in missing})
    packages = sorted({FUNCTIONS[function].distribution for function in functions if function in FUNCTIONS})
    raise KernelAssertionError(
        f"{' and '.join(functions)} would run transformers' torch fallback: packed training of this family on this "
        f"machine has no boundary-aware implementation.",
        evidence=tuple(f"{function}   {kind}, {count} layers" for (function, kind), count in sorted(missing.items())),
        mend="pip install " + " ".join(f'"{package}"' for package in packages) if packages else None,
    )
