"""From a tokenized dataset to documents that can be packed, with every token accounted for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_speedkit.core.document_records import DocumentReport
from hf_speedkit.core.errors import DatasetError, PackingError
from hf_speedkit.packing.boundaries import IGNORE_INDEX
from hf_speedkit.packing.document_columns import (
    blocks,
    flat_values,
    list_lengths,
    refuse_other_columns,
    token_columns,
    values_of,
)
from hf_speedkit.packing.planner import check_slots
from hf_speedkit.packing.row_rules import Ints as _Ints

if TYPE_CHECKING:
    from datasets import Dataset

OVERLONG = ("error", "split", "truncate", "drop")
"""What `prepare_documents` can do with a document longer than a row."""


def prepare_documents(
    dataset: Dataset, *, tokens_per_batch: int, overlong: str = "error"
) -> tuple[Dataset, DocumentReport]:
    """Drop what cannot be trained on, deal with documents longer than a row, and count both.

    Documents without tokens go, and so do those without a target: the first token of a document never is one, so a
    single token goes too. Nothing is dropped or cut that the report does not count.

    Args:
        dataset: tokenized and map-style, columns input_ids and, unless every token is a target, labels (same length,
            not shifted, -100 where a token is no target).
        tokens_per_batch: slots of a row.
        overlong: "error" names them and stops; "truncate" keeps the first tokens_per_batch tokens; "split" cuts a
            document into pieces, of which all but the first train without what came before; "drop" leaves them out.

    Returns:
        The documents in the dataset's order, with the columns input_ids and labels alone, and what happened to the
        rest. Rows that stay as they are get selected, not copied; rows that are cut are held in memory.

    Raises:
        DatasetError: no documents, none with targets, missing or unequal columns, a dataset that is packed already.
        PackingError: documents longer than a row under "error"; an `overlong` or `tokens_per_batch` that is none.

    Cost: one pass over the labels, 3 ns a token of one core (benchmarks/results/host_costs.json).
    """
    if overlong not in OVERLONG:
        raise PackingError(f"overlong={overlong!r} is not a choice", mend=f"overlong is one of: {', '.join(OVERLONG)}")
    check_slots(tokens_per_batch)
    documents = token_columns(dataset)
    lengths, targets = _scan(documents)
    trainable = targets > 0
    if not trainable.any():
        _refuse_targetless(lengths, "the label mask covers every token")
    too_long = trainable & (lengths > tokens_per_batch)
    if overlong == "error" and too_long.any():
        _refuse_overlong(lengths, too_long, tokens_per_batch)
    keep = np.flatnonzero(trainable & ~too_long)
    pieces = _no_pieces()
    if overlong in ("split", "truncate") and too_long.any():
        pieces = _cut(documents, np.flatnonzero(too_long), tokens_per_batch, split=overlong == "split")
    report = _report(lengths, targets, keep, too_long, pieces, tokens_per_batch, overlong)
    if not report.documents:
        _refuse_targetless(lengths, f'none keeps one in rows of {tokens_per_batch:,} tokens (overlong="{overlong}")')
    return _assemble(documents, keep, pieces), report


def document_lengths(dataset: Dataset) -> _Ints:
    """Tokens of each document of a tokenized map-style dataset, int64 [rows]; reads offsets, not tokens.

    Raises:
        DatasetError: input_ids are no lists of integers.
    """
    documents = dataset.select_columns(["input_ids"]).with_format("arrow")
    refuse_other_columns(documents)
    # An index mapping (after shuffle or filter) has to be followed block by block; without one this is one slice.
    parts = [list_lengths(block["input_ids"]) for block in blocks(documents)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Rows made anew: what is kept of documents longer than a row."""

    table: pa.Table | None
    parents: _Ints
    lengths: _Ints
    targets: _Ints
    starts: _Ints


def _no_pieces() -> _Pieces:
    none = np.zeros(0, dtype=np.int64)
    return _Pieces(table=None, parents=none, lengths=none, targets=none, starts=none)


