"""What a packed stream needs to know about the `datasets.IterableDataset` behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def share_of_rank(source: Any, *, rank: int, world_size: int) -> Any:
    """Take this rank's part of a streaming dataset, before anything is tokenized.

    Whole shards where their number divides by the ranks; else every rank reads all rows and keeps one in `world_size`.
    The second reads the data world_size times, but tokenizes each row once: `split_dataset_by_node` (datasets 5.2)
    would tokenize first and skip afterwards. A dataset that was split with it already is left alone.
    """
    if world_size == 1 or getattr(source, "_distributed", None) is not None:
        return source
    if source.num_shards % world_size == 0:
        return source.shard(num_shards=world_size, index=rank)
    return source.filter(_is_ours, with_indices=True, fn_kwargs={"rank": rank, "world_size": world_size})


def _is_ours(_row: Mapping[str, Any], index: int, rank: int, world_size: int) -> bool:
    return index % world_size == rank


def keeps_its_place(source: Any) -> bool:
    """Whether a source's `state_dict` says exactly where it stands.

    Reads private parts of datasets (checked against 5.2): the chain of `_ex_iterable`. A shuffle buffer is refilled
    with other rows, and behind a batched map a batch may be lost (iterable_dataset.py, `load_state_dict`). No chain at
    all counts as not exact, which costs time and no document.
    """
    parts = [getattr(source, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if part is None or type(part).__name__ == "BufferShuffledExamplesIterable" or getattr(part, "batched", False):
            return False
        inner = getattr(part, "ex_iterable", None)
        parts += [*([] if inner is None else [inner]), *(getattr(part, "ex_iterables", None) or ())]
    return True
