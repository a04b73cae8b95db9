"""What a packed stream needs to know about the `datasets.IterableDataset` behind it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_speedkit.core.errors import DatasetError


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
    parts = list(_parts(source))
    if not parts:
        return False
    return not any(
        type(part).__name__ == "BufferShuffledExamplesIterable" or getattr(part, "batched", False) for part in parts
    )


def shuffles_of(source: Any) -> str:
    """A checksum of the state of everything that draws an order in a stream; the same on ranks that see one order.

    `shuffle()` without a seed draws another order in every process. Private parts as above; a stream without them has
    the checksum of nothing.
    """
    states = [
        part.generator.bit_generator.state for part in _parts(source) if getattr(part, "generator", None) is not None
    ]
    return hashlib.sha256(repr(states).encode()).hexdigest()


def refuse_other_orders(ranks: Sequence[str]) -> None:
    """Refuse ranks that would share out one stream while each reads it in an order of its own.

    Args:
        ranks: `shuffles_of` every rank's stream, in rank order.

    Raises:
        DatasetError: they differ.
    """
    apart = [number for number, rank in enumerate(ranks) if rank != ranks[0]]
    if apart:
        raise DatasetError(
            f"{len(apart)} of {len(ranks)} ranks would read the stream in another order than rank 0: they share it out "
            "by position, so some documents would be trained on twice and others never",
            evidence=(f"rank {', '.join(map(str, apart[:8]))}: its shuffles have another state",),
            mend="dataset.shuffle(seed=42, buffer_size=...): the same seed on every rank",
        )


def _parts(source: Any) -> Iterator[Any]:
    """The chain of a stream, its end first."""
    parts = [getattr(source, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if part is not None:
            yield part
            inner = getattr(part, "ex_iterable", None)
            parts += [*([] if inner is None else [inner]), *(getattr(part, "ex_iterables", None) or ())]
