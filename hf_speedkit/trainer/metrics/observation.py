"""What a step computed, seen from the model's inputs: on the host where the batch says, else on the device, unread.

A batch of our collator carries its counts as Python ints. Any other batch is counted by a few tiny reductions on the
device it lives on; their results stay there and are read together, once per logging step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from hf_speedkit.core.flops import pairs_in_window
from hf_speedkit.core.records import NO_TOKENS, TokenCounts

TOKEN_COUNTS_KEY = "token_counts"
IGNORED_LABEL = -100

# Heads that compare the label at a position with the output at the same position; the others look one ahead.
# Names: keys of transformers' LOSS_MAPPING (transformers/loss/loss_utils.py, 5.23).
_UNSHIFTED = frozenset({"ForMaskedLM", "ForTokenClassification"})

# Inputs of transformers' models that are no text: images, video, sound.
_OTHER_INPUTS = ("pixel_values", "image_", "video_", "input_features", "input_values", "audio_", "feature_attention")

_UNKNOWN_COUNT = -(2**50)
"""Stands on the device for a count that cannot be told: beyond any sum of true ones; thousands of it fit an int64."""

_COUNTS = tuple(field.name for field in fields(TokenCounts))


@dataclass(slots=True)
class Observation:
    """One optimizer step while it is being counted.

    Args:
        micro_batches: forward passes seen.
        tokens: the part of the counts known on the host.
        on_device: the rest, by field of TokenCounts: integer scalars still to be read and added.
        loss_mark: a scalar on the device, 0 where all losses were finite, else NaN; None where none was looked at.
        gradient_mark: the same of the gradient.
        compiled: kernels and graphs compiled; None where no one counted.
        excluded: why the step must not enter a rate.
    """

    micro_batches: int = 0
    tokens: TokenCounts = NO_TOKENS
    on_device: dict[str, torch.Tensor] = field(default_factory=dict)
    loss_mark: torch.Tensor | None = None
    gradient_mark: torch.Tensor | None = None
    compiled: int | None = None
    excluded: str | None = None

    def look_at_loss(self, loss: object) -> None:
        """Note on the device whether a loss is finite; anything but a tensor is left alone. Nothing is read here."""
        self.loss_mark = _marked(self.loss_mark, loss)

    def look_at_gradient(self, number: object) -> None:
        """The same of a gradient, or of its norm."""
        self.gradient_mark = _marked(self.gradient_mark, number)

    def add(self, counts: TokenCounts, on_device: Mapping[str, torch.Tensor] | None = None) -> None:
        """Count one micro-batch."""
        self.micro_batches += 1
        self.tokens = self.tokens + counts
        for name, value in (on_device or {}).items():
            before = self.on_device.get(name)  # of another device where DataParallel has cut the batch
            self.on_device[name] = value if before is None else before + value.to(before.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedStep:
    """One optimizer step, counted: what `read` makes of an Observation."""

    micro_batches: int
    tokens: TokenCounts
    nonfinite: bool | None
    nonfinite_loss: bool | None
    compiled: int | None
    excluded: str | None


def read(observations: Sequence[Observation]) -> list[CountedStep]:
    """Read what is still on the device, in one transfer, and finish the counts.

    Waits for the device: call it at a logging step only, where the Trainer has just read the loss.
    """
    waiting = [value for observation in observations for value in _scalars(observation)]
    if not waiting:
        return [_finish(observation, iter(())) for observation in observations]
    # One host read for the whole window, whatever its length. A model spread over devices counts on several of them.
    device = waiting[0].device
    values = iter(torch.stack([value.to(device=device, dtype=torch.int64) for value in waiting]).tolist())
    return [_finish(observation, values) for observation in observations]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRule:
    """How a model's loss reads its labels.

    Args:
        shifted: the output at a position is compared with the next label, as in a causal language model.
        encoder_decoder: labels belong to a decoder's positions, which come on top of the encoder's.
        window: sliding window whose pairs are to be counted.
        cut: rows are cut over ranks (context or sequence parallelism): a document may be longer than what is seen.
    """

    shifted: bool = True
    encoder_decoder: bool = False
    window: int | None = None
    cut: bool = False

    @classmethod
    def of(cls, model: torch.nn.Module, window: int | None = None, *, cut: bool = False) -> LabelRule:
        """The rule of a transformers model; a causal language model's for anything else."""
        encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        shifted = not encoder_decoder and getattr(model, "loss_type", None) not in _UNSHIFTED
        return cls(shifted=shifted, encoder_decoder=encoder_decoder, window=window, cut=cut)


