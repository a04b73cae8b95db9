"""What the columns beside input_ids may say about one row, the same for whole datasets, streams and the collator.

Rows are packed from input_ids and labels. A column that says something else about the same tokens (padding, documents
inside the row, another mask) must not be dropped without a word: the row would train on what the column takes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_speedkit.core.errors import DatasetError, PackingError
from hf_speedkit.packing.boundaries import IGNORE_INDEX

Ints = npt.NDArray[np.int64]

PACKED_COLUMNS = ("seq_lengths", "seq_lens", "sequence_lengths", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k",
                  "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "seq_start_id", "segment_ids",
                  "sequence_ids", "document_ids")  # fmt: skip
"""Columns by which packers of TRL, transformers, axolotl and others say where documents lie in a row."""

READ_MASKS = ("completion_mask", "assistant_masks")
"""Masks that TRL 1.16 makes labels of."""

OTHER_MASKS = ("loss_mask", "loss_masks", "assistant_mask", "assistant_tokens_mask", "completion_masks", "target_mask",
               "label_mask", "labels_mask", "response_mask", "prompt_mask", "train_mask")  # fmt: skip
"""Masks of other trainers, which nothing here reads."""

MEDIA = ("pixel_values", "image_grid", "image_sizes", "image_position", "video_grid", "input_features", "input_values",
         "audio_values", "feature_attention")  # fmt: skip
"""How columns of images, video and sound begin that transformers' processors make beside input_ids."""

_CUT_PADDING = (
    'dataset.map(lambda row: {key: [x for x, real in zip(row[key], row["attention_mask"]) if real] '
    'for key in ("input_ids", "labels", "attention_mask") if key in row})'
)
# Labels of a distilled or corrupted document may differ from its tokens; nobody's follow the tokens one slot behind.
_OWN_SHARE, _NEXT_SHARE, _FEWEST_TARGETS = 0.5, 0.95, 4


def lists_of(row: Mapping[str, Any], columns: Iterable[str]) -> list[str]:
    """The columns in which a row has several values: a list, an array or a tensor, and no number or text."""
    return [name for name in columns if hasattr(row.get(name), "__len__") and not isinstance(row[name], (str, bytes))]


def refuse_packed_rows(columns: Iterable[str]) -> None:
    """Refuse data whose columns say that its rows hold several documents.

    Raises:
        DatasetError: names the column.
    """
    found = sorted(set(PACKED_COLUMNS) & set(columns))
    if found:
        raise DatasetError(
            f"the dataset is packed already (it has a column {found[0]})",
            evidence=("its rows would be taken for documents, and their documents would see one another",),
            mend="pass the dataset as it was before packing",
        )


def refuse_mask(mask: npt.NDArray[Any]) -> None:
    """Refuse an attention mask that is not all ones: padding (0), or documents by number (2 and more).

    Args:
        mask: of one row or of many in a row.

    Raises:
        PackingError: all ones say nothing and may be dropped; anything else would be trained on.
    """
    mask = np.asarray(mask)
    if mask.size == 0 or (mask == 1).all():
        return
    if mask.astype(np.int64).max() > 1:
        raise PackingError(
            "a row has an attention_mask that numbers the documents in it: the row is packed already",
            evidence=("it would be taken for one document, and its documents would see one another",),
            mend="pass the dataset as it was before packing",
        )
    raise PackingError(
        "a row has an attention_mask with zeros, which nothing here reads",
        evidence=("its padding would be trained on as text, and shift the positions of what comes behind it",),
        mend=f"tokenize without padding (padding=False), or cut it off: {_CUT_PADDING}",
    )


def refuse_axes(shape: tuple[int, ...]) -> None:
    """Refuse position_ids of several axes.

    Raises:
        PackingError: they are those of a model for images and video.
    """
    if len(shape) != 1:
        raise PackingError(
            f"a row has position_ids of shape {list(shape)}",
            evidence=(
                "three axes (mRoPE) carry no document boundaries: packed detection reads [1, T], or [4, 1, T] with the "
                "text positions first",
            ),
            mend="drop the column for text-only data; packing images and video is not supported",
        )


