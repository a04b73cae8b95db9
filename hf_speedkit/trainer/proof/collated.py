"""What a collator makes of rows: masks of targets that it writes over, documents that it joins, ends it leaves out."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

from hf_speedkit.core.errors import ConfigurationError, DatasetError
from hf_speedkit.packing.boundaries import IGNORE_INDEX
from hf_speedkit.packing.row_rules import refuse_shifted_labels

_ROWS = 4
_LONGEST_S = 1.0
"""For rows: some take a second each, tokenized or decoded as they are asked for. One is always read."""
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_PADS_LABELS = "DataCollatorForSeq2Seq(tokenizer, padding=True), which pads labels with -100"
_LEAVE_OUT = "in a SpeedSFTTrainer leave data_collator out"


@dataclass(frozen=True, slots=True)
class Look:
    """A batch as training will get it.

    Args:
        collator: that made it; the Trainer may have wrapped it.
        rows: what it was made of; none where they cannot be indexed, or hold no tokens.
        batch: None where none could be made.
        collate: rows -> batch.
    """

    collator: Any
    rows: list[Any]
    batch: Any
    collate: Callable[[list[Any]], Any] | None = None


def looked_at(loader: Any) -> Look:
    """Collate the first rows of a loader's dataset, up to four and to a batch; they are drawn again in training.

    Dataset and collator are copies: files that a dataset opens at its first row must not be open where workers are
    forked, and random numbers that one of them draws for itself are drawn again.

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
        rows = _first_rows(_apart(getattr(loader, "dataset", None)), min(_ROWS, _batch_size(loader) or _ROWS))
        look = Look(collator, rows, None, _apart(collate))
        return replace(look, batch=_batch_of(look)) if rows else look


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
    trained = sum(label >= 0 for label in masked)  # a loss of one's own may leave out -1
    ids = _tensor(batch, "input_ids")
    if ids is not None and len(rows) > 1 and ids.tolist() == [_ints(rows[0]["input_ids"])]:
        raise ConfigurationError(
            f"the data_collator, a {kind}, keeps the first of {len(rows)} rows: the others are never trained on",
            mend=f"per_device_train_batch_size=1, or a collator of all rows: {_PADS_LABELS}",
        )
    if trained:
        what = (
            f"the data_collator, a {kind}, makes targets of {trained} of {len(masked)} tokens that labels of the rows"
        )
        if not _reads_no_labels(look):
            return f"{what} leave out. It reads the labels: look whether that is meant"
        raise ConfigurationError(
            f"{what} leave out",
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
    return _lost_ends(look, pairs, ends)


def _lost_ends(look: Look, pairs: list[tuple[list[int], list[int]]], ends: set[int]) -> str | None:
    last = [(row[-1], given[-1]) for row, given in pairs if row and row[-1] in ends]
    if not last or any(label != IGNORE_INDEX for _, label in last):
        return None
    kind = type(look.collator).__name__
    padding = getattr(getattr(look.collator, "tokenizer", None), "pad_token_id", None)
    if all(token == padding for token, _ in last):
        return (
            f"the data_collator, a {kind}, takes the end token out of the targets (it masks every pad_token), "
            f"so the model does not learn to stop. {_PADS_LABELS}; {_LEAVE_OUT}; or a pad_token of its own"
        )
    if len(last) == 1:  # a collator may mask some targets at random
        return None
    return (
        f"the end token is a target in none of {len(last)} rows that end with it, so the model does not learn to stop: "
        f"the data_collator, a {kind}, or a mask of the rows leaves it out"
    )


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


def _batch_size(loader: Any) -> int | None:
    """Rows of a batch; accelerate's loaders (1.15) leave that to their sampler."""
    own = getattr(loader, "batch_size", None)
    return own or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)


