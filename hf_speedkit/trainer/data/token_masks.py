"""Masks that come with tokenized rows: 0 or 1 for each token.

TRL 1.16 makes labels of them by zip (sft_trainer.py:1425): of a mask that is longer than its row it leaves the end out,
wherever the mask was meant to begin, and any number but 0 counts as 1, so that weights become targets like all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

from hf_speedkit.core.errors import DatasetError
from hf_speedkit.packing.document_columns import blocks, list_lengths
from hf_speedkit.packing.row_rules import READ_MASKS
from hf_speedkit.trainer.data.conversation_checks import SAMPLE_ROWS

_MEND = "one 0 or 1 for each of input_ids, 1 where the token is a target; weights of tokens are read by nothing here"


def check_masks(dataset: Dataset, name: str) -> None:
    """Refuse masks that are not one 0 or 1 a token; lengths of all rows are looked at, numbers of the first hundred.

    Args:
        dataset: with input_ids.
        name: "train" or the name of an evaluation set, for messages.

    Raises:
        DatasetError: names the column and the rows.
    """
    columns = [column for column in READ_MASKS if column in dataset.column_names]
    if not columns or "labels" in dataset.column_names:  # labels of one's own are read alone
        return
    view = dataset.select_columns(["input_ids", *columns]).with_format("arrow")
    lengths = [[_lengths(block[column]) for column in ("input_ids", *columns)] for block in blocks(view)]
    tokens, *masks = (np.concatenate(parts) for parts in zip(*lengths, strict=True))
    for column, values in zip(columns, masks, strict=True):
        wrong = np.flatnonzero(values != tokens)
        if len(wrong):
            raise DatasetError(
                f'{len(wrong):,} rows of the {name} dataset have a "{column}" of another length than their tokens',
                evidence=(f"row {wrong[0]:,}: {tokens[wrong[0]]:,} input_ids, {values[wrong[0]]:,} values",),
                mend=_MEND,
            )
    for at, row in enumerate(view.with_format(None).select(range(min(SAMPLE_ROWS, len(view))))):
        fault = mask_fault(row)
        if fault is not None:
            raise DatasetError(f"row {at} of the {name} dataset {fault}", mend=_MEND)


def mask_fault(row: Mapping[str, Any]) -> str | None:
    """What is wrong with the masks of a tokenized row; None where they fit.

    Args:
        row: with input_ids.
    """
    tokens = len(row["input_ids"])
    for column in READ_MASKS if row.get("labels") is None else ():
        if column not in row:
            continue
        mask = row[column] if row[column] is not None else ()
        if len(mask) != tokens:
            return f'has {tokens:,} input_ids and {len(mask):,} values of "{column}"'
        odd = {value for value in mask if value not in (0, 1)}
        if odd:
            return f'has {min(odd, key=repr)!r} in its "{column}"'
    return None


def _lengths(column: pa.ChunkedArray) -> Any:
    """Values of each row; none where the column holds no lists."""
    lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    return list_lengths(column) if lists else np.zeros(len(column), dtype=np.int64)
