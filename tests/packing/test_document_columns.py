"""Columns that are no token ids are refused before anything is packed, for whole datasets and for streams."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset

from hf_speedkit import PackedCollator
from hf_speedkit.core.errors import DatasetError, PackingError
from hf_speedkit.packing.documents import document_lengths, prepare_documents
from hf_speedkit.packing.row_rules import refuse_shifted_labels
from hf_speedkit.packing.stream_documents import no_documents, read_document

NOT_TOKENS = {
    "text": "abc",
    "one number": 3,
    "fractions": [1.5, 2.5],
    "words": ["1", "2"],
    "truth values": [True, False],
    "lists": [[1, 2], [3, 4]],
}


@pytest.mark.parametrize("column", ["input_ids", "labels"])
@pytest.mark.parametrize("value", NOT_TOKENS.values(), ids=NOT_TOKENS)
def test_a_column_that_holds_no_integers_is_refused(column: str, value: Any) -> None:
    rows = [{"input_ids": [1, 2], "labels": [1, 2], column: value}] * 2
    with pytest.raises(DatasetError, match=f"{column} is .*, not a list of integers"):
        prepare_documents(Dataset.from_list(rows), tokens_per_batch=8)
    with pytest.raises(DatasetError, match=f"{column} of a row of the stream are no list of integers"):
        read_document(rows[0], no_documents(8, "error"))


@pytest.mark.parametrize("value", [[1, None, 2], [[1, 2], [3]]], ids=["a gap", "lists of unequal length"])
def test_a_row_of_a_stream_with_gaps_or_uneven_lists_is_refused(value: Any) -> None:
    with pytest.raises(DatasetError, match="no list of integers"):
        read_document({"input_ids": value}, no_documents(8, "error"))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64])
def test_integers_of_every_width_are_tokens(dtype: type) -> None:
    (document,), _ = read_document({"input_ids": np.array([1, 2, 3], dtype)}, no_documents(8, "error"))
    assert document.input_ids.dtype == np.int64
    table = pa.table({"input_ids": pa.array([[1, 2, 3]], pa.list_(pa.from_numpy_dtype(dtype)))})
    assert prepare_documents(Dataset(table), tokens_per_batch=8)[1].real_tokens == 3


def test_a_row_that_is_a_table_is_refused() -> None:
    stream = Dataset.from_dict({"input_ids": [[1, 2]]}).to_iterable_dataset().with_format("arrow")
    with pytest.raises(DatasetError, match="a row of the stream is a Table"):
        read_document(next(iter(stream)), no_documents(8, "error"))


def test_a_token_without_a_value_is_refused_with_or_without_labels() -> None:
    with pytest.raises(DatasetError, match="without a value"):
        prepare_documents(Dataset.from_list([{"input_ids": [1, None, 2]}]), tokens_per_batch=8)


def test_labels_that_are_missing_everywhere_are_refused() -> None:
    with pytest.raises(DatasetError, match=r"labels is .*null"):
        prepare_documents(Dataset.from_dict({"input_ids": [[1, 2]], "labels": [None]}), tokens_per_batch=8)


def test_documents_that_are_all_empty_are_counted_and_not_taken_for_a_wrong_type() -> None:
    with pytest.raises(DatasetError, match="0 of 2 documents have targets"):
        prepare_documents(Dataset.from_dict({"input_ids": [[], []]}), tokens_per_batch=8)


def test_lengths_are_read_from_lists_of_integers_alone() -> None:
    with pytest.raises(DatasetError, match="not a list of integers"):
        document_lengths(Dataset.from_dict({"input_ids": ["abc"]}))


@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks", "loss_mask"])
def test_a_mask_without_labels_is_refused_rather_than_dropped(mask: str) -> None:
    rows = [{"input_ids": [1, 2, 3], mask: [0, 0, 1]}]
    with pytest.raises(DatasetError, match=f"has {mask} but no labels"):
        prepare_documents(Dataset.from_list(rows), tokens_per_batch=8)
    with pytest.raises(PackingError, match=f"has {mask} but no labels"):
        PackedCollator(0, 8)(rows)
    labelled = [{**rows[0], "labels": [-100, -100, 3]}]
    assert prepare_documents(Dataset.from_list(labelled), tokens_per_batch=8)[1].target_tokens == 1


PADDED = {"input_ids": [3, 4, 0], "labels": [3, 4, -100]}
SAYING_ELSE = {
    "padding on the right": ({"attention_mask": [1, 1, 0]}, PackingError, "attention_mask with zeros"),
    "padding on the left": ({"attention_mask": [0, 1, 1]}, PackingError, "attention_mask with zeros"),
    "documents by number in the mask": ({"attention_mask": [1, 1, 2]}, PackingError, "packed already"),
    "positions that restart": ({"position_ids": [0, 1, 0]}, PackingError, "do not count from 0"),
    "positions of three axes": ({"position_ids": [[0, 1, 2]] * 3}, PackingError, "packed detection reads"),
    "lengths of TRL": ({"seq_lengths": [2, 1]}, DatasetError, "packed already"),
    "boundaries of flash attention": ({"cu_seqlens": [0, 2, 3]}, DatasetError, "packed already"),
    "boundaries of the keys": ({"cu_seq_lens_k": [0, 2, 3]}, DatasetError, "packed already"),
    "numbers of documents": ({"seq_idx": [0, 0, 1]}, DatasetError, "packed already"),
    "an image": ({"pixel_values": [0.5, 0.5]}, PackingError, "tokens alone"),
}


@pytest.mark.parametrize(("columns", "error", "message"), SAYING_ELSE.values(), ids=SAYING_ELSE)
def test_v12_v13_v24_a_column_that_says_a_row_is_padded_or_packed_is_not_dropped(
    columns: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        prepare_documents(Dataset.from_list([PADDED | columns] * 2), tokens_per_batch=8)
    with pytest.raises(error, match=message):
        read_document(PADDED | columns, no_documents(8, "error"))
    if "seq_lengths" not in columns:  # by those a row says to the collator that it is packed
        for form in (list, np.asarray, torch.tensor):
            with pytest.raises(error, match=message):
                PackedCollator(0, 8)([PADDED | {name: form(values) for name, values in columns.items()}])


def test_columns_that_say_the_same_as_the_tokens_are_left_behind() -> None:
    row = PADDED | {"attention_mask": [True] * 3, "position_ids": [0, 1, 2], "segment_ids": "a name", "seq_idx": 7}
    assert prepare_documents(Dataset.from_list([row]), tokens_per_batch=8)[0].column_names == ["input_ids", "labels"]
    assert read_document(row, no_documents(8, "error"))[1].real_tokens == 3


@pytest.mark.parametrize(
    ("labels", "refused"),
    [
        ([4, 5, 6, 7, -100], True),
        ([-100, 5, 6, 7, -100], False),  # too few to tell
        ([3, 4, 5, 6, 7], False),
        ([9, 9, 9, 9, 9], False),
    ],
)
def test_v25_labels_that_are_shifted_already_are_told_by_their_values(labels: list[int], refused: bool) -> None:
    rows = [{"input_ids": [3, 4, 5, 6, 7], "labels": labels}]
    with pytest.raises(DatasetError, match="4 of 4 targets are the token after") if refused else nullcontext():
        refuse_shifted_labels(rows)
    refuse_shifted_labels([{"input_ids": [5] * 5, "labels": [5] * 5}, {"input_ids": [5, 6], "labels": None}])