def _apart(thing: Any) -> Any:
    """A shallow copy: what is set in it is not set in the original. So are what it wraps and draws numbers from."""
    if isinstance(thing, (Dataset, FunctionType, type)) or not hasattr(thing, "__dict__"):
        return thing
    try:
        if hasattr(thing, "__array__"):  # a copy of a memory map has all of it in memory
            return thing
        other = copy.copy(thing)
        for name, value in vars(other).items():
            if isinstance(value, _GENERATORS):
                vars(other)[name] = copy.deepcopy(value)
            elif name in ("dataset", "data_collator"):
                vars(other)[name] = _apart(value)
            elif name == "datasets" and isinstance(value, (list, tuple)):
                vars(other)[name] = [*map(_apart, value)]
    except Exception:  # noqa: BLE001 (anybody's class; what cannot be copied is looked at itself)
        return thing
    return other


def _first_rows(dataset: Any, number: int) -> list[Any]:
    """The first rows, where they hold tokens."""
    rows: list[Any] = []
    until = time.monotonic() + _LONGEST_S
    try:
        for at in range(min(number, len(dataset))):
            rows.append(dataset[at])
            if not isinstance(rows[-1], Mapping) or not _ints(rows[-1].get("input_ids")):
                return []
            if time.monotonic() > until:
                break
    except Exception:  # noqa: BLE001 (a stream, or a dataset that fails: training says so in its own words)
        return []
    return rows


def _batch_of(look: Look) -> Any:
    try:
        return _collated(look, look.rows)
    except Exception as error:  # collators raise what they like, and training will say so at its first batch
        lengths = {len(_ints(row.get("labels"))) for row in look.rows}
        padding = isinstance(look.collator, (DataCollatorForLanguageModeling, DataCollatorWithPadding))
        if padding and len(lengths) > 1 and _without_labels(look) is not None:
            raise ConfigurationError(
                f"the data_collator, a {type(look.collator).__name__}, does not pad the labels of the rows",
                evidence=(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",),
                mend=f"{_PADS_LABELS}; {_LEAVE_OUT}",
            ) from error
        return None


def _collated(look: Look, rows: list[Any]) -> Any:
    return look.collate(copy.deepcopy(rows)) if look.collate is not None else None


def _without_labels(look: Look) -> Any:
    """The batch of the same rows without their labels; None where there is none."""
    try:
        return _collated(look, [{name: row[name] for name in row if name != "labels"} for row in look.rows])
    except Exception:  # noqa: BLE001 (see `_batch_of`)
        return None


def _reads_no_labels(look: Look) -> bool:
    """Whether a collator makes the same labels of rows without any."""
    with _no_numbers_drawn():
        labels, made = (_tensor(batch, "labels") for batch in (look.batch, _without_labels(look)))
    return labels is not None and made is not None and torch.equal(labels, made)


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
            those that leave some out do not (what teaches a longer context has them), and padding is no document, nor
            is anything behind the last target.
    """
    names = ("input_ids", "position_ids", "attention_mask", "labels")
    ids, positions, mask, labels = (_tensor(batch, name) for name in names)
    if ids is None:
        return None
    begins = torch.zeros_like(ids, dtype=torch.bool)
    offsets = batch.get("cu_seq_lens_q")
    if positions is not None and positions.shape == ids.shape:
        begins[:, 1:] = positions[:, 1:] <= positions[:, :-1]
    elif "position_ids" not in batch and isinstance(offsets, torch.Tensor) and len(ids) == 1:
        begins[0, offsets[(offsets > 0) & (offsets < ids.shape[1])].long()] = True  # the last may come several times
    else:
        return None
    if mask is not None and mask.shape == ids.shape:
        begins[:, 1:] &= mask[:, 1:].bool() & mask[:, :-1].bool()
    if labels is not None and labels.shape == ids.shape:
        begins &= (labels >= 0).flip(1).cumsum(1).flip(1).bool()
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
    return int(((mask == 0) & (labels >= 0)).sum())


def _start(line: list[int], tokens: list[int]) -> int | None:
    """Where a row's tokens begin in a padded one: at its beginning or before its end."""
    starts = (0, len(line) - len(tokens))
    return next((at for at in starts if at >= 0 and line[at : at + len(tokens)] == tokens), None)


def _ints(values: Any) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values
    fits = isinstance(values, (list, tuple)) and all(isinstance(value, int) for value in values)
    return list(values) if fits else []