def count_batch(
    arguments: Sequence[Any], keywords: Mapping[str, Any], rule: LabelRule
) -> tuple[TokenCounts, dict[str, torch.Tensor]] | None:
    """Count one micro-batch from the arguments of the model's forward. Reads nothing from the device.

    Args:
        arguments: positional arguments.
        keywords: keyword arguments.
        rule: how the model reads its labels.

    Returns:
        The host part (shapes are known there) and the device part; None where there are no tokens to count.
        Slots: positions of the input (and of the decoder, where there is one). Real: positions with attention_mask 1,
        without a mask all of them. Target: labels != -100 that enter the loss; unknown without labels per position.
        Documents: boundaries of a packed row, else positions that start again at 0, else rows.
    """
    shape = _positions(arguments, keywords)
    if shape is None:
        return None
    slots = shape[0] * shape[1]
    counts: dict[str, Any] = {"slots": slots, "real": slots, "documents": shape[0], "squared_lengths": slots * shape[1]}
    on_device: dict[str, torch.Tensor] = {}
    lengths = _count_documents(keywords, shape, rule, counts, on_device)
    if any(name.startswith(_OTHER_INPUTS) for name, value in keywords.items() if value is not None):
        # An encoder for these computes as well: FLOPs of the text alone would be too few, so none are claimed.
        _forget(counts, on_device, "squared_lengths", "window_pairs")
    if "window_pairs" in on_device:
        counts["window_pairs"] = 0
    else:
        pairs = _pairs_in_window(shape, counts["squared_lengths"], lengths, rule)
        counts["window_pairs"] = 0 if torch.is_tensor(pairs) else pairs
        on_device |= {"window_pairs": pairs} if torch.is_tensor(pairs) else {}
    if rule.cut:
        _forget(counts, on_device, "documents", "squared_lengths", "window_pairs")
    labels: Any = keywords.get("labels")
    target = _targets(labels, keywords.get("shift_labels"), rule)
    counts["target"] = None if target is None else 0
    if target is not None:
        on_device["target"] = target
    if rule.encoder_decoder:
        _forget(counts, on_device, "squared_lengths", "window_pairs")  # two lengths a document
        if target is None:
            counts["real"] = None
        else:
            counts["slots"] += labels.numel()
            on_device["real"] = on_device["real"] + target if "real" in on_device else target
    return TokenCounts(**counts), on_device


def _count_documents(
    keywords: Mapping[str, Any],
    shape: tuple[int, int],
    rule: LabelRule,
    counts: dict[str, Any],
    on_device: dict[str, torch.Tensor],
) -> torch.Tensor | None:
    """Correct `counts` by what the batch says of its documents; what is on the device goes to `on_device`.

    Returns:
        Length of each document, on the device; None where nothing but the shape tells, or where it is not known.
    """
    mask, boundaries, positions = (keywords.get(name) for name in ("attention_mask", "cu_seq_lens_q", "position_ids"))
    if torch.is_tensor(boundaries):
        lengths = boundaries.diff().to(torch.int64)
        counts |= {"documents": int(lengths.numel()), "squared_lengths": 0}
        on_device["squared_lengths"] = lengths.square().sum()
        return lengths
    if torch.is_tensor(mask) and tuple(mask.shape) == tuple(shape):
        lengths = mask.ne(0).sum(-1)
        counts |= {"real": 0, "squared_lengths": 0}
        on_device |= {"real": lengths.sum(), "squared_lengths": lengths.square().sum()}
        return lengths
    if mask is not None:
        # A 4-D or per-layer mask: which positions hold a token cannot be read from it.
        counts |= {"real": None, "documents": None, "squared_lengths": None}
    elif torch.is_tensor(positions) and positions.dim() == 2 and positions.numel() == counts["slots"]:
        counts |= {"documents": 0, "squared_lengths": 0}
        on_device |= _by_positions(positions, rule.window)
    elif positions is not None:
        # Several positions a token (images): where documents begin is not known.
        counts |= {"documents": None, "squared_lengths": None}
    return None


def _forget(counts: dict[str, Any], on_device: dict[str, torch.Tensor], *names: str) -> None:
    """Make these counts unknown."""
    for name in names:
        counts[name] = None
        on_device.pop(name, None)


class GradientProbe:
    """Finds the gradient that tells whether all are finite: of the smallest trained tensor nearest to the input.

    A NaN or infinite loss reaches every gradient, and clipping spreads a NaN norm to all of them, so one tensor tells.
    Cost: one reduction of a few numbers on the device per step.
    """

    def __init__(self) -> None:
        self._parameter: torch.nn.Parameter | None = None

    def smallest(self, model: torch.nn.Module) -> torch.Tensor | None:
        """The gradient to look at; None where there is none."""
        if self._parameter is None or self._parameter.grad is None:
            trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
            if not trained:
                return None
            # min() takes the first of equals, and parameters come in order from the input.
            self._parameter = min(trained, key=lambda parameter: parameter.numel())
        return self._parameter.grad