def _scan(documents: Dataset) -> tuple[_Ints, _Ints]:
    """Tokens and targets of each document."""
    parts = [_count_block(block) for block in blocks(documents.with_format("arrow"))]
    lengths = np.concatenate([part[0] for part in parts])
    if parts and parts[0][1] is None:
        return lengths, np.maximum(lengths - 1, 0)
    return lengths, np.concatenate([part[1] for part in parts if part[1] is not None])


def _count_block(block: pa.Table) -> tuple[_Ints, _Ints | None]:
    lengths = list_lengths(block["input_ids"])
    flat_values(block["input_ids"])
    if "labels" not in block.column_names:
        return lengths, None
    label_lengths = list_lengths(block["labels"])
    unequal = np.flatnonzero(lengths != label_lengths)
    if unequal.size:
        row = unequal[0]
        raise DatasetError(
            f"a document has {lengths[row]} input_ids and {label_lengths[row]} labels",
            mend="give each token a label, -100 where it is no target; do not shift them",
        )
    return lengths, _target_counts(values_of(block["labels"]), lengths)


def _target_counts(labels: _Ints, lengths: _Ints) -> _Ints:
    """Targets of each document from their labels in a row: a running count, read at document ends (empty ones too)."""
    is_target = labels != IGNORE_INDEX
    ends = np.cumsum(lengths)
    starts = ends - lengths
    is_target[starts[lengths > 0]] = False
    running = np.concatenate(([0], np.cumsum(is_target, dtype=np.int64)))
    counts: _Ints = running[ends] - running[starts]
    return counts


