"""Documents and the positions that a model has: where they end, and where a row's longest document decides for all."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from datasets import Dataset

from hf_speedkit.core.errors import DatasetError, PackingError
from hf_speedkit.packing.documents import document_lengths
from hf_speedkit.trainer.adapters import below_adapters

logger = logging.getLogger(__name__)

# Names of embeddings of positions in transformers 5.23: GPT-2 and its kin; OPT, BART and theirs; BERT's.
_NAMES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "pos_embed")


def learned_positions(model: Any) -> int | None:
    """Positions that a model has an embedding for; None where positions are computed (rotary, ALiBi, none).

    Args:
        model: the transformers model, a PEFT wrapper is fine. Of one for images only the language model is looked at:
            a vision tower's embeddings are of patches.
    """
    embedding = _embedding(model)
    if embedding is None:
        return None
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    rows = int(embedding.weight.shape[0])
    return min(rows, int(stated or rows)) - first_position(model)


def first_position(model: Any) -> int:
    """Where a model's own positions begin: behind that of padding in RoBERTa and its kin, else at 0 (V14).

    Args:
        model: as for `learned_positions`.
    """
    padding = getattr(_embedding(model), "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


def _embedding(model: Any) -> torch.nn.Embedding | None:
    base = below_adapters(model)
    decoder = base if model.config.get_text_config() is model.config else base.get_decoder()
    for name, module in decoder.named_modules():
        if isinstance(module, torch.nn.Embedding) and name.rpartition(".")[2] in _NAMES:
            return module
    return None


def shared_positions(config: Any) -> tuple[str, int] | None:
    """The kind of rotary embedding whose frequencies hang on the row's largest position, and up to where they do not.

    transformers 5.23 takes the largest of `position_ids` (modeling_rope_utils.py, `dynamic_rope_update`), in a packed
    row that of the longest document: "longrope" (Phi) then takes its long factors for all, "dynamic" scales by it.

    Args:
        config: the model's, whole or of the text.
    """
    text = config.get_text_config()
    given = getattr(text, "rope_parameters", None) or {}
    for kind in [given] if "rope_type" in given else given.values():  # some families: one a kind of layer
        if not isinstance(kind, Mapping):
            continue
        if kind.get("rope_type") == "longrope":
            return "longrope", int(kind["original_max_position_embeddings"])
        if kind.get("rope_type") == "dynamic" and not kind.get("alpha"):  # with alpha (Hunyuan) it is fixed
            return "dynamic", int(text.max_position_embeddings)
    return None


def longest_padding(model: Any) -> int | None:
    """Slots of the longest segment of padding that changes nothing for a row's documents; None for any."""
    shared = shared_positions(model.config)
    limits = [limit for limit in (learned_positions(model), shared and shared[1]) if limit]
    return min(limits) if limits else None


def refuse_rows(model: Any, row_slots: int | None) -> None:
    """Refuse rows in which a model would place documents otherwise than alone.

    Args:
        model: as for `learned_positions`.
        row_slots: slots of a packed row; None where rows may have any (padding_free).

    Raises:
        PackingError: see `refuse_chunks`; positions that do not begin at 0, where TRL's collator makes them.
    """
    refuse_chunks(model.config, row_slots)
    first = first_position(model)
    if row_slots is None and first:
        raise PackingError(
            f"positions of {model.config.model_type} begin at {first}, and those of padding_free at 0 (TRL 1.16)",
            mend="packing=True, whose positions begin where the model's do, or padding_free=False",
        )


def refuse_chunks(config: Any, row_slots: int | None) -> None:
    """Refuse rows in which attention is cut at slots of the row, wherever its documents begin.

    Args:
        config: the model's.
        row_slots: slots of a packed row; None where rows may have any (padding_free).

    Raises:
        PackingError: chunked attention (Llama 4) shorter than a row.
    """
    text = config.get_text_config()
    chunk = getattr(text, "attention_chunk_size", None)
    if not chunk or "chunked_attention" not in (getattr(text, "layer_types", None) or ()):
        return
    if row_slots is None or row_slots > chunk:
        raise PackingError(
            f"{text.model_type} attends in chunks of {chunk:,} slots, and rows may have more",
            evidence=("transformers cuts chunks by the row's slots: a document across a cut would not see its start",),
            mend=f"packing=True with tokens_per_batch={chunk}; for longer documents packing=False, padding_free=False",
        )


def check_lengths(dataset: Any, model: Any, name: str, *, packed: bool) -> None:
    """Refuse documents longer than a model's learned positions; say so where its positions are rotary.

    Args:
        dataset: tokenized; a streaming one passes unseen.
        model: the transformers model.
        name: of the dataset, for messages.
        packed: its documents share rows.

    Raises:
        DatasetError: on a GPU a position without an embedding is a device-side assert.
        PackingError: a row's longest document would change the rotary frequencies of its others.
    """
    if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names or not len(dataset):
        return
    if dataset.format["type"] == "custom":
        return
    lengths = document_lengths(dataset)
    longest = int(lengths.max())
    learned = learned_positions(model)
    if learned is not None and longest > learned:
        raise DatasetError(
            f"the {name} dataset has a document of {longest:,} tokens, and the model has {learned:,} positions",
            evidence=("they are learned: there is none for the tokens behind",),
            mend=f'tokens_per_batch={learned} and overlong="truncate", "split" or "drop"; without packing '
            f"max_length={learned}",
        )
    shared = shared_positions(model.config) if packed else None
    if shared is not None and longest > shared[1]:
        kind, limit = shared
        raise PackingError(
            f"the {name} dataset has {int((lengths > limit).sum()):,} documents of more than {limit:,} tokens, and the "
            f"model's rotary embedding is of the kind {kind!r}",
            evidence=("the longest document of a row would decide the frequencies of all others in it",),
            mend=f'tokens_per_batch={limit} and overlong="truncate", "split" or "drop"',
            regardless="packing=False and per_device_train_batch_size=1 trains each document by its own length",
        )
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if learned is None and stated and longest > stated:
        logger.warning(
            "the %s dataset has a document of %s tokens, and the model was made for %s positions "
            "(max_position_embeddings): behind them it is trained where it was never used",
            name, f"{longest:,}", f"{stated:,}",
        )  # fmt: skip
