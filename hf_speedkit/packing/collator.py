"""Documents in, one row of a fixed shape out, with every key that says where documents begin and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_speedkit.core.errors import PackingError
from hf_speedkit.core.flops import pairs_in_window
from hf_speedkit.core.records import TokenCounts
from hf_speedkit.packing.boundaries import IGNORE_INDEX
from hf_speedkit.packing.row_rules import PACKED_COLUMNS, lists_of, refuse_packed_rows, refuse_row

_Ints = npt.NDArray[np.int64]

# Flash kernels take 64 to 128 queries a block: smaller bounds would start no fewer blocks, only be more values.
_SHORTEST_BOUND = 128


@dataclass(frozen=True, slots=True)
class PackedCollator:
    """Turns the documents of one pack into one row [1, tokens_per_batch], whatever their number and lengths.

    Boundaries come from lengths, never from token values: neither an end-of-turn token inside a document nor a pad id
    that equals the eos id changes anything. The empty rest of a row is ONE trailing document of padding: positions that
    are all 0 would make each of its slots a document, with a 64-token chunk and an attention sequence of its own.

    Args:
        pad_token_id: fills the rest of the row.
        tokens_per_batch: slots of the row, T below.
        chunk_size: tokens of a chunk of flash-linear-attention's gated delta rule; None leaves chunk_indices out.
        first_position: position of every document's first token (some models do not count from 0).
        target_positions: also say which slots precede a target, for a model with `trainer.step.loss_head`.
        sliding_window: the model's, for counting the pairs inside it (FLOPs); None where it has none.
        longest_segment: where positions of the empty rest of a row matter, slots of its longest piece: a model's
            learned positions, or those up to which a rotary embedding of the row's largest position stays as it is.
        vocabulary: rows of the model's embedding, where the ids of each row are to be looked at (20 us for 8,192
            slots); None where they were looked at before. On a GPU an unknown id ends in a device-side assert.

    Raises:
        PackingError: a setting that cannot work; on a call, rows that do not fit or that are not documents.
    """

    pad_token_id: int
    tokens_per_batch: int
    chunk_size: int | None = field(default=64, kw_only=True)
    first_position: int = field(default=0, kw_only=True)
    target_positions: bool = field(default=False, kw_only=True)
    sliding_window: int | None = field(default=None, kw_only=True)
    longest_segment: int | None = field(default=None, kw_only=True)
    vocabulary: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not _is_int(self.pad_token_id) or self.pad_token_id < 0:
            raise PackingError(
                f"pad_token_id={self.pad_token_id!r} is not a token",
                mend="set tokenizer.pad_token = tokenizer.eos_token if the tokenizer has none; no count depends on it",
            )
        for name, least in (("tokens_per_batch", 1), ("chunk_size", 1), ("first_position", 0)):
            value = getattr(self, name)
            if not (_is_int(value) and value >= least) and not (name == "chunk_size" and value is None):
                raise PackingError(f"{name}={value!r} cannot be used", mend=f"{name} is a whole number >= {least}")

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate documents into one row.

        Args:
            rows: one document each: `input_ids` and, if not every token is a target, `labels` of the same length and
                not shifted; lists, numpy arrays or tensors. A row that is itself packed says so by `seq_lengths`, the
                lengths of its documents: a column that a Trainer drops unless `attach` was called, or
                remove_unused_columns=False. No rows make a row of padding without targets; rows without tokens are
                left out.

        Returns:
            input_ids, labels, position_ids: int64 [1, T]. Labels are not shifted; they are -100 at the first token of
                every document (it would be predicted from the document before it) and on padding.
            seq_idx: int32 [1, T], number of the document of each slot.
            cu_seq_lens_q, cu_seq_lens_k: int32 [N + 1], where documents start; the last entry is T.
            max_length_q, max_length_k: int, an upper bound of the longest document, see `_length_bound`.
            chunk_indices: int32 [C, 2], document and chunk-in-document of each chunk, C = sum of ceil(length / chunk).
                With it flash-linear-attention 0.6 does not stop for the host (else ops/utils/index.py does, once a
                forward pass).
            target_positions: int64 [targets], only if asked for: slot t whose next slot t + 1 is a target.
            token_counts: TokenCounts of Python ints; take it out of the batch before the model's forward.
            There is no attention_mask: with one, transformers and fla derive boundaries anew and get them wrong.

        Raises:
            PackingError: more tokens than slots, no input_ids, labels of another length, masked tokens, position_ids of
                three axes or that disagree with the lengths.

        Cost: no loop over tokens. 7 documents in 8,192 slots take 0.1 ms of a core as arrays or tensors, 0.3 ms as
        lists (benchmarks/results/host_costs.json).
        """
        tokens, labels, lengths = [], [], []
        for row in rows:
            row_tokens = _column(row, "input_ids")
            row_labels = row_tokens if row.get("labels") is None else _column(row, "labels")
            if len(row_labels) != len(row_tokens):
                raise PackingError(
                    f"a document has {len(row_tokens)} input_ids and {len(row_labels)} labels",
                    mend="give each token a label, -100 where it is no target; do not shift them",
                )
            row_lengths = _document_lengths(row, len(row_tokens))
            refuse_packed_rows(lists_of(row, PACKED_COLUMNS[1:]))
            refuse_row(row, row_lengths, self.first_position)
            tokens.append(row_tokens)
            labels.append(row_labels)
            lengths.append(row_lengths)
        return self._row(_joined(tokens), _joined(labels), _joined(lengths))

    def _row(self, tokens: _Ints, labels: _Ints, lengths: _Ints) -> dict[str, Any]:
        slots, real = self.tokens_per_batch, len(tokens)
        if real > slots:
            raise PackingError(
                f"{len(lengths)} documents hold {real:,} tokens, the row has {slots:,} slots",
                mend="collate the packs of a PackedBatchSampler with the same tokens_per_batch",
            )
        if self.vocabulary is not None:
            _refuse_unknown(tokens, "token id", self.vocabulary)
            _refuse_unknown(labels[labels != IGNORE_INDEX], "label", self.vocabulary)
        segments = np.append(lengths, self._padding(slots - real))
        edges = np.concatenate(([0], np.cumsum(segments)))
        number = np.repeat(np.arange(len(segments)), segments)
        row_tokens = np.full(slots, self.pad_token_id, dtype=np.int64)
        row_tokens[:real] = tokens
        row_labels = np.full(slots, IGNORE_INDEX, dtype=np.int64)
        row_labels[:real] = labels
        row_labels[edges[:-1]] = IGNORE_INDEX
        bound = _length_bound(int(segments.max()), slots)
        batch: dict[str, Any] = {
            "input_ids": _tensor(row_tokens[None]),
            "labels": _tensor(row_labels[None]),
            "position_ids": _tensor((np.arange(slots) - edges[number] + self.first_position)[None]),
            "seq_idx": _tensor(number[None].astype(np.int32)),
            "cu_seq_lens_q": _tensor(edges.astype(np.int32)),
            "cu_seq_lens_k": _tensor(edges.astype(np.int32)),
            "max_length_q": bound,
            "max_length_k": bound,
        }
        if self.chunk_size is not None:
            batch["chunk_indices"] = _tensor(_chunk_indices(segments, self.chunk_size))
        targets = np.flatnonzero(row_labels != IGNORE_INDEX)  # never slot 0: a document's first token is none
        if self.target_positions:
            batch["target_positions"] = _tensor(targets - 1)
        batch["token_counts"] = TokenCounts(
            slots=slots,
            real=real,
            target=len(targets),
            documents=len(lengths),
            squared_lengths=int(np.square(lengths).sum()),
            window_pairs=self._pairs_in_window(lengths),
        )
        return batch

    def _padding(self, slots: int) -> _Ints:
        """Lengths of the segments of padding: one, or as many as learned positions make of it."""
        longest = self.longest_segment or max(slots, 1)
        whole, rest = divmod(slots, longest)
        return np.asarray([longest] * whole + [rest] * (rest > 0), dtype=np.int64)

    def _pairs_in_window(self, lengths: _Ints) -> int | None:
        if self.sliding_window is None:
            return None
        return int(sum(pairs_in_window(length, self.sliding_window) for length in lengths.tolist()))


