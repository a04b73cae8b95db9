"""What a collator makes of rows: masks of targets that it writes over, documents that it joins, ends it leaves out."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

from hf_speedkit.core.errors import ConfigurationError, DatasetError
from hf_speedkit.packing.boundaries import IGNORE_INDEX
from hf_speedkit.packing.row_rules import refuse_shifted_labels

_ROWS = 4
_PADS_LABELS = "DataCollatorForSeq2Seq(tokenizer, padding=True), which pads labels with -100"
_LEAVE_OUT = "in a SpeedSFTTrainer leave data_collator out"


@dataclass(frozen=True, slots=True)
class Look:
    """A batch as training will get it.

    Args:
        collator: that made it; the Trainer may have wrapped it.
        rows: what it was made of; none where they cannot be indexed, or hold no tokens.
        batch: None where none could be made.
    """

    collator: Any
    rows: list[Any]
    batch: Any


def looked_at(loader: Any) -> Look:
    """Collate the first rows of a loader's dataset, up to four; random numbers are drawn again in training.

    Args:
        loader: of training; None: nothing is looked at, nor is what masks tokens at random.

    Raises:
        ConfigurationError: labels of unequal length are not padded, so that no batch can be made.
    """
    collate = getattr(loader, "collate_fn", None)
    collator = getattr(collate, "data_collator", collate)
    if collate is None or getattr(collator, "mlm", False):
        return Look(collator, [], None)
    with _no_numbers_drawn():
        rows = _first_rows(loader.dataset, min(_ROWS, getattr(loader, "batch_size", None) or _ROWS))
        return Look(collator, rows, _batch_of(collate, collator, rows) if rows else None)


def odd_targets(look: Look, ends: set[int]) -> str | None:
    """Refuse a collator that trains on what its rows leave out; say where ends are no targets, or padding is.

    transformers' DataCollatorForLanguageModeling makes labels anew, of every token but the padding's: masks are lost,
    and where pad_token is eos_token so are all ends (huggingface/transformers#26357, huggingface/trl#1623).

    Args:
        look: see `looked_at`.
        ends: tokens at which generation stops.

    Returns:
        What to say; None where there is nothing.

    Raises:
        ConfigurationError: labels of -100 are targets in the batch; the end of one document is trained on the beginning
            of the next, in rows that say where documents begin (said alone where all begin alike); of several rows the
            batch holds the first alone.
    """
    rows, batch, kind = look.rows, look.batch, type(look.collator).__name__
    pairs = _pairs(rows, batch)
    masked = [now for row, given in pairs for label, now in zip(row[1:], given[1:], strict=True) if label < 0]
    trained = sum(label != IGNORE_INDEX for label in masked)
    ids = _tensor(batch, "input_ids")
    if ids is not None and len(rows) > 1 and ids.tolist() == [_ints(rows[0]["input_ids"])]:
        raise ConfigurationError(
            f"the data_collator, a {kind}, keeps the first of {len(rows)} rows: the others are never trained on",
            mend=f"per_device_train_batch_size=1, or a collator of all rows: {_PADS_LABELS}",
        )
    if trained:
        raise ConfigurationError(
            f"the data_collator, a {kind}, makes targets of {trained} of {len(masked)} tokens that labels of the rows "
            "leave out",
            evidence=(f"in the first {len(pairs)} rows: it does not read their labels",),
            mend=f"{_PADS_LABELS}; {_LEAVE_OUT}",
            regardless='dataset.remove_columns("labels") (of prompts and completions: completion_only_loss=False)',
        )
    joined, found, alike = _joined(batch)
    if joined:
        what = "documents share rows, and the last token of each is trained on the first of the next"
        mend = "the label -100 for the first token of each document, as DataCollatorWithFlattening() has it"
        if alike:  # one that begins every text: no document's contents reach another's loss
            return f"{what}, token {alike}: {mend}"
        raise ConfigurationError(
            what,
            evidence=(f"{joined} of {found} documents behind another one begin with a target ({kind})",),
            mend=mend,
        )
    shifted = _shifted(batch)
    if shifted:
        return f"the data_collator, a {kind}: {shifted}; or let a compute_loss of your own shift nothing"
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


def _first_rows(dataset: Any, number: int) -> list[Any]:
    """The first rows, where they hold tokens."""
    try:
        rows = [dataset[at] for at in range(min(number, len(dataset)))]
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


def _pairs(rows: Sequence[Any], batch: Any) -> list[tuple[list[int], list[int]]]:
    """The labels of each row, before and after, where the batch holds its tokens as they are: a row of it each, or end
    to end in one row."""
    ids, labels = _tensor(batch, "input_ids"), _tensor(batch, "labels")
    if ids is None or labels is None or ids.shape != labels.shape or len(ids) not in (1, len(rows)):
        return []
    given = [(_ints(row["input_ids"]), _ints(row.get("labels"))) for row in rows]
    flat = len(ids) == 1 and len(rows) > 1
    lines = list(zip(ids.tolist(), labels.tolist(), strict=True))
    pairs, at = [], 0
    for index, (tokens, targets) in enumerate(given):
        if targets and len(targets) != len(tokens):  # of an encoder and a decoder
            return []
        line, line_labels = lines[0 if flat else index]
        start = at if flat else _start(line, tokens)
        if start is None or line[start : start + len(tokens)] != tokens:
            return []
        pairs.append((targets or tokens, line_labels[start : start + len(tokens)]))
        at += len(tokens)
    return pairs


def later_documents(batch: Any) -> torch.Tensor | None:
    """Where a document begins behind another one, bool [B, T]; None where a batch says nothing of documents.

    Args:
        batch: as training will get it. Positions that begin again tell documents, or else the cu_seq_lens_q of one row;
            padding is no document.
    """
    ids, positions, mask = (_tensor(batch, name) for name in ("input_ids", "position_ids", "attention_mask"))
    if ids is None:
        return None
    begins = torch.zeros_like(ids, dtype=torch.bool)
    offsets = batch.get("cu_seq_lens_q")
    if positions is not None and positions.shape == ids.shape:
        begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    elif "position_ids" not in batch and isinstance(offsets, torch.Tensor) and len(ids) == 1:
        begins[0, offsets[1:-1].long()] = True
    else:
        return None
    if mask is not None and mask.shape == ids.shape:
        begins[:, 1:] &= mask[:, 1:].bool() & mask[:, :-1].bool()
    return begins


def _joined(batch: Any) -> tuple[int, int, int | None]:
    """Documents that begin with their own first token as a target, of how many behind another one, and the token that
    all documents begin with, if they do."""
    ids, labels, begins = _tensor(batch, "input_ids"), _tensor(batch, "labels"), later_documents(batch)
    if ids is None or labels is None or begins is None or labels.shape != ids.shape:
        return 0, 0, None
    first = {*ids[begins].tolist(), *ids[:, 0].tolist()}
    return int((begins & (labels == ids)).sum()), int(begins.sum()), first.pop() if len(first) == 1 else None


def _tensor(batch: Any, name: str) -> torch.Tensor | None:
    """A tensor [B, T] of a batch; None where there is none of that shape."""
    value = batch.get(name) if isinstance(batch, Mapping) else None
    return value if isinstance(value, torch.Tensor) and value.ndim == 2 else None


def _shifted(batch: Any) -> str | None:
    """What to say of labels that are the tokens after their own: models shift them (huggingface/transformers#32944)."""
    ids, labels = _tensor(batch, "input_ids"), _tensor(batch, "labels")
    if ids is None or labels is None or ids.shape != labels.shape or "shift_labels" in batch:
        return None
    ends = [int(line.nonzero()[-1]) + 1 if line.any() else 0 for line in labels != IGNORE_INDEX]  # padding follows
    lines = zip(ids.tolist(), labels.tolist(), ends, strict=True)
    try:
        refuse_shifted_labels({"input_ids": row[:end], "labels": targets[:end]} for row, targets, end in lines)
    except DatasetError as error:
        return f"{error.what}; {error.evidence[0]}: {error.mend}"
    return None


def _trained_padding(batch: Any) -> int:
    mask, labels = _tensor(batch, "attention_mask"), _tensor(batch, "labels")
    if mask is None or labels is None or mask.shape != labels.shape:
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
