"""Documents of a streaming dataset, one at a time: checked, cut and counted as `documents.prepare_documents` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_speedkit.core.document_records import DocumentReport
from hf_speedkit.core.errors import DatasetError, PackingError
from hf_speedkit.packing.boundaries import IGNORE_INDEX
from hf_speedkit.packing.row_rules import PACKED_COLUMNS, lists_of, refuse_packed_rows, refuse_row

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StreamDocument:
    """A document to train on: token ids and labels, int64 [tokens]; labels are -100 where a token is no target."""

    input_ids: _Ints
    labels: _Ints

    def as_row(self) -> dict[str, _Ints]:
        """The columns that a collator reads."""
        return {"input_ids": self.input_ids, "labels": self.labels}


def no_documents(tokens_per_batch: int, overlong: str) -> DocumentReport:
    """The report before anything was read."""
    return DocumentReport(
        tokens_per_batch=tokens_per_batch,
        overlong=overlong,
        documents_found=0,
        tokens_found=0,
        documents=0,
        real_tokens=0,
        target_tokens=0,
    )


def add_counts(report: DocumentReport, **counts: int) -> DocumentReport:
    """The report with counts added to its fields."""
    return replace(report, **{name: getattr(report, name) + count for name, count in counts.items()})


COUNT_FIELDS = tuple(
    field.name for field in fields(DocumentReport) if field.name not in {"tokens_per_batch", "overlong"}
)
"""The fields of a report that add up over parts of a dataset."""


def read_document(row: Mapping[str, Any], report: DocumentReport) -> tuple[tuple[StreamDocument, ...], DocumentReport]:
    """What becomes of one row of a stream.

    Args:
        row: `input_ids` and, unless every token is a target, `labels` of the same length, not shifted. Other columns
            are left behind, except that one may not say that the row is padded or packed (see row_rules).
        report: what was counted so far; says the slots of a row and what to do with longer documents.

    Returns:
        The documents to train on (none, one, or the pieces of a split one) and the report with this row in it.

    Raises:
        DatasetError: no input_ids, something else than token ids in them, or labels of another length.
        PackingError: a document longer than a row under "error"; a row that is padded or packed already.
    """
    document = _document(row)
    length = len(document.input_ids)
    report = add_counts(report, documents_found=1, tokens_found=length)
    if not length:
        return (), add_counts(report, empty_documents=1)
    if not _targets(document):
        return (), add_counts(report, targetless_documents=1, dropped_tokens=length)
    if length <= report.tokens_per_batch:
        return (document,), _kept(report, document)
    if report.overlong == "error":
        raise PackingError(
            f"document {report.documents_found:,} of the stream has {length:,} tokens, a row has "
            f"{report.tokens_per_batch:,} slots",
            evidence=(f"{report.documents:,} documents before it fitted",),
            mend=f"tokens_per_batch={length} fits this one",
            regardless='overlong="truncate" (cuts answers off), "split" (trains on answers without their question) or '
            '"drop"; each is counted',
        )
    if report.overlong == "drop":
        return (), add_counts(report, overlong_documents=1, dropped_documents=1, dropped_tokens=length)
    return _cut(document, report)


def _document(row: Mapping[str, Any]) -> StreamDocument:
    if not isinstance(row, Mapping):
        raise DatasetError(
            f"a row of the stream is a {type(row).__name__}",
            mend="stream.with_format(None): rows are dictionaries, not tables",
        )
    if row.get("input_ids") is None:
        raise DatasetError(
            "a row of the stream has no input_ids",
            evidence=(f"its columns: {', '.join(sorted(map(str, row))) or 'none'}",),
            mend="tokenize first; SpeedSFTTrainer does",
        )
    ids = _integers(row, "input_ids")
    labels = ids if row.get("labels") is None else _integers(row, "labels")
    if len(ids) != len(labels):
        raise DatasetError(
            f"a document of the stream has {len(ids)} input_ids and {len(labels)} labels",
            mend="give each token a label, -100 where it is no target; do not shift them",
        )
    refuse_packed_rows(lists_of(row, PACKED_COLUMNS))
    refuse_row(row, np.asarray([len(ids)]))
    return StreamDocument(ids, labels)


def _integers(row: Mapping[str, Any], name: str) -> _Ints:
    """A column of one row, int64 [tokens]; numbers with a fraction and text are refused, not rounded or parsed."""
    try:
        values = np.asarray(row[name])
    except ValueError:  # lists of unequal length
        values = np.zeros((1, 1))
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise DatasetError(
            f"{name} of a row of the stream are no list of integers",
            evidence=(f"found {str(row[name])[:80]}",),
            mend="tokenize first; SpeedSFTTrainer does",
        )
    return values.astype(np.int64, copy=False)


def _cut(document: StreamDocument, report: DocumentReport) -> tuple[tuple[StreamDocument, ...], DocumentReport]:
    limit, length = report.tokens_per_batch, len(document.input_ids)
    starts = range(0, length if report.overlong == "split" else 1, limit)
    pieces = [(start, piece) for start, piece in _pieces(document, starts, limit) if _targets(piece)]
    if not pieces:
        # All of its targets lie behind the cut: a document without targets, not a long one.
        return (), add_counts(report, targetless_documents=1, dropped_tokens=length)
    report = add_counts(report, overlong_documents=1)
    lost = length - sum(len(piece.input_ids) for _, piece in pieces)
    if report.overlong == "truncate":
        report = add_counts(report, cut_tokens=lost)
    else:
        orphans = [len(piece.input_ids) for start, piece in pieces if start]
        report = add_counts(
            report,
            dropped_tokens=lost,
            fragments=len(pieces),
            orphan_fragments=len(orphans),
            orphan_tokens=sum(orphans),
        )
    for _, piece in pieces:
        report = _kept(report, piece)
    return tuple(piece for _, piece in pieces), report


def _pieces(document: StreamDocument, starts: range, limit: int) -> Iterator[tuple[int, StreamDocument]]:
    for start in starts:
        part = slice(start, start + limit)
        yield start, StreamDocument(document.input_ids[part], document.labels[part])


def _kept(report: DocumentReport, document: StreamDocument) -> DocumentReport:
    return add_counts(report, documents=1, real_tokens=len(document.input_ids), target_tokens=_targets(document))


def _targets(document: StreamDocument) -> int:
    """Labels that enter the loss: the first token of a document never does."""
    return int(np.count_nonzero(document.labels[1:] != IGNORE_INDEX))
