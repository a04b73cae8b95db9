"""Documents and the positions that a model has: learned ones end, rotary ones go on where nobody has trained them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from datasets import Dataset

from hf_speedkit.core.errors import DatasetError
from hf_speedkit.packing.documents import document_lengths
from hf_speedkit.trainer.adapters import below_adapters

logger = logging.getLogger(__name__)

# Names of embeddings of positions in transformers 5.23: GPT-2 and its kin; OPT, BART and theirs; BERT's.
_NAMES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "pos_embed")


def learned_positions(model: Any) -> int | None:
    """Positions that a model has an embedding for; None where positions are computed (rotary, ALiBi, none).

    Args:
        model: the transformers model, a PEFT wrapper is fine.
    """
    config = model.config.get_text_config()
    stated = getattr(config, "max_position_embeddings", None)
    for name, module in below_adapters(model).named_modules():
        if isinstance(module, torch.nn.Embedding) and name.rpartition(".")[2] in _NAMES:
            return min(int(module.weight.shape[0]), int(stated)) if stated else int(module.weight.shape[0])
    return None


def check_lengths(dataset: Any, model: Any, name: str) -> None:
    """Refuse documents longer than a model's learned positions; say so where its positions are rotary.

    Args:
        dataset: tokenized; a streaming one passes unseen.
        model: the transformers model.
        name: of the dataset, for messages.

    Raises:
        DatasetError: on a GPU a position without an embedding is a device-side assert.
    """
    if not isinstance(dataset, Dataset) or "input_ids" not in dataset.column_names or not len(dataset):
        return
    if dataset.format["type"] == "custom":
        return
    longest = int(document_lengths(dataset).max())
    learned = learned_positions(model)
    if learned is not None and longest > learned:
        raise DatasetError(
            f"the {name} dataset has a document of {longest:,} tokens, and the model has {learned:,} positions",
            evidence=("they are learned: there is none for the tokens behind",),
            mend=f'tokens_per_batch={learned} and overlong="truncate", "split" or "drop"; without packing '
            f"max_length={learned}",
        )
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if learned is None and stated and longest > stated:
        logger.warning(
            "the %s dataset has a document of %s tokens, and the model was made for %s positions "
            "(max_position_embeddings): behind them it is trained where it was never used",
            name, f"{longest:,}", f"{stated:,}",
        )  # fmt: skip