def refuse_positions(given: npt.NDArray[Any], lengths: Ints, first_position: int = 0) -> None:
    """Refuse position_ids that do not count through each document.

    Args:
        given: positions of rows, one behind the other.
        lengths: tokens of each document in them.
        first_position: where each document counts from.

    Raises:
        PackingError: they restart inside a document, which is then several, or count from somewhere else.
    """
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    if not np.array_equal(given, np.arange(len(starts)) - starts + first_position):
        raise PackingError(
            f"a row brings position_ids that do not count from {first_position} in each document",
            evidence=(
                "where they restart inside a row, the row is packed already and would be taken for one document",
            ),
            mend="pass the dataset as it was before packing; else drop the column: positions are made from document "
            "lengths (or set first_position)",
        )


def refuse_media(columns: Iterable[str]) -> None:
    """Refuse rows that hold more than text: packed rows are tokens alone.

    Raises:
        PackingError: names the column.
    """
    found = sorted(name for name in map(str, columns) if name.startswith(MEDIA))
    if found:
        raise PackingError(
            f"a row has {found[0]}, and packed rows are tokens alone",
            evidence=("its placeholder tokens would be trained on without the image or sound they stand for",),
            mend="train data of images, video or sound with packing=False, or drop the column for text-only data",
        )


def refuse_row(row: Mapping[str, Any], lengths: Ints, first_position: int = 0) -> None:
    """Refuse a row whose attention_mask or position_ids say something else than its tokens and lengths, or whose mask
    nobody has made labels of.

    Raises:
        PackingError: as `refuse_mask`, `refuse_axes` and `refuse_positions`; a mask without labels, or of another
            length; a row of an image or of sound.
    """
    masks = [name for name in (*READ_MASKS, *OTHER_MASKS) if row.get(name) is not None]
    if masks and row.get("labels") is None:
        raise PackingError(
            f"a row has {masks[0]} but no labels, and labels alone say what is a target",
            mend="add labels: input_ids, with -100 where the mask is 0; SpeedSFTTrainer does",
        )
    refuse_media(name for name, value in row.items() if value is not None)
    if row.get("attention_mask") is not None:
        mask = np.asarray(row["attention_mask"])
        if mask.size not in (0, lengths.sum()):
            raise PackingError(
                f"a document has {lengths.sum()} input_ids and an attention_mask of shape {list(mask.shape)}",
                mend="drop the column: attention is causal inside each document, and nothing is padded",
            )
        refuse_mask(mask)
    if row.get("position_ids") is not None:
        positions = np.asarray(row["position_ids"])
        refuse_axes(positions.shape)
        refuse_positions(positions, lengths, first_position)


def refuse_shifted_labels(rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuse labels that are shifted already: they would be shifted once more, and the model taught to skip a token.

    Args:
        rows: some documents, input_ids and labels each.

    Raises:
        DatasetError: nearly all targets are the token after their own.
    """
    targets = own = following = 0
    for row in rows:
        if row.get("labels") is None:
            continue
        ids, labels = np.asarray(row["input_ids"]), np.asarray(row["labels"])
        if len(ids) < 2 or len(ids) != len(labels):
            continue
        is_target = labels[:-1] != IGNORE_INDEX
        targets += int(is_target.sum())
        own += int((is_target & (labels[:-1] == ids[:-1])).sum())
        following += int((is_target & (labels[:-1] == ids[1:])).sum())
    if targets >= _FEWEST_TARGETS and own < _OWN_SHARE * targets and following > _NEXT_SHARE * targets:
        raise DatasetError(
            f"labels are shifted already: {following} of {targets} targets are the token after their own",
            evidence=("the loss shifts them once more, so the model would learn to leave out every second token",),
            mend="leave labels where their tokens are: labels = input_ids, -100 where a token is no target",
        )
