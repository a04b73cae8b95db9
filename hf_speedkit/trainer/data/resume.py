"""A resumed run sees the documents the saved one would have seen, or it does not start.

The Trainer skips as many batches as the saved run took, whatever is in them now: with other data or other packing some
documents would be trained on twice and others never.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_speedkit.core.errors import PackingError
from hf_speedkit.packing.documents import document_lengths

if TYPE_CHECKING:
    from transformers import TrainerState

    from hf_speedkit.packing.sampler import PackedBatchSampler

logger = logging.getLogger(__name__)

# In TrainerState.stateful_callbacks, like the token totals (see metrics/saved_totals.py).
ORDER_KEY = "hf_speedkit.order"
DATA_KEY = "hf_speedkit.documents"
ROWS_KEY = "hf_speedkit.rows"
PACKED, PADDED, STREAMED = "packed rows", "padded batches", "rows packed from a stream"
_SAMPLED_DOCUMENTS = 64
GO_ON = "ignore_data_skip=True goes on from the saved weights and begins the documents anew"


def padded_order(args: Any, dataset: Any) -> dict[str, object] | None:
    """What fixes the order of documents that are not packed; None for a stream, or rows that are not tokenized yet.

    Args:
        args: the TrainingArguments.
        dataset: the training data.
    """
    if not hasattr(dataset, "__len__") or "input_ids" not in (getattr(dataset, "column_names", None) or ()):
        return None
    return {
        "packing": False,
        "documents": len(dataset),
        "documents_per_step": args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps,
        "seed": args.data_seed if args.data_seed is not None else args.seed,
        "train_sampling_strategy": str(args.train_sampling_strategy),
    }


def compare_documents(
    state: TrainerState,
    sampler: PackedBatchSampler | None,
    dataset: Any,
    *,
    ignore: bool,
    streamed: bool = False,
    padded: dict[str, object] | None = None,
) -> None:
    """Refuse a resume that would see other documents or another order, and note this run's for its checkpoints.

    Args:
        state: the Trainer's state, as the checkpoint left it; nothing is compared at step 0.
        sampler: this run's sampler; None where documents are not packed by one.
        dataset: its documents.
        padded: `padded_order`, where documents are not packed.
        ignore: the user asked to start the data anew (`ignore_data_skip`).
        streamed: rows are packed from a stream, whose place the checkpoint holds elsewhere.

    Raises:
        PackingError: names what differs, how to mend it and how to go on.
    """
    rows = STREAMED if streamed else PADDED if sampler is None else PACKED
    saved_rows = state.stateful_callbacks.get(ROWS_KEY, PACKED if ORDER_KEY in state.stateful_callbacks else rows)
    if state.global_step and not ignore and saved_rows != rows:
        raise PackingError(
            f"the saved run trained on {saved_rows}, this one would on {rows}: batches would be skipped that hold "
            "other documents",
            mend="resume with packing and data as they were",
            regardless=GO_ON,
        )
    state.stateful_callbacks[ROWS_KEY] = rows
    if sampler is None and padded is None:
        for key in (ORDER_KEY, DATA_KEY):
            state.stateful_callbacks.pop(key, None)
        return
    document_sample = digest(dataset[index] for index in sampled(len(dataset)))
    saved = state.stateful_callbacks.get(ORDER_KEY)
    if state.global_step and not ignore:
        if isinstance(saved, dict):
            _compare_order(saved, sampler, padded)
            refuse_other_documents(state.stateful_callbacks.get(DATA_KEY), document_sample)
        else:
            logger.warning(
                "the checkpoint is another trainer's and does not say which documents it has seen: as many batches are "
                "skipped as it took, which is right with its data, seed and number of processes"
            )
    state.stateful_callbacks[ORDER_KEY] = padded if sampler is None else sampler.state_dict()
    state.stateful_callbacks[DATA_KEY] = document_sample


def refuse_foreign_rows(checkpoint: Path, *, rows: str, batch_size: int, ignore: bool) -> None:
    """Refuse to go on in the data of a run that another trainer saved, where its steps held other documents.

    Weights, optimizer and schedule of TRL's or transformers' trainer are what they are here, and with padded batches so
    is the order, which follows from data, seed and batch size. Where rows are packed here, a step of the saved run held
    other documents: skipping as many would leave some out and repeat others, and the schedule would stand at a step of
    another number of steps.

    Args:
        checkpoint: to go on from.
        rows: what this run trains on.
        batch_size: documents of a padded batch on one device, in this run.
        ignore: the user asked to start the data anew (`ignore_data_skip`).

    Raises:
        PackingError: names the ways to use its weights.
    """
    saved = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    noted = saved.get("stateful_callbacks") or {}
    if ignore or not saved.get("global_step") or ROWS_KEY in noted or ORDER_KEY in noted:
        return
    if rows != PADDED:
        of = f" of {saved['max_steps']}" if saved.get("max_steps") else ""
        raise PackingError(
            f"{checkpoint} was written by another trainer, and this run would go on in {rows}",
            evidence=(
                f"its step {saved['global_step']}{of} held other documents than a step here: skipping as many would "
                "leave some out and repeat others, and the learning rate would be that of another place in the run",
            ),
            mend=f"start a new run from its weights: model_name_or_path={checkpoint}, in another output_dir",
            regardless=f"{GO_ON}, at the same step number",
        )
    size = saved.get("train_batch_size")
    if size not in (None, batch_size):
        raise PackingError(
            f"{checkpoint} was written by another trainer with batches of {size} documents a device; here they have "
            f"{batch_size}",
            mend=f"per_device_train_batch_size={size}",
            regardless=GO_ON,
        )


def _compare_order(
    saved: dict[str, object], sampler: PackedBatchSampler | None, padded: dict[str, object] | None
) -> None:
    if sampler is not None:
        sampler.load_state_dict(saved)
        return
    changed = [(name, saved.get(name), now) for name, now in (padded or {}).items() if saved.get(name) != now]
    if changed:
        raise PackingError(
            "the resumed run would see its documents in another order",
            evidence=tuple(f"{name}: saved {before!r}, now {now!r}" for name, before, now in changed),
            mend="resume with the settings and data of the saved run",
            regardless=GO_ON,
        )


def refuse_other_documents(saved: object, now: str) -> None:
    """Refuse documents that are not those of the saved run; without a saved digest nothing is compared.

    Raises:
        PackingError: they differ.
    """
    if saved is not None and saved != now:
        raise PackingError(
            "the resumed run would train on other documents",
            evidence=("a sample of them was compared: tokens or targets differ",),
            mend="resume with the data, chat template and masks of the saved run",
            regardless=GO_ON,
        )


def data_of_rank(state: TrainerState, evaluation: Any) -> dict[str, str]:
    """A checksum of what this rank trains on and one of each evaluation set; streams and untokenized rows have none.

    Args:
        state: the Trainer's, behind `compare_documents`.
        evaluation: the Trainer's evaluation data: one set, several by name, or None.
    """
    noted = [state.stateful_callbacks.get(key) for key in (ORDER_KEY, DATA_KEY)]
    found = {"the training data": hashlib.sha256(repr(noted).encode()).hexdigest()}
    sets = evaluation if isinstance(evaluation, Mapping) else {"": evaluation}
    for name, dataset in sets.items():
        if hasattr(dataset, "__len__") and "input_ids" in (getattr(dataset, "column_names", None) or ()):
            lengths = hashlib.sha256(document_lengths(dataset).tobytes()).hexdigest()
            words = digest(dataset[index] for index in sampled(len(dataset)))
            found[f"the evaluation data {name}".rstrip()] = lengths + words
    return found


def refuse_ranks_apart(ranks: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks whose data differ: documents would be lost or seen twice, and the ranks run out at different steps.

    Args:
        ranks: `data_of_rank` of every rank, in rank order, the same on all of them.

    Raises:
        PackingError: with the ranks that differ from rank 0.
    """
    for what in {name: None for rank in ranks for name in rank}:
        apart = [number for number, rank in enumerate(ranks) if rank.get(what) != ranks[0].get(what)]
        if apart:
            raise PackingError(
                f"{len(apart)} of {len(ranks)} ranks have other documents than rank 0 in {what}",
                evidence=(f"rank {', '.join(map(str, apart[:8]))}: lengths, tokens or targets differ",),
                mend="give every rank the same documents in the same order; the trainer shares them out itself "
                "(a filter that draws at random needs a seed)",
            )


def sampled(count: int) -> list[int]:
    """Up to 64 indices, evenly spaced over `count` documents."""
    return sorted({int(index) for index in np.linspace(0, count - 1, num=min(count, _SAMPLED_DOCUMENTS))})


def digest(documents: Iterable[Mapping[str, Any]]) -> str:
    """A checksum of documents' tokens and labels."""
    found = hashlib.sha256()
    for document in documents:
        for column in ("input_ids", "labels"):
            values = np.asarray(document.get(column, ()), dtype=np.int64)
            found.update(len(values).to_bytes(8, "little") + values.tobytes())
    return found.hexdigest()
