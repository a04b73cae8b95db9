"""Where documents begin and end in a packed batch, read from its metadata and never from token values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from hf_speedkit.core.errors import PackingError

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True)
class Document:
    """A document's place in the row: positions `start` to `stop` (exclusive)."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Tokens of the document."""
        return self.stop - self.start


def packed_documents(batch: Mapping[str, object]) -> tuple[Document, ...]:
    """The segments of a packed row, a padding tail included.

    Args:
        batch: holds `cu_seq_lens_q` (int, [N + 1]) or `position_ids` (int, [1, T]); if both, they must agree.

    Returns:
        N documents in row order. Reading them costs a device synchronisation: call it at start-up, not per step.

    Raises:
        PackingError: no boundary metadata, or two sources that disagree.
    """
    from_lengths = _from_cu_seq_lens(batch)
    from_positions = _from_position_ids(batch)
    if from_lengths is None and from_positions is None:
        raise PackingError(
            "the batch says nothing about document boundaries",
            evidence=(f"keys: {', '.join(sorted(batch))}",),
            mend="collate with hf_speedkit.PackedCollator, which emits position_ids, cu_seq_lens_q/k and seq_idx",
        )
    if from_lengths is not None and from_positions is not None and from_lengths != from_positions:
        raise PackingError(
            "position_ids and cu_seq_lens_q describe different documents",
            evidence=(f"cu_seq_lens_q: {_starts(from_lengths)}", f"position_ids: {_starts(from_positions)}"),
            mend="restart position_ids in each document; boundaries must have one source of truth",
        )
    documents = from_lengths if from_lengths is not None else from_positions
    assert documents is not None
    return documents


def check_packed_batch(batch: Mapping[str, object], *, required: Sequence[str] = ()) -> tuple[Document, ...]:
    """Check that a batch is one packed row that states its boundaries once and completely.

    Args:
        batch: what the collator made; input_ids and labels int64 [1, T].
        required: further keys that the model's layers need (for example "seq_idx").

    Returns:
        The documents of the row.

    Raises:
        PackingError: more than one row, a mask beside boundaries, positions that do not restart, labels that score a
            document's first token, or a missing key. Flags such as `padding_free=True` are not looked at: only the
            batch that training would see counts.
    """
    if not isinstance(batch, Mapping):
        raise PackingError(
            f"a packed batch is a mapping of names to tensors, this one is a {type(batch).__name__}",
            mend="pass what hf_speedkit.PackedCollator returns",
        )
    input_ids = _tensor(batch, "input_ids")
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise PackingError(
            f"a packed batch is one row [1, slots], this one is {list(input_ids.shape)}",
            evidence=("kernels read document boundaries only from a single flattened row",),
            mend="collate with hf_speedkit.PackedCollator; concatenate the rows of a batch instead of stacking them",
        )
    if batch.get("attention_mask") is not None:
        raise PackingError(
            "the batch holds an attention_mask beside document boundaries",
            evidence=("an all-ones mask switches transformers' packed detection off: every document would be seen",),
            mend="drop attention_mask from packed batches",
        )
    _check_shapes(batch, tuple(input_ids.shape))
    missing = [key for key in ("position_ids", *required) if batch.get(key) is None]
    if missing:
        raise PackingError(
            f"the packed batch lacks {', '.join(missing)}",
            evidence=("without it a layer treats the row as one document",),
            mend="collate with hf_speedkit.PackedCollator",
        )
    documents = packed_documents(batch)
    _check_agreement(batch, documents)
    labels = batch.get("labels")
    if labels is not None:
        _check_labels(_tensor(batch, "labels"), documents)
    return documents


