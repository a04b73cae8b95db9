"""Rows that accelerate repeats at the end of an epoch, so that every rank has a whole batch: slots, and nothing else.

With `even_batches` (the default) the last round of batches is filled with rows from the epoch's begin. They are
computed, so they are slots, but their tokens were counted before. accelerate 1.15 fills in rank order: of the last
round, the first `remainder` samples are new (what `gather_for_metrics` relies on as well, accelerator.py:3162).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import GradientState
from transformers import TrainingArguments

from hf_speedkit.core.records import NO_TOKENS, TokenCounts
from hf_speedkit.trainer.metrics.observation import LabelRule, count_batch


class NewRows:
    """Tells how many rows of the batch under way are new.

    Args:
        args: the Trainer's.
        dataloader: of accelerate, training's or evaluation's; None or another one: nothing is taken for repeated.
        shared_by: ranks that see the same batch (tensor parallelism).
        drop_last: whether a last, short batch is left out; None: as in training.
    """

    def __init__(
        self, args: TrainingArguments, dataloader: object, *, shared_by: int = 1, drop_last: bool | None = None
    ) -> None:
        self._place = args.process_index // shared_by
        self._ranks = args.world_size // shared_by
        self._each: int | None = None
        # A dispatcher tells at the end how much it had; any other loader that is not accelerate's repeats nothing.
        self._remainder: int | None = None if isinstance(dataloader, DataLoaderDispatcher) else 0
        sampler: Any = getattr(dataloader, "batch_sampler", None)
        data: Any = getattr(dataloader, "dataset", None)
        # A sampler of packed rows has no batch size, and repeats none.
        sized = getattr(sampler, "batch_size", None) is not None
        if sized and hasattr(sampler, "even_batches") and hasattr(data, "__len__"):
            # Told here and not by GradientState.remainder, which accelerate 1.15 does not know in a resumed epoch.
            together: int = getattr(dataloader, "total_batch_size")  # noqa: B009  # accelerate's loaders are not typed
            self._each = together // self._ranks
            filled = sampler.even_batches and not (args.dataloader_drop_last if drop_last is None else drop_last)
            self._remainder = len(data) % together if filled else 0

    def __call__(self, rows: int) -> int | None:
        """How many of the first rows of a batch of so many are new; None: all of them.

        A row that is put together from several samples is taken as a whole: it repeats if its first sample does.
        """
        state = GradientState()
        if self._ranks == 1 or not (state.end_of_dataloader and state.sync_gradients):
            return None  # the Trainer fetches a step's batches before it computes the first, so the last one is meant
        remainder = state.remainder if self._remainder is None else self._remainder
        if remainder <= 0:
            return None
        each = rows if self._each is None else self._each
        new = min(each, max(0, remainder - self._place * each))
        if new == each:
            return None
        return new if rows == each or new == 0 else None


def count_new_rows(
    arguments: Sequence[Any], keywords: Mapping[str, Any], rule: LabelRule, new: NewRows | None
) -> tuple[TokenCounts, dict[str, torch.Tensor]] | None:
    """As `count_batch`, with repeated rows as slots only."""
    seen = count_batch(arguments, keywords, rule)
    rows = _rows(arguments, keywords)
    wanted = None if seen is None or rows is None or new is None else new(rows)
    if seen is None or wanted is None:
        return seen
    slots = seen[0].slots
    if wanted == 0:
        return replace(NO_TOKENS, slots=slots), {}
    part = count_batch(
        [_cut(value, rows, wanted) for value in arguments],
        {name: _cut(value, rows, wanted) for name, value in keywords.items()},
        rule,
    )
    return seen if part is None else (replace(part[0], slots=slots), part[1])


def _rows(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> int | None:
    ids = keywords.get("input_ids", arguments[0] if arguments else keywords.get("inputs_embeds"))
    return int(ids.shape[0]) if torch.is_tensor(ids) and ids.dim() > 1 else None


def _cut(value: Any, rows: int | None, wanted: int) -> Any:
    """The first rows of a tensor that has one for each of the batch."""
    whole = torch.is_tensor(value) and value.dim() > 1 and value.shape[0] == rows
    return value[:wanted] if whole else value
