"""Model FLOPs of one training step from a model's configuration and the lengths of its documents.

What is counted: forward and backward of matrix products, one multiply-add = 2 FLOPs; attention by the positions a token
may see in its own document (a document of length L has L(L+1)/2 causal pairs); the recurrences of linear attention;
never padding, never recompute, nothing element-wise. Divided by time and peak this is MFU. What activation
checkpointing computes once more is counted apart (`ModelFlops.recomputed`), by the parts of a layer that are computed
again; added, it gives HFU. What a layer costs, with sources: `hf_speedkit.core.layer_flops`. Backward costs twice the
forward, or once where a frozen weight needs only the gradient of its input.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hf_speedkit.core.layer_flops import FAMILIES, MissingNumberError, head_of, layers_of
from hf_speedkit.core.records import TokenCounts

Head = Literal["real", "target"]

Part = Literal[
    "attention_projections",
    "attention",
    "linear_attention_projections",
    "linear_attention",
    "feed_forward",
    "feed_forward_output",
    "adapters",
    "head",
]
"""What can be computed a second time: query, key, value and output projections; the pairs of softmax attention;
projections of linear attention; its convolution and recurrence; gate, up and router (of sparse blocks the experts
too); the down projection of dense blocks; low-rank adapters; the map to the vocabulary."""

LAYER_PARTS: frozenset[Part] = frozenset(
    {
        "attention_projections",
        "attention",
        "linear_attention_projections",
        "linear_attention",
        "feed_forward",
        "adapters",
    }
)
"""What torch's non-reentrant checkpointing of whole decoder layers computes again: all of a layer but a down projection
at its end, whose output nothing in backward needs, so that torch stops before it (early stop, the default)."""

REENTRANT_PARTS: frozenset[Part] = LAYER_PARTS | {"feed_forward_output"}
"""The same for reentrant checkpointing, which runs layers to their end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """Forward FLOPs of a model, in the parts that scale differently.

    Args:
        linear_per_token: linear maps of the layers, the next three included; the rest are attention's projections.
        delta_linear_per_token: projections of linear attention.
        feed_forward_per_token: gate, up and router, and experts; of blocks with a norm behind them the output as well.
        feed_forward_output_per_token: down projections at the end of a layer.
        head_per_token: the map to the vocabulary.
        core_per_token: convolutions and recurrences of linear attention.
        per_pair: attention, per (query, key) pair, summed over the layers without a window.
        per_pair_in_window: the same of layers with a sliding window, by window size.
        adapter_per_token: trained low-rank adapters beside frozen linear maps.
        frozen: the weights of the layers are not trained.
        head_trained: whether the head's are (LoRA with modules_to_save=["lm_head"]; frozen embeddings tied to it);
            None: as those of the layers.
        head_on: whether the head runs on every real token or on target tokens only (TRL's fused head, and ours).
        head_again: whether backward makes the head's product once more, as TRL's fused head does.
        causal: count the pairs a causal mask leaves; False counts all L x L, which eager attention computes.
        untrained_per_token: linear maps whose weights are frozen while others of the layers train (0 with `frozen`).
        below: the layers before the first trained weight, which backward does not run through; part of the others.
    """

    linear_per_token: float
    head_per_token: float
    delta_linear_per_token: float = 0.0
    feed_forward_per_token: float = 0.0
    feed_forward_output_per_token: float = 0.0
    core_per_token: float = 0.0
    per_pair: float = 0.0
    per_pair_in_window: tuple[tuple[int, float], ...] = ()
    adapter_per_token: float = 0.0
    frozen: bool = False
    head_trained: bool | None = None
    head_on: Head = "real"
    head_again: bool = False
    causal: bool = True
    untrained_per_token: float = 0.0
    below: ModelFlops | None = None

    def training(self, lengths: Sequence[int], *, target: int | None = None) -> float:
        """Forward and backward FLOPs of documents of these lengths.

        Args:
            lengths: tokens of each document.
            target: their target tokens; needed where the head runs on those only.

        Raises:
            ValueError: the head runs on target tokens and `target` is None.
        """
        if self.head_on == "target" and target is None:
            raise ValueError("this model's head runs on target tokens only: pass target=")
        tokens, squared = sum(lengths), sum(length * length for length in lengths)
        found = self._training(tokens, squared, target or 0) + 3 * self._windowed_in(lengths)
        if self.below is not None:
            found -= 2 * (self.below._forward(tokens, squared) + self.below._windowed_in(lengths))
        return found

    @property
    def window(self) -> int | None:
        """The sliding window that `TokenCounts.window_pairs` must be of; None where layers have none, or several."""
        return self.per_pair_in_window[0][0] if len(self.per_pair_in_window) == 1 else None

    def __call__(self, counts: TokenCounts) -> float | None:
        """Forward and backward FLOPs of counted tokens; None where the counts do not say enough.

        They do not where real, target (if the head needs it) or squared lengths are unknown, nor, for layers with a
        sliding window, where the pairs inside it were not counted.
        """
        windowed = self._windowed(counts)
        if counts.real is None or counts.squared_lengths is None or windowed is None:
            return None
        if self.head_on == "target" and counts.target is None:
            return None
        found = self._training(counts.real, counts.squared_lengths, counts.target or 0) + 3 * windowed
        if self.below is None:
            return found
        below = self.below._windowed(counts)
        if below is None:
            return None
        return found - 2 * (self.below._forward(counts.real, counts.squared_lengths) + below)

    def recomputed(self, counts: TokenCounts, parts: Collection[Part]) -> float | None:
        """FLOPs of computing parts of the forward pass once more; None where the counts do not say enough.

        Args:
            counts: as for a call.
            parts: what is computed again: `LAYER_PARTS` for full checkpointing, less what a selective policy keeps.

        Raises:
            ValueError: a part that is none.
        """
        unknown = sorted(set(parts) - REENTRANT_PARTS - {"head"})
        if unknown:
            raise ValueError(f"not a part of a model: {', '.join(unknown)}")
        windowed = self._windowed(counts)
        if counts.real is None or counts.squared_lengths is None or windowed is None:
            return None
        head_tokens = counts.real if self.head_on == "real" else counts.target
        if "head" in parts and head_tokens is None:
            return None
        blocks = self.feed_forward_per_token + self.feed_forward_output_per_token
        costs: dict[Part, float] = {
            "attention_projections": (self.linear_per_token - self.delta_linear_per_token - blocks) * counts.real,
            "attention": self.per_pair * self._pairs(counts.real, counts.squared_lengths) + windowed,
            "linear_attention_projections": self.delta_linear_per_token * counts.real,
            "linear_attention": self.core_per_token * counts.real,
            "feed_forward": self.feed_forward_per_token * counts.real,
            "feed_forward_output": self.feed_forward_output_per_token * counts.real,
            "adapters": self.adapter_per_token * counts.real,
            "head": self.head_per_token * (head_tokens or 0),
        }
        return sum(costs[part] for part in set(parts))

    def _forward(self, tokens: int, squared: int) -> float:
        """Forward FLOPs of the layers, without their attention inside a window."""
        return (self.linear_per_token + self.core_per_token) * tokens + self.per_pair * self._pairs(tokens, squared)

    def _windowed_in(self, lengths: Sequence[int]) -> float:
        """Forward FLOPs of attention inside sliding windows, in documents of these lengths."""
        return sum(
            per_pair * sum(pairs_in_window(length, window, causal=self.causal) for length in lengths)
            for window, per_pair in self.per_pair_in_window
        )

    def _windowed(self, counts: TokenCounts) -> float | None:
        """Forward FLOPs of attention inside a sliding window."""
        if not self.per_pair_in_window:
            return 0.0
        if self.window is None or counts.window_pairs is None or not self.causal:
            return None
        return self.per_pair_in_window[0][1] * counts.window_pairs

    def _pairs(self, tokens: int, squared: int) -> float:
        return (squared + tokens) / 2 if self.causal else squared

    def _training(self, tokens: int, squared: int, target: int) -> float:
        passes = 2 if self.frozen else 3
        head_trained = not self.frozen if self.head_trained is None else self.head_trained
        head_passes = 3 if head_trained else 2
        head_tokens = tokens if self.head_on == "real" else target
        return (
            (passes * self.linear_per_token - self.untrained_per_token) * tokens
            + head_passes * self.head_per_token * head_tokens
            + 3 * (self.core_per_token + self.adapter_per_token) * tokens
            + 3 * self.per_pair * self._pairs(tokens, squared)
        )


