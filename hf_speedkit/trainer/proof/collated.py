"""What a collator makes of the targets of rows: masks that it writes over, documents it joins, ends it leaves out."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.packing.boundaries import IGNORE_INDEX

_ROWS = 4
_PADS_LABELS = "DataCollatorForSeq2Seq(tokenizer, padding=True), which pads labels with -100"
_LEAVE_OUT = "in a SpeedSFTTrainer leave data_collator out"


def odd_targets(loader: Any, ends: set[int]) -> str | None:
    """Refuse a collator that trains on what its rows leave out; say where ends are no targets, or padding is.

    transformers' DataCollatorForLanguageModeling makes labels anew, of every token but the padding's: masks are lost,
    and where pad_token is eos_token so are all ends (huggingface/transformers#26357, huggingface/trl#1623).

    Args:
        loader: of training. Its collator is called once, with its dataset's first four rows; a dataset that cannot be
            indexed, or whose rows hold no tokens, is not looked at. None: nothing is.
        ends: tokens at which generation stops.

    Returns:
        What to say; None where there is nothing.

    Raises:
        ConfigurationError: labels of -100 are targets in the batch; the end of one document is trained on the beginning
            of the next, in rows that say where documents end; labels are not padded, so that no batch can be made.
    """
    collate = getattr(loader, "collate_fn", None)
    collator = getattr(collate, "data_collator", collate)
    if collate is None or getattr(collator, "mlm", False):
        return None
    with _no_numbers_drawn():
        rows = _first_rows(loader.dataset)
        batch = _batch_of(collate, collator, rows) if rows else None
    pairs, joined = _pairs(rows, batch)
    kind = type(collator).__name__
    masked = [now for row, given in pairs for label, now in zip(row[1:], given[1:], strict=True) if label < 0]
    trained = sum(label != IGNORE_INDEX for label in masked)
    if trained:
        raise ConfigurationError(
            f"the data_collator, a {kind}, makes targets of {trained} of {len(masked)} tokens that labels of the rows "
            "leave out",
            evidence=(f"in the first {len(pairs)} rows: it does not read their labels",),
            mend=f"{_PADS_LABELS}; {_LEAVE_OUT}",
            regardless='dataset.remove_columns("labels") (of prompts and completions: completion_only_loss=False)',
        )
    if joined:
        raise ConfigurationError(
            f"the data_collator, a {kind}, joins documents, and the last token of each is trained on the first of the "
            "next",
            evidence=(f"{joined} of {len(pairs) - 1} documents begin with a target",),
            mend="the label -100 for the first token of each document, as DataCollatorWithFlattening() has it",
        )
    padding = _trained_padding(batch) if pairs else 0
    if padding:
        return (
            f"{padding} of the targets in a batch of {len(rows)} rows are padding (attention_mask is 0 there), which "
            "the model learns to write and the loss is a mean over. Rows without padding and a collator that pads "
            f"({_PADS_LABELS}), or labels of -100 there"
        )
    last = [given[-1] for row, given in pairs if row and row[-1] in ends]
    if last and all(label == IGNORE_INDEX for label in last):
        return (
            f"the data_collator, a {kind}, takes the end token out of the targets (it masks every pad_token), "
            f"so the model does not learn to stop. {_PADS_LABELS}; {_LEAVE_OUT}; or a pad_token of its own"
        )
    return None


@contextmanager
def _no_numbers_drawn() -> Iterator[None]:
    """Datasets and collators may draw random numbers: what training draws is as it would be without the look."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _first_rows(dataset: Any) -> list[Any]:
    """The first rows that hold tokens."""
    try:
        rows = [dataset[at] for at in range(min(_ROWS, len(dataset)))]
    except Exception:  # noqa: BLE001 (a stream, or a dataset that fails: training says so in its own words)
        return []
    if not all(isinstance(row, Mapping) and _ints(row.get("input_ids")) for row in rows):
        return []
    return rows


def _batch_of(collate: Callable[[list[Any]], Any], collator: Any, rows: list[Any]) -> Any:
    try:
        return collate(copy.deepcopy(rows))
    except Exception as error:  # collators raise what they like, and training will say so at its first batch
        if isinstance(collator, (DataCollatorForLanguageModeling, DataCollatorWithPadding)) and "labels" in rows[0]:
            raise ConfigurationError(
                f"the data_collator, a {type(collator).__name__}, does not pad the labels of the rows",
                evidence=(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",),
                mend=f"{_PADS_LABELS}; {_LEAVE_OUT}",
            ) from error
        return None


def _pairs(rows: Sequence[Any], batch: Any) -> tuple[list[tuple[list[int], list[int]]], int]:
    """The labels of each row, before and after, where the batch holds its tokens as they are: a row of it each, or end
    to end in one row; and how many documents begin with their own first token as a target in such a row."""
    if not isinstance(batch, Mapping):
        return [], 0
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if not (isinstance(ids, torch.Tensor) and isinstance(labels, torch.Tensor)) or ids.shape != labels.shape:
        return [], 0
    if ids.ndim != 2 or len(ids) not in (1, len(rows)):
        return [], 0
    given = [(_ints(row["input_ids"]), _ints(row.get("labels"))) for row in rows]
    flat = len(ids) == 1 and len(rows) > 1
    lines = list(zip(ids.tolist(), labels.tolist(), strict=True))
    pairs, joined, at = [], 0, 0
    for index, (tokens, targets) in enumerate(given):
        if targets and len(targets) != len(tokens):  # of an encoder and a decoder
            return [], 0
        line, line_labels = lines[0 if flat else index]
        start = at if flat else _start(line, tokens)
        if start is None or line[start : start + len(tokens)] != tokens:
            return [], 0
        after = line_labels[start : start + len(tokens)]
        pairs.append((targets or tokens, after))
        joined += flat and index > 0 and after[0] == tokens[0]
        at += len(tokens)
    return pairs, joined if {"position_ids", "cu_seq_lens_q"} & set(batch) else 0


def _trained_padding(batch: Any) -> int:
    mask, labels = (batch.get(key) if isinstance(batch, Mapping) else None for key in ("attention_mask", "labels"))
    if not (isinstance(mask, torch.Tensor) and isinstance(labels, torch.Tensor)) or mask.shape != labels.shape:
        return 0
    return int(((mask == 0) & (labels != IGNORE_INDEX)).sum())


def _start(line: list[int], tokens: list[int]) -> int | None:
    """Where a row's tokens begin in a padded one: at its beginning or before its end."""
    starts = (0, len(line) - len(tokens))
    return next((at for at in starts if at >= 0 and line[at : at + len(tokens)] == tokens), None)


def _ints(values: Any) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values
    fits = isinstance(values, (list, tuple)) and all(isinstance(value, int) for value in values)
    return list(values) if fits else []
