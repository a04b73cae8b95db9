"""fla's Triton convolution in the place of causal-conv1d, which has no wheel and needs nvcc and minutes to build.

transformers only looks for causal-conv1d, so the global that the layer calls is replaced, as in `bindings.py`, where it
is transformers' torch fallback. Checked against fla 0.6.0 (fla/modules/causal_conv1d/ops.py). Waits for transformers to
look for fla's convolution itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.bindings import Binding, BoundReference
from hf_speedkit.kernels.compatibility import Stack
from hf_speedkit.kernels.imports import ImportOutcome, ImportStatus, is_installed
from hf_speedkit.kernels.layout import BoundTo, live_layers
from hf_speedkit.kernels.requirements import FUNCTIONS, stands_alone
from hf_speedkit.kernels.verdicts import Judgement, why_not_bound

if TYPE_CHECKING:
    from torch import Tensor, nn

CONVOLUTION = "causal_conv1d_fn"
CHUNK_SLOTS = 64
"""Positions of a chunk of fla's convolution. The batch's chunk_indices belong to another kernel and must not reach it,
even while both happen to be 64."""


class FlaConvolution(BoundReference):
    """Called like causal_conv1d_fn, runs fla's convolution.

    Args:
        original: what stood there; still runs on other devices and after undo.
        convolution: `fla.modules.causal_conv1d.causal_conv1d`.
        devices: device types that it runs on.
    """

    speedkit_package = "fla"
    speedkit_place = "fla.modules.causal_conv1d, in the place of causal_conv1d"

    def __init__(
        self, original: Callable[..., object], convolution: Callable[..., Any], devices: tuple[str, ...]
    ) -> None:
        super().__init__(original, convolution, "seq_idx")
        self.devices = devices
        self._chunks: tuple[Tensor, int, int, Tensor] | None = None

    def __call__(  # type: ignore[override]
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **others: object,
    ) -> object:
        """Convolve [1, C, T], a transposed view of the projection, and return the same shape.

        Raises:
            ConfigurationError: a row with `seq_idx` but without `cu_seq_lens_q`, or one that has grown by a cache.
        """
        if self.holders == 0 or x.device.type not in self.devices:
            packed = {"seq_idx": seq_idx, "cu_seq_lens_q": cu_seq_lens_q}
            return self.speedkit_original(x, weight, bias, activation=activation, **packed, **others)
        if seq_idx is not None and (cu_seq_lens_q is None or seq_idx.shape[-1] != x.shape[-1]):
            raise ConfigurationError(
                "fla's convolution needs cu_seq_lens_q for a packed row, and a row without a cache",
                evidence=(f"seq_idx {list(seq_idx.shape)}, x {list(x.shape)}, cu_seq_lens_q {_shape(cu_seq_lens_q)}",),
                mend="collate with hf_speedkit.PackedCollator and call the model with use_cache=False",
            )
        chunks = None if cu_seq_lens_q is None else self._chunk_indices(cu_seq_lens_q, x.shape[-1])
        convolve: Callable[..., Any] = self.reference
        output, _ = convolve(
            x.transpose(1, 2),
            weight,
            bias,
            activation=activation,
            cu_seqlens=cu_seq_lens_q,
            chunk_indices=chunks,
        )
        return output.transpose(1, 2)

    def _chunk_indices(self, borders: Tensor, slots: int) -> Tensor:
        """Chunks of a row, made once for all layers of a forward pass."""
        kept = self._chunks
        # The version tells when a static buffer was filled anew (CUDA graphs): then identity says nothing.
        if kept is not None and kept[0] is borders and kept[1:3] == (borders._version, slots):
            return kept[3]
        chunks = chunk_indices(borders, slots)
        self._chunks = (borders, borders._version, slots, chunks)
        return chunks


def chunk_indices(borders: Tensor, slots: int) -> Tensor:
    """Document and chunk-in-document of every chunk, made on the device without the host waiting for it.

    fla's own needs the number of chunks on the host, one synchronisation per forward pass. Here it is the largest
    number that so many documents can have; the chunks too many lie behind the end of the last document, where the
    kernels load zeros, store nothing and add zero to the gradient of the weight.

    Args:
        borders: int [N + 1], document borders from 0 to `slots`.
        slots: T.

    Returns:
        [(T + 63 N) // 64, 2] in the dtype of `borders`.
    """
    import torch

    documents = borders.shape[0] - 1
    most = (slots + (CHUNK_SLOTS - 1) * documents) // CHUNK_SLOTS
    counts = (borders.diff() + (CHUNK_SLOTS - 1)) // CHUNK_SLOTS
    ends = counts.cumsum(0)
    place = torch.arange(most, device=borders.device, dtype=ends.dtype)
    document = torch.searchsorted(ends, place, right=True).clamp(max=documents - 1)
    return torch.stack((document, place - (ends - counts)[document]), dim=1).to(borders.dtype)


def bind_fla_convolution(model: nn.Module, *, devices: tuple[str, ...] = ("cuda",)) -> Binding:
    """Put fla's convolution where `model` would run transformers' torch fallback for causal-conv1d.

    Nothing is proven here: `fused_layers` probes what it binds. Like `bind_references`, the change is per process and
    modeling file, and undone by the `Binding`.

    Args:
        model: any module; one without such layers gets a binding that holds nothing.
        devices: device types it may run on; fla's Triton kernels need a GPU.

    Raises:
        ImportError: fla is not there or does not import.
    """
    from fla.modules.causal_conv1d import causal_conv1d

    places: dict[tuple[int, str], tuple[dict[str, object], str, BoundReference]] = {}
    for layer in live_layers(model):
        for function in layer.functions:
            key = (id(layer.namespace), function.global_name)
            if function.function != CONVOLUTION or key in places:
                continue
            if isinstance(function.called, FlaConvolution):
                places[key] = (layer.namespace, function.global_name, function.called)
            elif function.binding is BoundTo.TORCH:
                bound = FlaConvolution(function.called, causal_conv1d, devices)
                places[key] = (layer.namespace, function.global_name, bound)
    return Binding.of(tuple(places.values()))


def judge_stand_in(without: Judgement, fla: ImportOutcome, stack: Stack) -> Judgement:
    """What a config's convolution will run on where causal-conv1d is missing.

    Args:
        without: the judgement as long as nothing stands in.
        fla: outcome of importing fla.
        stack: this machine; fla's kernels need a GPU.
    """
    if fla.status is not ImportStatus.WORKS:
        return without
    if stack.capability is None:
        return replace(without, reason=f"{without.reason}; fla's convolution takes its place on a GPU only", fix=None)
    return Judgement(
        verdict=KernelVerdict.FUSED,
        evidence=f"fla {fla.version or '(version unknown)'} imports; its Triton convolution takes the place of "
        "causal_conv1d in SpeedSFTTrainer, where the probe passes",
    )


def through_fla(checks: Sequence[KernelCheck]) -> tuple[KernelCheck, ...]:
    """Mend a missing causal-conv1d by fla, as far as SpeedSFTTrainer is concerned, which puts fla's in its place.

    Where fla is there already and works, or causal-conv1d is there and broken, the checks stay as they are; also in
    families whose other functions call causal-conv1d by themselves. A plain Trainer needs causal-conv1d itself.
    """
    fla_fix = f'pip install "{FUNCTIONS["chunk_gated_delta_rule"].distribution}"'
    rule = next((c.fix for c in checks if c.function == "chunk_gated_delta_rule" and c.fix is not None), None)
    # A fla that is there and does not import, mostly for want of triton, is mended by the rule's own command.
    if (is_installed("fla") and rule is None) or not stands_alone(check.function for check in checks):
        return tuple(checks)
    when = "imports" if is_installed("fla") else "is installed"
    mend = fla_fix if rule is None else rule
    return tuple(
        replace(check, reason=f"{check.reason}; fla's convolution takes its place once fla {when}", fix=mend)
        if check.function == CONVOLUTION and check.verdict is KernelVerdict.FALLBACK and _is_absent(check)
        else check
        for check in checks
    )


def _is_absent(check: KernelCheck) -> bool:
    return check.reason == why_not_bound("causal_conv1d", ImportOutcome(status=ImportStatus.ABSENT))


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else str(list(tensor.shape))
