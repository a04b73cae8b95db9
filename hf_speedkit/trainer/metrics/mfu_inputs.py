"""What MFU is measured against: the model's FLOPs and the device's dense peak, found where the user gives neither."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers import TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.flops import LAYER_PARTS, REENTRANT_PARTS, ModelFlops, Part, model_flops
from hf_speedkit.core.records import TokenCounts
from hf_speedkit.kernels.fused_layers import is_fused
from hf_speedkit.trainer.hardware import word_of
from hf_speedkit.trainer.memory.kept_products import kept_flops_per_token
from hf_speedkit.trainer.metrics.device_peak import device_peak_tflops, device_tensor_clock_mhz
from hf_speedkit.trainer.metrics.frozen_weights import frozen_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsInputs:
    """What FLOP utilisation is made of: what a user gave, or (`completed`) what a run has. None: not known.

    Args:
        flops: model FLOPs of counted tokens.
        peak_tflops: dense peak of one device.
        recompute: what checkpointed layers compute once more.
        recomputed: FLOPs of that, of counted tokens.
        tensor_clock_mhz: SM clock at which the peak is stated.
        table_tflops: what our table says of the device, whatever was given.
        spread_over: devices that the model's layers lie on (`device_map`).
    """

    flops: Callable[[TokenCounts], float | None] | None = None
    peak_tflops: float | None = None
    recompute: Collection[Part] | None = None
    recomputed: RecomputedFlops | None = None
    tensor_clock_mhz: float | None = None
    table_tflops: float | None = None
    spread_over: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no peak, function or part: the first log, behind a step, would end in it."""
        peak = self.peak_tflops
        if peak is not None and not (isinstance(peak, (int, float)) and 0 < peak < math.inf):
            raise ConfigurationError(
                f"peak_tflops={peak!r} is no rate", mend="peak_tflops=989.5 for example, in TFLOP/s of one device"
            )
        if self.flops is not None and not callable(self.flops):
            raise ConfigurationError(
                f"flops={self.flops!r} is no function of TokenCounts",
                mend="flops=lambda counts: 6 * 27e9 * counts.real for example, forward and backward of one device",
            )
        unknown = sorted({*(self.recompute or ())} - {*get_args(Part)})
        if isinstance(self.recompute, str) or unknown:
            raise ConfigurationError(
                f"recompute={self.recompute!r} is no collection of a layer's parts",
                mend=f"some of {sorted(get_args(Part))}, or None",
            )

    def completed(self, args: TrainingArguments, model: torch.nn.Module) -> FlopsInputs:
        """With what the model and the device say where nothing was given; nothing of several devices in one process."""
        if args.n_gpu > 1:
            return self
        if (places := len({*(getattr(model, "hf_device_map", None) or {}).values()})) > 1:
            return replace(self, spread_over=places)
        flops = self.flops if self.flops is not None else flops_of(model)
        known = device_peak_tflops(args, model)
        return replace(
            self,
            flops=flops,
            peak_tflops=self.peak_tflops if self.peak_tflops is not None else known,
            table_tflops=known,
            recomputed=RecomputedFlops(model, flops, self.recompute) if isinstance(flops, ModelFlops) else None,
            tensor_clock_mhz=device_tensor_clock_mhz(args),
        )

    def with_fused_head(self) -> FlopsInputs:
        """For a run in which TRL's fused head was seen at work, which makes its product again in backward."""
        if not isinstance(self.flops, ModelFlops) or self.recomputed is None or self.flops.head_on == "target":
            return self
        flops = replace(self.flops, head_on="target", head_again=True)
        return replace(self, flops=flops, recomputed=self.recomputed.of(flops))

    @property
    def window(self) -> int | None:
        """Sliding window whose pairs have to be counted."""
        return self.flops.window if isinstance(self.flops, ModelFlops) else None

    def model_flops(self, counts: TokenCounts) -> float | None:
        """Model FLOPs of counted tokens."""
        return None if self.flops is None else self.flops(counts)

    def recomputed_flops(self, counts: TokenCounts) -> float | None:
        """FLOPs of what is computed once more."""
        return None if self.recomputed is None else self.recomputed(counts)


