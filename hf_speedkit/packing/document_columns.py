"""The columns of a tokenized map-style dataset, read through arrow: what may be there, and how it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_speedkit.core.errors import DatasetError
from hf_speedkit.packing.row_rules import (
    OTHER_MASKS,
    PACKED_COLUMNS,
    READ_MASKS,
    Ints,
    refuse_axes,
    refuse_mask,
    refuse_media,
    refuse_packed_rows,
    refuse_positions,
)

if TYPE_CHECKING:
    from datasets import Dataset

# Rows read at once: 10 MB of token ids at 1,250 tokens each, so memory does not grow with the dataset.
BLOCK_ROWS = 1024


def token_columns(dataset: Dataset) -> Dataset:
    """The dataset with the columns that training reads; refuses what is not a tokenized map-style dataset.

    Raises:
        DatasetError: no dataset, no rows, no input_ids, columns that are no token ids, masks without labels.
        PackingError: rows that are padded, or packed already.
    """
    names = getattr(dataset, "column_names", None)
    if not hasattr(dataset, "select_columns") or not hasattr(dataset, "__len__") or isinstance(names, dict):
        raise DatasetError(
            f"a map-style datasets.Dataset is needed, got {type(dataset).__name__}",
            mend='pick a split (dataset["train"]); load streaming data without streaming=True',
        )
    if not names or "input_ids" not in names:
        raise DatasetError(
            "the dataset has no column input_ids",
            evidence=(f"its columns: {', '.join(names or ()) or 'none'}",),
            mend="tokenize it first; SpeedSFTTrainer does",
        )
    if not len(dataset):
        raise DatasetError("the dataset holds no documents", mend="check the split, the path and the filters")
    refuse_padded_or_packed(dataset)
    masks = [name for name in names if name in (*READ_MASKS, *OTHER_MASKS)]
    if masks and "labels" not in names:
        raise DatasetError(
            f"the dataset has {' and '.join(masks)} but no labels, and labels alone say what is a target",
            mend="add labels: input_ids, with -100 where a mask is 0; SpeedSFTTrainer does",
            regardless=f"dataset.remove_columns({masks}) makes every token a target",
        )
    documents = dataset.select_columns([name for name in ("input_ids", "labels") if name in names])
    refuse_other_columns(documents)
    return documents


def refuse_other_columns(documents: Dataset) -> None:
    """Refuse columns that are not lists of integers, before arrow or the first collated row does in its own words."""
    for name, kind in documents.features.items():
        if not is_integer_list(kind):
            raise DatasetError(
                f"{name} is {kind}, not a list of integers for each document",
                mend="tokenize first (SpeedSFTTrainer does), or cast the column to List(Value('int32'))",
            )


def is_integer_list(kind: Any) -> bool:
    """Whether a column's type is a list of integers; lists of null count, for there every document is empty."""
    item = getattr(getattr(kind, "feature", None), "dtype", "")
    return str(item).startswith(("int", "uint", "null"))


def blocks(view: Dataset) -> Iterator[pa.Table]:
    """An arrow-formatted dataset a block of rows at a time, index mappings followed."""
    for first in range(0, len(view), BLOCK_ROWS):
        yield view[first : first + BLOCK_ROWS]


def list_lengths(column: pa.ChunkedArray) -> Ints:
    """Entries of each list of a column; 0 for one that is null."""
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    return np.asarray(lengths.to_numpy(), dtype=np.int64)


def flat_values(column: pa.ChunkedArray) -> list[pa.Array]:
    """The values of a list column, one array a chunk; refuses values that are null."""
    # flatten() honours the offset of a slice; the child buffer behind it holds the whole table's values.
    parts = [chunk.flatten() for chunk in column.chunks]
    if any(part.null_count for part in parts):
        raise DatasetError("a document holds a token or label without a value", mend="filter such rows out")
    return parts


def values_of(column: pa.ChunkedArray) -> Any:
    """The values of a list column in one array."""
    arrays = [part.to_numpy(zero_copy_only=False) for part in flat_values(column)]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)


def refuse_padded_or_packed(dataset: Dataset) -> None:
    """Refuse a tokenized dataset whose other columns say that its rows are padded, or hold several documents.

    Raises:
        DatasetError, PackingError: name the column.

    Cost: one pass over attention_mask and position_ids, where there are any: 5 ns a token (one core).
    """
    names = dataset.column_names
    refuse_media(names)
    refuse_packed_rows(name for name in PACKED_COLUMNS if name in names and is_integer_list(dataset.features[name]))
    for name in ("attention_mask", "position_ids"):
        inner = getattr(dataset.features.get(name), "feature", None)
        if inner is None:
            continue  # not there, or no list: some other column that happens to have the name
        if getattr(inner, "feature", None) is not None:
            refuse_axes((3, -1))
        for block in blocks(dataset.select_columns([name]).with_format("arrow")):
            values = values_of(block[name])
            if name == "attention_mask":
                refuse_mask(values)
            else:
                refuse_positions(values, list_lengths(block[name]))