def model_flops(
    config: Mapping[str, object],
    *,
    head_on: Head = "real",
    causal: bool = True,
    frozen: bool = False,
    head_trained: bool | None = None,
    adapter_parameters: int = 0,
    layers: Collection[int] | None = None,
) -> ModelFlops | None:
    """The FLOPs of a model by its configuration.

    Args:
        config: `model.config.to_dict()`; of a composed model, its text part is used.
        head_on: see `ModelFlops`.
        causal: see `ModelFlops`.
        frozen: only adapters are trained.
        head_trained: see `ModelFlops`.
        adapter_parameters: trained weights of adapters' maps, each used once per token.
        layers: indices of the decoder layers to count; None for all.

    Returns:
        None for a model_type that is not in `FAMILIES`, or whose configuration lacks a number: no guess.
    """
    text = config.get("text_config")
    numbers = text if isinstance(text, Mapping) else config
    if numbers.get("model_type") not in FAMILIES:
        return None
    try:
        found = _from_layers(numbers, head_on=head_on, causal=causal, wanted=layers)
    except MissingNumberError:
        return None
    return replace(found, frozen=frozen, head_trained=head_trained, adapter_per_token=2.0 * adapter_parameters)


def _from_layers(
    config: Mapping[str, object], *, head_on: Head, causal: bool, wanted: Collection[int] | None
) -> ModelFlops:
    layers = [layer for at, layer in enumerate(layers_of(config)) if wanted is None or at in wanted]
    windows: dict[int, float] = {}
    for layer in layers:
        if layer.window is not None:
            windows[layer.window] = windows.get(layer.window, 0.0) + layer.per_pair
    delta = sum(layer.linear_attention for layer in layers)
    blocks, outputs = sum(layer.feed_forward for layer in layers), sum(layer.output for layer in layers)
    return ModelFlops(
        linear_per_token=sum(layer.attention for layer in layers) + delta + blocks + outputs,
        delta_linear_per_token=delta,
        feed_forward_per_token=blocks,
        feed_forward_output_per_token=outputs,
        head_per_token=head_of(config),
        core_per_token=sum(layer.core for layer in layers),
        per_pair=sum(layer.per_pair for layer in layers if layer.window is None),
        per_pair_in_window=tuple(sorted(windows.items())),
        head_on=head_on,
        causal=causal,
    )


def pairs_in_window(length: int, window: int, *, causal: bool = True) -> float:
    """(query, key) pairs of one document in a layer whose tokens see `window` positions, their own included."""
    if not causal:
        return float(length * length)
    inside = min(length, window)
    return inside * (inside + 1) / 2 + (length - inside) * window