def _length_bound(longest: int, slots: int) -> int:
    """The next power of two, at least 128 and at most the row: what attention kernels get as their longest sequence.

    They size their grid by it, so any upper bound is right. The exact length is another integer nearly every step:
    torch.compile guards on it, and flash attention may split long sequences by it, which changes the order of summation
    (torch 2.13, nn/attention/varlen.py, `num_splits`). tokens_per_batch would be constant, but starts a grid as long as
    the row for every document, nearly all of it with nothing to do where documents are short. Powers of two are few
    (7 for 8,192 slots) and at most twice too long. What either costs on a GPU has not been measured.
    """
    return min(slots, max(_SHORTEST_BOUND, 1 << (longest - 1).bit_length()))


def _chunk_indices(segments: _Ints, chunk_size: int) -> npt.NDArray[np.int32]:
    chunks = -(-segments // chunk_size)
    document = np.repeat(np.arange(len(segments)), chunks)
    first = np.cumsum(chunks) - chunks
    return np.stack((document, np.arange(len(document)) - first[document]), axis=1).astype(np.int32)


def _column(row: Mapping[str, Any], name: str) -> _Ints:
    """A column of one row as int64 [tokens]."""
    if not isinstance(row, Mapping):
        raise PackingError(
            f"a row is a {type(row).__name__}, not a document",
            mend='pass a list of documents, {"input_ids": [...]} each',
        )
    value = row.get(name)
    if value is None:
        raise PackingError(
            f"a row has no {name}",
            evidence=(f"its columns: {', '.join(sorted(map(str, row))) or 'none'}",),
            mend="tokenize first; SpeedSFTTrainer does, and keeps input_ids and labels",
        )
    try:
        column = np.asarray(value)
    except ValueError:  # lists of unequal length inside it
        column = np.empty((len(value), 2), dtype=object)
    if column.size == 0:
        return np.zeros(0, dtype=np.int64)
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise PackingError(
            f"{name} of a row is {column.dtype} of shape {list(column.shape)}",
            mend="pass the token ids of one document, integers of shape [tokens]",
        )
    return column.astype(np.int64, copy=False)


def _document_lengths(row: Mapping[str, Any], tokens: int) -> _Ints:
    """Lengths of the documents of a row: one, unless the row says that it is packed already."""
    if row.get("seq_lengths") is None:
        return np.full(int(tokens > 0), tokens, dtype=np.int64)
    lengths = _column(row, "seq_lengths")
    if lengths.sum() != tokens or (lengths < 1).any():
        raise PackingError(
            f"seq_lengths of a packed row add up to {lengths.sum()}, it has {tokens} tokens",
            evidence=(f"seq_lengths: {lengths[:8]}",),
            mend="pack again; seq_lengths are the lengths of a row's documents, each at least 1",
        )
    return lengths


def _refuse_unknown(ids: _Ints, what: str, vocabulary: int) -> None:
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        wrong = int(ids.max()) if int(ids.max()) >= vocabulary else int(ids.min())
        raise PackingError(
            f"a document has {what} {wrong}, and the model's embedding has {vocabulary} rows",
            mend="tokenize with the model's own tokenizer, or model.resize_token_embeddings(len(tokenizer))",
        )


def _joined(parts: list[_Ints]) -> _Ints:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _tensor(values: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
