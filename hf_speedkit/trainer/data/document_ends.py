"""Special tokens of documents: some that come twice, ends that no model learns, and some that it has never learned."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from datasets import Dataset

from hf_speedkit.packing.boundaries import IGNORE_INDEX
from hf_speedkit.packing.stream import PackedStream
from hf_speedkit.trainer.data.conversation_checks import SAMPLE_ROWS

logger = logging.getLogger(__name__)

_ZERO = 1e-16
"""Untrained rows of published weights are zero, or what is left of it after a conversion."""


def say_what_is_odd(dataset: Any, tokenizer: Any, model: Any, name: str) -> None:
    """Warn of documents whose ends are doubled, or are no targets, or that hold unknown tokens, by a sample of them.

    Args:
        dataset: tokenized and masked: map-style, a stream of rows or a `PackedStream`.
        tokenizer: with the tokens that begin and end a text.
        model: its generation config says where generation stops, which may be at more tokens.
        name: of the dataset, for the log.
    """
    rows = [row for row in sample_rows(dataset) if row.get("input_ids") is not None]  # images: not tokenized yet
    if not rows:
        return
    _say_what_is_doubled(rows, tokenizer, name)
    _say_what_never_ends(rows, tokenizer, end_tokens(tokenizer, model), name)
    _say_what_is_unknown(rows, tokenizer, model.get_input_embeddings(), name)


def sample_rows(dataset: Any) -> list[Any]:
    """Up to 100 rows, of a map-style dataset from all over it: what is sorted begins with its simplest rows."""
    if isinstance(dataset, PackedStream):
        return dataset.first_documents(SAMPLE_ROWS)
    if isinstance(dataset, Dataset):
        dataset = spread(dataset)
    return list(islice(iter(dataset), SAMPLE_ROWS))  # take() of datasets before 5.2 fails on fewer rows


def spread(dataset: Dataset) -> Dataset:
    """Up to 100 rows in equal distances."""
    return dataset.select(range(0, len(dataset), max(1, -(-len(dataset) // SAMPLE_ROWS))))


def end_tokens(tokenizer: Any, model: Any) -> set[int]:
    """Tokens at which generation stops, as tokenizer (None: nobody has one) and model say."""
    stated = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    more = stated if isinstance(stated, (list, tuple)) else [stated]
    return {int(token) for token in (getattr(tokenizer, "eos_token_id", None), *more) if token is not None}


def _say_what_is_doubled(rows: Sequence[Mapping[str, Any]], tokenizer: Any, name: str) -> None:
    """Documents that begin or end with the same special token twice: the text brings it, and so does the tokenizer."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    for token, what in ((bos, "begin"), (eos, "end")):
        doubled = 0
        for row in rows if token is not None else ():
            ids = [int(one) for one in (row["input_ids"][:2] if what == "begin" else row["input_ids"][-3:])]
            if what == "end" and len(ids) == 3 and not tokenizer.decode([ids[1]]).strip():
                del ids[1]  # chat templates write a line break behind a turn
            doubled += len(ids) > 1 and ids[-2:] == [token, token]
        if 2 * doubled > len(rows):
            logger.warning(
                "%s documents: %d of %d %s with %r twice: the text brings it, and the tokenizer adds it once more. "
                "Take it out of the text (or of a formatting_func that applies a chat template)",
                name, doubled, len(rows), what, tokenizer.convert_ids_to_tokens(token),
            )  # fmt: skip


def _say_what_never_ends(rows: Sequence[Mapping[str, Any]], tokenizer: Any, ends: set[int], name: str) -> None:
    last: Counter[int] = Counter()
    for row in rows:
        ids = [int(token) for token in row["input_ids"]]
        labels = ids if row.get("labels") is None else [int(label) for label in row["labels"]]
        targets = [label for label in labels[1:] if label != IGNORE_INDEX]
        if ends & set(targets):
            return
        last.update(targets[-1:])
    if not last or not ends:
        return
    stops = tokenizer.convert_ids_to_tokens(sorted(ends))
    logger.warning(
        "%s documents: no end token (%s) is a target in any of %d looked at, so the model does not learn to stop; "
        "their last target is mostly %r. Mark the end too (inside the template's generation markers, in labels of "
        "your own), or set eos_token to the token that ends a turn",
        name, ", ".join(map(repr, stops)), len(rows), tokenizer.convert_ids_to_tokens(last.most_common(1)[0][0]),
    )  # fmt: skip


def _say_what_is_unknown(rows: Sequence[Mapping[str, Any]], tokenizer: Any, embedding: Any, name: str) -> None:
    """Tokens whose embedding is zero and stays so: a base model has never seen the turn marks of its instruct sister
    (Llama 3: meta-pytorch/torchtune#2429), and LoRA leaves embeddings alone."""
    weight = getattr(embedding, "weight", None)
    # Of FSDP2's shards, and of a model that is still empty, nothing can be read here.
    if type(weight) is not torch.nn.Parameter or weight.is_meta or any(w.requires_grad for w in embedding.parameters()):
        return
    found = {int(token) for row in rows for token in row["input_ids"]} - {getattr(embedding, "padding_idx", None)}
    used = torch.tensor([token for token in sorted(found) if 0 <= token < len(weight)], device=weight.device).long()
    unknown = used[weight.detach().index_select(0, used).abs().amax(1) <= _ZERO].tolist()
    if unknown:
        logger.warning(
            "%s documents: the embeddings of %d tokens are zero (%s) and no embedding is trained: to the model they "
            "are all the same. trainable_token_indices=%s in the LoraConfig, or the instruct model",
            name, len(unknown), ", ".join(map(repr, tokenizer.convert_ids_to_tokens(unknown[:5]))), unknown,
        )  # fmt: skip