def _check_shapes(batch: Mapping[str, object], row: tuple[int, ...]) -> None:
    """Positions, labels and document numbers are one for each token."""
    for key in ("position_ids", "labels", "seq_idx"):
        shape = tuple(getattr(batch.get(key), "shape", row))
        if shape != row:
            axes = "packed detection reads [1, slots]; mRoPE models need a fourth, text axis: [4, 1, slots]"
            raise PackingError(
                f"{key} of shape {list(shape)} beside input_ids of shape {list(row)}",
                evidence=(axes,) if key == "position_ids" else (),
                mend=f"pass {key} as [1, slots], one value for each token",
            )


def _check_agreement(batch: Mapping[str, object], documents: tuple[Document, ...]) -> None:
    """The keys of keys, and the documents' numbers, draw the same borders: each kernel reads another one of them."""
    found = {"cu_seq_lens_k": _from_cu_seq_lens(batch, "cu_seq_lens_k"), "seq_idx": _from_seq_idx(batch)}
    for key, others in found.items():
        if others is not None and others != documents:
            raise PackingError(
                f"{key} and position_ids describe different documents",
                evidence=(f"{key}: {_starts(others)}", f"position_ids: {_starts(documents)}"),
                mend="collate with hf_speedkit.PackedCollator; boundaries must have one source of truth",
            )


def _check_labels(labels: torch.Tensor, documents: tuple[Document, ...]) -> None:
    starts = [document.start for document in documents if document.start]  # nothing stands before the row's first token
    scored = [start for start in starts if int(labels[0, start]) != IGNORE_INDEX]
    if scored:
        raise PackingError(
            f"labels score the first token of {len(scored)} of {len(documents)} documents",
            evidence=(f"row positions {scored[:5]}: each would be predicted from another document's last token",),
            mend=f"set labels to {IGNORE_INDEX} at every document's first token (PackedCollator does)",
        )


def _from_cu_seq_lens(batch: Mapping[str, object], key: str = "cu_seq_lens_q") -> tuple[Document, ...] | None:
    if batch.get(key) is None:
        return None
    edges = [int(edge) for edge in _tensor(batch, key).flatten().tolist()]
    slots = int(_tensor(batch, "input_ids").shape[-1])
    given = _tensor(batch, key)
    if given.ndim != 1 or not edges or edges[0] != 0 or edges[-1] != slots or any(a >= b for a, b in pairwise(edges)):
        raise PackingError(
            f"{key} must rise from 0 to the number of slots, in one axis",
            evidence=(f"got {edges[:3]} ... {edges[-2:]} of shape {list(given.shape)} for {slots} slots",),
            mend="collate with hf_speedkit.PackedCollator",
        )
    return tuple(Document(a, b) for a, b in pairwise(edges))


def _from_position_ids(batch: Mapping[str, object]) -> tuple[Document, ...] | None:
    if batch.get("position_ids") is None:
        return None
    positions = _tensor(batch, "position_ids")[0]
    # A new document is where the position does not follow its neighbour: any constant first position works (V14).
    return _cut_where(positions[1:] != positions[:-1] + 1)


def _from_seq_idx(batch: Mapping[str, object]) -> tuple[Document, ...] | None:
    if batch.get("seq_idx") is None:
        return None
    numbers = _tensor(batch, "seq_idx")[0]
    return _cut_where(numbers[1:] != numbers[:-1])


def _cut_where(breaks: torch.Tensor) -> tuple[Document, ...]:
    """Documents of a row from bool [T - 1]: whether the next token belongs to another one."""
    inner = (breaks.nonzero().flatten() + 1).tolist()
    return tuple(Document(a, b) for a, b in pairwise([0, *map(int, inner), len(breaks) + 1]))


def _tensor(batch: Mapping[str, object], key: str) -> torch.Tensor:
    import torch

    value = batch.get(key)
    if not isinstance(value, torch.Tensor):
        raise PackingError(
            f"the batch's {key} is {type(value).__name__}, expected a tensor",
            mend="collate with hf_speedkit.PackedCollator",
        )
    return value


def _starts(documents: tuple[Document, ...]) -> str:
    return f"{len(documents)} documents starting at {[document.start for document in documents[:8]]}"