class RecomputedFlops:
    """FLOPs of what is computed once more in backward, by the layers that are checkpointed at the time of the call.

    Args:
        model: the model as it trains.
        flops: its FLOPs; the head is taken from here.
        parts: what a checkpointed layer computes again. None: from how checkpointing is set, which tells unless a
            policy of one's own (`context_fn`) keeps some of it, or DoRA makes products that are no model's; then
            nothing is claimed.
    """

    def __init__(self, model: torch.nn.Module, flops: ModelFlops, parts: Collection[Part] | None) -> None:
        self._model = model
        self._flops = flops
        self._parts = parts
        self._layers = decoder_layers(model)
        self._known_for: tuple[bool, ...] | None = None
        self._of_layers: ModelFlops | None = None
        self._recomputed: Collection[Part] | None = None
        self._at_ends = 0.0

    def of(self, flops: ModelFlops) -> RecomputedFlops:
        """The same of other FLOPs of the model."""
        return RecomputedFlops(self._model, flops, self._parts)

    def __call__(self, counts: TokenCounts) -> float | None:
        """FLOPs of counted tokens; None where they or the way of checkpointing are not known."""
        checkpointed = tuple(is_checkpointed(layer) for layer in self._layers)
        if checkpointed != self._known_for:  # the choice of layers may follow from the first steps
            self._known_for = checkpointed
            self._look(checkpointed)
        head = self._flops.recomputed(counts, {"head"} if self._flops.head_again else ())
        if not any(checkpointed):
            return head
        if self._of_layers is None or self._recomputed is None or head is None:
            return None
        layers = self._of_layers.recomputed(counts, self._recomputed)
        if layers is None or counts.real is None:
            return None
        return layers + head + counts.real * (self._at_ends - sum(map(kept_flops_per_token, self._layers)))

    def _look(self, checkpointed: tuple[bool, ...]) -> None:
        indices = [index for index, on in enumerate(checkpointed) if on]
        if not indices:
            return
        config = self._model.config.get_text_config()  # type: ignore[operator, union-attr]
        known = config.num_hidden_layers == len(checkpointed)
        self._of_layers = flops_of(self._model, layers=indices) if known else None
        own = None if _has_dora(self._model) else recomputed_parts(self._layers[indices[0]])
        self._recomputed = self._parts if self._parts is not None else own
        self._at_ends = 0.0
        if known and self._parts is None and self._recomputed == LAYER_PARTS:
            self._at_ends = sum(
                more_at_the_end(self._layers[index], model_flops(config.to_dict(), layers=[index])) for index in indices
            )


def flops_of(model: torch.nn.Module, *, layers: Sequence[int] | None = None) -> ModelFlops | None:
    """FLOPs of a transformers model, LoRA included; None for a family or a way of training that is not known.

    The head is counted on every real token, as transformers' own forward computes it. Frozen embeddings, norms and
    towers for images are known, weights of layers that a full fine-tune leaves as they are, and LoRA beside linear maps
    from the first layer on; the gradient of the first trained layer's input is counted as if it were needed, as it is
    under activation checkpointing.

    Args:
        model: the model.
        layers: indices of the decoder layers to count; None for all.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return None
    adapted: Any = model
    head, inputs = adapted.get_output_embeddings(), adapted.get_input_embeddings()
    of_head, looked_up = (set() if place is None else set(map(id, place.parameters())) for place in (head, inputs))
    products = dict(_products(model))
    if all(weight.requires_grad for name, weight in products.items() if id(weight) not in of_head | looked_up):
        head_trained = all(weight.requires_grad for weight in products.values() if id(weight) in of_head)
        return _with_its_head(model_flops(config.to_dict(), head_trained=head_trained, layers=layers), model)
    if not _is_lora(model):
        return _partly_frozen(model, products, of_head, looked_up, layers)
    if layers is not None:
        found = decoder_layers(model)
        counted = {id(weight) for index in layers for weight in found[index].parameters()}
        products = {name: weight for name, weight in products.items() if id(weight) in counted}
    whole = {id(weight) for place in (head, inputs) for weight in _trained_whole(place)}
    maps = [
        weight
        for name, weight in products.items()
        if weight.requires_grad and id(weight) not in whole and "lora_embedding_A" not in name  # its rows are looked up
    ]
    flops = model_flops(
        config.to_dict(),
        frozen=True,
        head_trained=bool(_trained_whole(head)),
        adapter_parameters=sum(weight.numel() for weight in maps),
        layers=layers,
    )
    return _with_its_head(flops, model)


def _partly_frozen(
    model: Any, products: dict[str, torch.nn.Parameter], head: set[int], looked_up: set[int], layers: Any
) -> ModelFlops | None:
    """FLOPs of a full fine-tune of some weights; of the asked layers those that backward runs through."""
    config, found = model.config.to_dict(), decoder_layers(model)
    frozen = frozen_weights(model, found, products, head | looked_up)
    if frozen is None:
        return None
    reached = None if layers is None else [index for index in layers if index >= frozen.reach]
    trained = all(weight.requires_grad for weight in products.values() if id(weight) in head)
    flops = model_flops(config, head_trained=trained, layers=reached)
    if flops is None or layers is not None:  # some layers: for what they compute again, whose weights do not matter
        return flops
    below = model_flops(config, layers=range(frozen.reach)) if frozen.reach else None
    flops = replace(flops, untrained_per_token=frozen.untrained_per_token, below=below)
    return _with_its_head(flops, model)


def _products(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The weights that text is multiplied with, by name. A vector (a norm, a bias, DoRA's magnitudes) is no product,
    and in a composed model text does not run through the towers of images and sound, nor their projections."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner = getattr(whole, getattr(whole, "base_model_prefix", None) or "_", None)
    others = set() if inner is None else set(map(id, inner.parameters()))
    others -= set(map(id, _text_decoder(model).parameters()))
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and id(weight) not in others:
            yield name, weight


def _text_decoder(model: Any) -> Any:
    """The part of a transformers model that text runs through."""
    find = getattr(model, "get_decoder", None)
    return model if find is None else find()


def _with_its_head(flops: ModelFlops | None, model: Any) -> ModelFlops | None:
    """With the maps a model has in the place of the one to the vocabulary (a classifier, a reward model)."""
    find = getattr(model, "get_output_embeddings", None)
    if flops is None or find is None or find() is not None:
        return flops
    if getattr(model, "peft_config", None):
        return replace(flops, head_per_token=0.0)  # what is trained of it counts as an adapter's map
    inside = {id(weight) for weight in getattr(model, model.base_model_prefix, model).parameters()}
    maps = [weight for weight in model.parameters() if weight.dim() > 1 and id(weight) not in inside]
    return replace(flops, head_per_token=2.0 * sum(weight.numel() for weight in maps))


def _is_lora(model: Any) -> bool:
    """Whether what is trained are LoRA's maps beside linear ones, from the first layer on, so that backward runs
    through all of the model. Adapters of experts' weights (`target_parameters`) are made anew for every step."""
    adapters = getattr(model, "peft_config", None) or {}
    of_linear_maps = all(
        word_of(one.peft_type) == "LORA" and not getattr(one, "target_parameters", None) for one in adapters.values()
    )
    layers = decoder_layers(model)
    if not adapters or not of_linear_maps or not layers:
        return False
    reached = (layers[0], model.get_input_embeddings())
    return any(parameter.requires_grad for part in reached for parameter in part.parameters())