def _positions(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[int, int] | None:
    """(rows, length) of the input; None where it holds no tokens."""
    ids = keywords.get("input_ids", arguments[0] if arguments else None)
    if torch.is_tensor(ids) and ids.dim() == 2 and not ids.is_floating_point():
        return ids.shape[0], ids.shape[1]
    embedded = keywords.get("inputs_embeds")
    if torch.is_tensor(embedded) and embedded.dim() == 3:
        return embedded.shape[0], embedded.shape[1]
    return None


def _pairs_in_window(shape: tuple[int, int], squared: int | None, lengths: torch.Tensor | None, rule: LabelRule) -> Any:
    """Causal pairs inside the window over the documents: on the device where their lengths are, None if unknown."""
    if rule.window is None or squared is None:
        return None
    if lengths is None:
        return int(shape[0] * pairs_in_window(shape[1], rule.window))
    inside = lengths.clamp(max=rule.window).to(torch.int64)
    return (inside * (inside + 1) // 2 + (lengths - inside) * rule.window).sum()


def _by_positions(positions: torch.Tensor, window: int | None) -> dict[str, torch.Tensor]:
    """Documents of packed rows whose positions start at 0 in each (transformers' DataCollatorWithFlattening).

    A document's squared length is the sum of 2p + 1 over its positions p, and a token at p sees min(p + 1, window).
    Rows in which positions start elsewhere or jump give numbers below zero, which `read` takes as unknown.
    """
    positions = positions.to(torch.int64)
    known = (positions[:, :1] == 0).all() & ((positions[:, 1:] == 0) | (positions.diff(dim=-1) == 1)).all()
    counts = {"documents": (positions == 0).sum(), "squared_lengths": (2 * positions + 1).sum()}
    if window is not None:
        counts["window_pairs"] = (positions + 1).clamp(max=window).sum()
    return {name: torch.where(known, value, _UNKNOWN_COUNT) for name, value in counts.items()}


def _targets(labels: Any, shifted: Any, rule: LabelRule) -> torch.Tensor | None:
    """Number of labels that enter the loss, on the device; None where labels are not one per position.

    Where they were shifted before the row was cut, those count: of a part's own labels the first may have its output
    on another rank.
    """
    if torch.is_tensor(shifted) and shifted.dim() == 2:
        return shifted.ne(IGNORED_LABEL).sum()
    if rule.cut or not torch.is_tensor(labels) or labels.dim() != 2 or labels.is_floating_point():
        return None
    counted = labels[:, 1:] if rule.shifted else labels
    return counted.ne(IGNORED_LABEL).sum()


def _scalars(observation: Observation) -> list[torch.Tensor]:
    marks = [mark.isnan().any() for mark in (observation.loss_mark, observation.gradient_mark) if mark is not None]
    return [*observation.on_device.values(), *marks]


def _marked(mark: torch.Tensor | None, number: object) -> torch.Tensor | None:
    """The mark with one more number looked at. Cost: two device operations on one number."""
    if not isinstance(number, torch.Tensor):
        return mark
    value: Any = number.detach()
    # A sharded norm: this rank's share of it, so that no collective is needed.
    value = value.to_local() if hasattr(value, "to_local") else value
    # 0 for a finite number, NaN for any other, and it stays NaN in a sum: two kernels, where isfinite takes four.
    found: torch.Tensor = value - value if value.numel() == 1 else (value - value).sum()
    return found if mark is None else mark + found.to(mark.device)


def _finish(observation: Observation, values: Any) -> CountedStep:
    found = {name: next(values) for name in observation.on_device}
    tokens = observation.tokens
    counts = {name: getattr(tokens, name) for name in _COUNTS}
    # Unknown stays unknown, even if another micro-batch of the step was counted.
    counts = {
        name: None if value is None or found.get(name, 0) < 0 else value + found.get(name, 0)
        for name, value in counts.items()
    }
    bad_loss, bad_gradient = (
        None if mark is None else bool(next(values)) for mark in (observation.loss_mark, observation.gradient_mark)
    )
    looked = [bad for bad in (bad_loss, bad_gradient) if bad is not None]
    return CountedStep(
        micro_batches=observation.micro_batches,
        tokens=TokenCounts(**counts),
        nonfinite=any(looked) if looked else None,
        nonfinite_loss=bad_loss,
        compiled=observation.compiled,
        excluded=observation.excluded,
    )
