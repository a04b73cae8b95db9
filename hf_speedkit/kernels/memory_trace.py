"""What each layer of a model keeps and needs in training, traced on fake tensors: a second, any size, no GPU.

The model is made from its configuration without storage and its own layers run forward and backward under torch's
FakeTensorMode, with `saved_tensors.py` in the place of fused kernels. One layer of every kind is run; the rest of the
step is closed form (core/memory_plan.py), since 64 whole layers under torch's MemTracker took more than 900 s.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from hf_speedkit.core.memory_sizes import FP32_BYTES, LayerMemory, MemoryJob, MemorySetting, ModelMemory
from hf_speedkit.kernels.traced_adapters import Adapters

if TYPE_CHECKING:
    import torch
    from torch import nn

_Kind = tuple[str, str, tuple[Any, ...]]

_MOST_OPERATIONS = 10_000
"""Of the forward pass of one layer of each kind, some ten seconds on fake tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """In what precision, and with what, a model is traced.

    Args:
        tokens: slots of a row.
        fp32_weights: weights are fp32 and computed with under bf16 autocast (mixed precision without FSDP).
        autocast: bf16 autocast is on; matters with adapters in fp32.
        adapters: train these instead of the weights.
        four_bit: the layers' linear maps are packed in 4 bits.
        fused: norms, gated norms and SwiGLU run on fused kernels, as SpeedSFTTrainer lets them on a GPU.
    """

    tokens: int
    fp32_weights: bool = False
    autocast: bool = False
    adapters: Adapters | None = None
    four_bit: bool = False
    fused: bool = True


class UntraceableError(Exception):
    """The model cannot be run on fake tensors; the text says what it ran into."""


def trace_memory(config: Any, settings: TraceSettings) -> ModelMemory:
    """Sizes of a model's parts, and what its layers keep and need.

    Args:
        config: a transformers configuration; of a composed model its text part is used.
        settings: precision and row.

    Raises:
        UntraceableError: a family that does not run on fake tensors, or has no decoder layers that can be checkpointed.
    """
    import copy

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from hf_speedkit.kernels.stand_ins import register_attention

    config = copy.deepcopy(config.get_text_config())
    config._attn_implementation = register_attention()
    dtype = torch.float32 if settings.fp32_weights else torch.bfloat16
    try:
        with _without_torchs_own_report(), FakeTensorMode():
            with no_init_weights():
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            model.tie_weights()  # part of what no_init_weights leaves out
            model.train()
            return _trace(model, config, settings)
    except UntraceableError:
        raise
    except Exception as error:
        # Any model's own code runs here, on tensors without values: what it raises cannot be listed.
        # transformers names every class it knows where it does not know one.
        raise UntraceableError(shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")) from error


def _trace(model: Any, config: Any, settings: TraceSettings) -> ModelMemory:
    from hf_speedkit.kernels.stand_ins import stand_ins

    layers = _decoder_layers(model)
    if not layers:
        raise UntraceableError(f"{type(model).__name__} has no decoder layers that can be checkpointed")
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tied = head is embedding
    in_layers = sum(_size(layer) for layer in layers)
    tail = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()) - in_layers - embedding.numel()
    kinds = [_kind(layer, config, index) for index, layer in enumerate(layers)]
    first = {kind: kinds.index(kind) for kind in kinds}
    own = {kind: _size(layers[index]) for kind, index in first.items()}
    with stand_ins(model, fused=settings.fused):
        calls = _record_calls(model, layers, kinds, settings)
        found = {
            kind: _trace_layer(layers[index], calls[kind], kind[0], own[kind], settings)
            for kind, index in first.items()
        }
    row = _hidden_states(calls[kinds[0]])
    return ModelMemory(
        layers=tuple(found[kind] for kind in kinds),
        embedding=embedding.numel(),
        tail=tail,
        head=head.numel(),
        tied=tied,
        hidden=row.numel() * row.element_size(),
        tokens=settings.tokens,
        hidden_size=embedding.shape[1],
        head_trained=settings.adapters is None,
    )


@contextmanager
def _without_torchs_own_report() -> Iterator[None]:
    """Torch logs the traceback of an operation that fails on fake tensors; what it says is in our error."""
    theirs = logging.getLogger("torch._subclasses.fake_tensor")
    before, theirs.disabled = theirs.disabled, True
    try:
        yield
    finally:
        theirs.disabled = before


def _decoder_layers(model: nn.Module) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _kind(layer: nn.Module, config: Any, index: int) -> _Kind:
    kinds = getattr(config, "layer_types", None)
    name = kinds[index] if kinds else type(layer).__name__
    return str(name), type(layer).__name__, tuple((key, tuple(p.shape)) for key, p in layer.named_parameters())