def _has_dora(model: Any) -> bool:
    """Whether adapters compute the norms of their sums of weights, once a pass however many tokens there are (DoRA)."""
    return any(getattr(one, "use_dora", False) for one in (getattr(model, "peft_config", None) or {}).values())


def _trained_whole(place: Any) -> list[torch.nn.Parameter]:
    """The trained copy of an embedding or head that stands in for it (peft's modules_to_save)."""
    if place is None:
        return []
    named = place.named_parameters()
    return [weight for name, weight in named if weight.requires_grad and weight.dim() > 1 and "lora_" not in name]


def sliding_window(model: torch.nn.Module) -> int | None:
    """The sliding window whose pairs FLOPs follow from; None for a model without one, or of an unknown family."""
    flops = flops_of(model)
    return None if flops is None else flops.window


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of text that can be checkpointed, first layer first; FSDP's wrapper stands for the layer inside."""
    found: list[torch.nn.Module] = []
    inside: set[int] = set()
    for module in _text_decoder(model).modules():
        if isinstance(module, (CheckpointWrapper, GradientCheckpointingLayer)) and id(module) not in inside:
            found.append(module)
            inside.update(map(id, module.modules()))
    return found


def is_checkpointed(layer: torch.nn.Module) -> bool:
    """Whether a layer is checkpointed at its next forward pass (`memory.recompute` switches them one by one)."""
    if isinstance(layer, CheckpointWrapper):
        return "forward" not in layer.__dict__
    return bool(layer.gradient_checkpointing)


def recomputed_parts(layer: torch.nn.Module) -> frozenset[Part] | None:
    """What checkpointing of a layer computes once more; None where a policy of one's own keeps some of it."""
    # Both are functools.partial(checkpoint, **settings): torch's wrapper, and what transformers 5.23 sets
    # (PreTrainedModel._set_gradient_checkpointing).
    wrapped = isinstance(layer, CheckpointWrapper)
    function: Any = getattr(layer, "checkpoint_fn" if wrapped else "_gradient_checkpointing_func", None)
    settings = getattr(function, "keywords", None)
    if settings is None or settings.get("context_fn") is not None:
        return None
    return REENTRANT_PARTS if settings.get("use_reentrant") else LAYER_PARTS


def more_at_the_end(layer: torch.nn.Module, flops: ModelFlops | None) -> float:
    """FLOPs a token that checkpointing computes again at a layer's end because of LoRA there, beyond `LAYER_PARTS`.

    torch stops before the last operation that saves something. Without an adapter that is the down projection; with
    one it is the adapter's own last map, which comes after the frozen projection and the adapter's first map: of the
    adapter, counted whole among the parts, the last map alone is not made again. An adapter that is fused
    (`kernels/lora.py`) holds everything before it makes the frozen projection, which is then not made again either.

    Args:
        layer: a checkpointed layer.
        flops: its own.
    """
    if flops is None or not flops.feed_forward_output_per_token:
        return 0.0
    end = _last_map(layer)
    if not hasattr(end, "base_layer"):
        return 0.0
    ups = [weight for name, weight in end.named_parameters() if "lora_B" in name and weight.requires_grad]
    again = 0.0 if is_fused(end) else flops.feed_forward_output_per_token
    return again - 2.0 * sum(weight.numel() for weight in ups) if ups else 0.0


def _last_map(layer: torch.nn.Module) -> Any:
    """A layer's last linear map, with the adapter around it: in order of definition, which ends with the output."""
    last: Any = None
    inside: set[int] = set()
    for module in layer.modules():
        if id(module) not in inside and (hasattr(module, "base_layer") or isinstance(module, torch.nn.Linear)):
            inside.update(map(id, module.modules()))
            last = module
    return last