def _cut(documents: Dataset, rows: _Ints, limit: int, *, split: bool) -> _Pieces:
    """Cut the given rows at multiples of `limit`; without `split` only the first piece of each stays."""
    chosen = documents.select(rows).with_format("arrow")
    parts: list[_Pieces] = []
    first = 0
    for block in blocks(chosen):
        parts.append(_cut_block(block, rows[first : first + len(block)], limit, split=split))
        first += len(block)
    return _Pieces(
        table=pa.concat_tables([part.table for part in parts]),
        parents=np.concatenate([part.parents for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        targets=np.concatenate([part.targets for part in parts]),
        starts=np.concatenate([part.starts for part in parts]),
    )


def _cut_block(block: pa.Table, rows: _Ints, limit: int, *, split: bool) -> _Pieces:
    lengths = list_lengths(block["input_ids"])
    counts = -(-lengths // limit)
    parent = np.repeat(np.arange(len(rows)), counts)
    starts = (np.arange(len(parent)) - (np.cumsum(counts) - counts)[parent]) * limit
    piece_lengths = np.minimum(limit, lengths[parent] - starts)
    pieces = pa.table({name: _recut(block[name], piece_lengths) for name in block.column_names})
    targets = piece_lengths - 1
    if "labels" in pieces.column_names:
        targets = _target_counts(values_of(pieces["labels"]), piece_lengths)
    keep = (targets > 0) & (split | (starts == 0))
    return _Pieces(
        table=pieces.filter(pa.array(keep)),
        parents=rows[parent[keep]],
        lengths=piece_lengths[keep],
        targets=targets[keep],
        starts=starts[keep],
    )


def _recut(column: pa.ChunkedArray, lengths: _Ints) -> pa.Array:
    """The values of a list column, in order, as lists of other lengths."""
    values = pa.concat_arrays([chunk.flatten() for chunk in column.chunks])
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    # 64-bit offsets: a block of very long documents may hold more than 2^31 tokens.
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def _assemble(documents: Dataset, keep: _Ints, pieces: _Pieces) -> Dataset:
    """Kept rows and pieces in the order of the dataset."""
    if pieces.table is None or not len(pieces.parents):
        return documents if len(keep) == len(documents) else documents.select(keep)
    from datasets import concatenate_datasets

    made = _as_dataset(documents, pieces)
    if len(keep):
        order = np.argsort(np.concatenate((keep, pieces.parents)), kind="stable")
        made = concatenate_datasets([documents.select(keep), made]).select(order)
    shown = documents.format
    return made.with_format(shown["type"], **shown["format_kwargs"])


def _as_dataset(documents: Dataset, pieces: _Pieces) -> Dataset:
    """Pieces as a dataset of the same features.

    Reads `_fingerprint` (datasets 5.2): without one the constructor hashes every token of the table.
    """
    from datasets import Dataset, DatasetInfo, Features, List

    assert pieces.table is not None
    # Lists of one fixed length are of many lengths once they are cut.
    fixed = {name for name, kind in documents.features.items() if isinstance(kind, List) and kind.length >= 0}
    features = Features(
        {name: List(kind.feature) if name in fixed else kind for name, kind in documents.features.items()}
    )
    source = hashlib.sha256(documents._fingerprint.encode())
    for part in (pieces.parents, pieces.starts, pieces.lengths):
        source.update(part.tobytes())
    return Dataset(
        pieces.table.cast(features.arrow_schema),
        info=DatasetInfo(features=features),
        fingerprint=source.hexdigest()[:16],
    )


def _report(
    lengths: _Ints,
    targets: _Ints,
    keep: _Ints,
    too_long: npt.NDArray[np.bool_],
    pieces: _Pieces,
    tokens_per_batch: int,
    overlong: str,
) -> DocumentReport:
    survivors = np.unique(pieces.parents)
    orphans = pieces.starts > 0
    real = int(lengths[keep].sum() + pieces.lengths.sum())
    found = int(lengths.sum())
    # Cut is what documents lose that stay; split ones lose only fragments without targets, which are dropped whole.
    cut = int(lengths[survivors].sum() - pieces.lengths.sum()) if overlong == "truncate" else 0
    # A document whose targets all lie behind the cut is one without targets, not a long one.
    cut_dry = int(too_long.sum()) - len(survivors) if overlong in ("split", "truncate") else 0
    return DocumentReport(
        tokens_per_batch=tokens_per_batch,
        overlong=overlong,
        documents_found=len(lengths),
        tokens_found=found,
        documents=len(keep) + len(pieces.parents),
        real_tokens=real,
        target_tokens=int(targets[keep].sum() + pieces.targets.sum()),
        empty_documents=int((lengths == 0).sum()),
        targetless_documents=int(((targets == 0) & (lengths > 0)).sum()) + cut_dry,
        overlong_documents=int(too_long.sum()) - cut_dry,
        dropped_documents=int(too_long.sum()) if overlong == "drop" else 0,
        dropped_tokens=found - real - cut,
        cut_tokens=cut,
        fragments=len(pieces.parents) if overlong == "split" else 0,
        orphan_fragments=int(orphans.sum()),
        orphan_tokens=int(pieces.lengths[orphans].sum()),
    )


def _refuse_targetless(lengths: _Ints, why: str) -> None:
    raise DatasetError(
        f"0 of {len(lengths):,} documents have targets",
        evidence=(f"{int((lengths == 0).sum()):,} are empty; of the others {why}",),
        mend="check the template's assistant mask and that answers lie within tokens_per_batch",
    )


def _refuse_overlong(lengths: _Ints, too_long: npt.NDArray[np.bool_], tokens_per_batch: int) -> None:
    count, longest = int(too_long.sum()), int(lengths[too_long].max())
    beyond = int((lengths[too_long] - tokens_per_batch).sum())
    raise PackingError(
        f"{count:,} of {len(lengths):,} documents are longer than a row of {tokens_per_batch:,} slots",
        evidence=(
            f"the longest has {longest:,} tokens; {beyond:,} tokens ({beyond / lengths.sum():.1%}) lie beyond the row",
        ),
        mend=f"tokens_per_batch={longest} fits them all",
        regardless='overlong="truncate" (cuts answers off), "split" (trains on answers without their question) or '
        '"drop"; each is counted',
    )