def _record_calls(
    model: Any, layers: Sequence[Any], kinds: Sequence[_Kind], settings: TraceSettings
) -> dict[_Kind, tuple[Any, Any]]:
    """What the model hands to the first layer of each kind for a packed row; the other layers do not run."""
    import torch

    from hf_speedkit.kernels.live_bytes import OperationLimit
    from hf_speedkit.kernels.stand_ins import DOCUMENT_SLOTS, documents_of

    calls: dict[_Kind, tuple[Any, Any]] = {}
    outputs: dict[_Kind, Any] = {}
    slots = settings.tokens
    edges = torch.zeros(documents_of(slots) + 1, dtype=torch.int32)
    row = {
        "input_ids": torch.zeros(1, slots, dtype=torch.long),
        "position_ids": torch.zeros(1, slots, dtype=torch.long),
        "seq_idx": torch.zeros(1, slots, dtype=torch.int32),
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": DOCUMENT_SLOTS,
        "max_length_k": DOCUMENT_SLOTS,
    }
    hooks = []
    for layer, kind in zip(layers, kinds, strict=True):
        if kind in calls:
            layer.forward = partial(_repeat, outputs, kind)
            continue
        calls[kind] = ((), {})
        hooks.append(layer.register_forward_hook(partial(_record, calls, outputs, kind), with_kwargs=True))
    # One layer of each kind runs: some 100 operations each, a few thousand with a loop over blocks or experts.
    most = max(_MOST_OPERATIONS, slots)
    token_by_token = UntraceableError(
        f"more than {most:,} operations for {slots:,} slots: a layer goes through its row token by token"
    )
    try:
        with OperationLimit(most, token_by_token), torch.no_grad(), _autocast(settings):
            model.base_model(**row, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if outputs.keys() != calls.keys():
        raise UntraceableError(f"{len(calls) - len(outputs)} kinds of layers were not called")
    return calls


def _record(calls: Any, outputs: Any, kind: _Kind, layer: Any, args: Any, kwargs: Any, output: Any) -> None:
    calls[kind], outputs[kind] = (args, kwargs), output


def _repeat(outputs: Mapping[_Kind, Any], kind: _Kind, *_: Any, **__: Any) -> Any:
    return outputs[kind]


def _hidden_states(call: tuple[Any, Any]) -> Any:
    return call[0][0] if call[0] else call[1]["hidden_states"]


def _trace_layer(layer: Any, call: tuple[Any, Any], name: str, own: int, settings: TraceSettings) -> LayerMemory:
    """One layer forward and backward."""
    import torch

    from hf_speedkit.kernels.live_bytes import LiveBytes
    from hf_speedkit.kernels.traced_adapters import adapt

    packable = sum(m.weight.numel() for m in layer.modules() if isinstance(m, torch.nn.Linear))
    if settings.adapters is not None:
        adapt(layer, settings.adapters, four_bit=settings.four_bit)
    args, kwargs = call
    row = _hidden_states(call)
    inputs = torch.empty_like(row, requires_grad=True)
    if args:
        args = (inputs, *args[1:])
    else:
        kwargs = {**kwargs, "hidden_states": inputs}
    live = LiveBytes((*layer.parameters(), *layer.buffers(), *_tensors(args), *_tensors(kwargs)))
    with live:
        with _autocast(settings):
            output = layer(*args, **kwargs)
            output = output[0] if isinstance(output, tuple) else output
        saved = live.live
        live.take_highest()
        torch.autograd.backward(output, torch.empty_like(output))
        highest = live.take_highest()
    size = output.numel() * output.element_size()
    trained = sum(p.numel() for p in layer.parameters() if p.requires_grad)
    cast = sum(p.numel() * 2 for p in layer.parameters() if p.ndim == 2) if settings.fp32_weights else 0
    maps = [
        module.out_features for module in layer.modules() if type(module) is torch.nn.Linear and module.bias is None
    ]
    # The output belongs to the next layer, whose backward is over by then: it is not there when the peak comes.
    return LayerMemory(
        kind=name,
        parameters=own,
        trained=trained,
        saved=saved,
        work=highest - size,
        cast=cast,
        products=sum(maps[:-1]) * (size // output.shape[-1]),
        packable=packable,
    )


def _tensors(value: object) -> Iterator[torch.Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _autocast(settings: TraceSettings) -> Any:
    import torch

    on = settings.fp32_weights or settings.autocast
    return torch.autocast("cpu", dtype=torch.bfloat16) if on else nullcontext()


class TracedSizes:
    """The sizes of one model for any setting, each traced once: what `core.memory_choice.choose` asks for.

    Args:
        config: the model's configuration.
        tokens: slots of a row.
        adapters: of LoRA and QLoRA.
        mixed_precision: autocast is on (TRL's default) where adapters are trained.
        fused: see `TraceSettings`.
    """

    def __init__(
        self,
        config: Any,
        tokens: int,
        *,
        adapters: Adapters | None = None,
        mixed_precision: bool = True,
        fused: bool = True,
    ) -> None:
        self._config, self._tokens, self._fused = config, tokens, fused
        self._adapters = adapters or Adapters()
        self._mixed_precision = mixed_precision
        self._traced: dict[TraceSettings, ModelMemory] = {}

    def __call__(self, setting: MemorySetting, job: MemoryJob) -> ModelMemory:
        """Sizes for a setting.

        Raises:
            UntraceableError: see `trace_memory`.
        """
        # FSDP computes with bf16 copies of fp32 weights; without it autocast makes them, layer by layer.
        whole = job.gpus == 1 or not job.fsdp
        full_fp32 = not setting.adapters and setting.trained_bytes == FP32_BYTES
        adapters = replace(self._adapters, dtype_bytes=int(setting.trained_bytes)) if setting.adapters else None
        settings = TraceSettings(
            tokens=self._tokens,
            fp32_weights=full_fp32 and whole,
            autocast=setting.adapters and self._mixed_precision,
            adapters=adapters,
            four_bit=setting.frozen_bytes < 1,
            fused=self._fused,
        )
        if settings not in self._traced:
            self._traced[settings] = trace_memory(self._config, settings)
        return self._traced[settings]
