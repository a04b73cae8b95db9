"""Document lengths for `hf-speedkit plan`: from a file of counts, or from a dataset that is tokenized here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_speedkit.core.errors import DatasetError, SpeedkitError

# Boundaries are 32-bit integers (cu_seq_lens): a longer document could not be packed by any kernel.
_LONGEST = 2**31 - 1
_QUANTILES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)


class NotFoundError(Exception):
    """A file, dataset or tokenizer that is not there, or that holds something else.

    Args:
        said: what is wrong.
        where: the argument of the command that named it.
    """

    def __init__(self, said: str, *, where: str = "DATASET") -> None:
        super().__init__(said)
        self.where = where


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Lengths of documents, and what there is to say about the data.

    Args:
        lengths: tokens of each document; empty ones are left out.
        empty: how many were left out.
        findings: sentences for the reader.
    """

    lengths: list[int]
    empty: int = 0
    findings: tuple[str, ...] = ()

    def summary(self, tokens_per_batch: int) -> dict[str, Any]:
        """Counts and quantiles."""
        ranked = sorted(self.lengths)
        longer = [length for length in ranked if length > tokens_per_batch]
        return {
            "documents": len(ranked),
            "empty": self.empty,
            "tokens": sum(ranked),
            "mean": sum(ranked) / len(ranked) if ranked else None,
            "quantiles": {f"{q:g}": ranked[round(q * (len(ranked) - 1))] for q in _QUANTILES} if ranked else {},
            "overlong": len(longer),
            "overlong_tokens_beyond": sum(longer) - len(longer) * tokens_per_batch,
        }

    def fitted(self, tokens_per_batch: int, overlong: str) -> tuple[list[int], bool]:
        """Lengths as they would be packed, and whether all fit: False only under overlong="error"."""
        kept: list[int] = []
        fits = True
        for length in self.lengths:
            if length <= tokens_per_batch:
                kept.append(length)
            elif overlong == "error":
                fits = False
                kept.append(length)
            elif overlong == "truncate":
                kept.append(tokens_per_batch)
            elif overlong == "split":
                whole, rest = divmod(length, tokens_per_batch)
                kept += [tokens_per_batch] * whole + [rest] * (rest > 0)
        return kept, fits


def from_file(path: Path) -> Documents:
    """Lengths from a JSON list of integers, or an object with such a list under "lengths".

    Raises:
        NotFoundError: no such file, or it holds something else.
    """
    if not path.is_file():
        raise NotFoundError(f"no such file: {path}", where="--lengths")
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NotFoundError(f"{path} cannot be read as JSON: {error}", where="--lengths") from error
    counts = read.get("lengths") if isinstance(read, Mapping) else read
    if not isinstance(counts, list) or not all(type(count) is int and 0 <= count <= _LONGEST for count in counts):
        said = f"{path} holds no list of token counts, whole numbers from 0 to {_LONGEST:,}"
        raise NotFoundError(said, where="--lengths")
    return _documents(counts)


def from_dataset(
    model: str,
    dataset: str,
    *,
    split: str,
    config: str | None,
    text_field: str,
    template_arguments: Mapping[str, Any],
    processes: int,
) -> Documents:
    """Lengths of a dataset's documents; datasets shows a progress bar and keeps the result in its cache.

    Args:
        model: hub id or folder of the tokenizer; not read where the dataset is tokenized already.
        dataset: hub id, file, or folder written by `save_to_disk`.
        split, config: as for `datasets.load_dataset`.
        text_field: column of plain text.
        template_arguments: for the chat template.
        processes: that tokenize.

    Raises:
        NotFoundError: a dataset or tokenizer that cannot be loaded.
        DatasetError: no column to count, no chat template, roles that it leaves out. A line that it writes and nobody
            asked for is a finding.
    """
    from hf_speedkit.packing.document_columns import refuse_padded_or_packed
    from hf_speedkit.packing.documents import document_lengths
    from hf_speedkit.trainer.data.empty_contents import blank_contents, refuse_null_contents
    from hf_speedkit.trainer.data.inputs import check_dataset

    loaded = _load(dataset, split, config)
    if not len(loaded):
        return _documents([])
    if "input_ids" in loaded.column_names:
        refuse_padded_or_packed(loaded)
        return _documents(document_lengths(loaded).tolist())
    check_dataset(loaded, text_field=text_field, name=split)
    refuse_null_contents(loaded, split)
    tokenizer = _tokenizer(model)
    findings = _findings(loaded, tokenizer, template_arguments)
    findings += tuple(blank_contents(loaded, split, text_field))
    counted = loaded.map(
        count_tokens,
        fn_kwargs={"tokenizer": tokenizer, "text_field": text_field, "template_arguments": dict(template_arguments)},
        with_indices=True,
        remove_columns=loaded.column_names,
        num_proc=processes if processes > 1 else None,
        desc="Tokenizing",
    )
    return _documents(counted["tokens"][:], findings)


def count_tokens(
    row: Mapping[str, Any], number: int, tokenizer: Any, text_field: str, template_arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Tokens of one row, as TRL would tokenize it: conversation, prompt and completion, or text with an end.

    Args:
        row: of the dataset.
        number: of the row, from 0.
        tokenizer, text_field, template_arguments: see `from_dataset`.

    Raises:
        DatasetError: none of these columns, or a conversation that the template refuses.
    """
    messages = row.get("messages") or row.get("conversations")
    if row.get("prompt") is not None and row.get("completion") is not None:
        if not isinstance(row["prompt"], list):
            return {"tokens": len(tokenizer(row["prompt"] + _ended(row["completion"], tokenizer))["input_ids"])}
        messages = [*row["prompt"], *row["completion"]]
    if messages:
        from hf_speedkit.trainer.data.conversation_checks import conversations_of, unrenderable

        found = conversations_of([{**row, "messages": messages, "prompt": None}])
        if not found:
            raise DatasetError(
                f"the conversation of row {number:,} is no list of messages with roles", mend="use role and content"
            )
        conversation, own = found[0]
        try:
            text = tokenizer.apply_chat_template(conversation, tokenize=False, **{**template_arguments, **own})
        except Exception as error:  # a template may raise anything
            raise unrenderable(conversation, error, row=number) from error
        return {"tokens": len(tokenizer(text, add_special_tokens=False)["input_ids"])}
    if isinstance(row.get(text_field), str):
        return {"tokens": len(tokenizer(_ended(row[text_field], tokenizer))["input_ids"])}
    raise DatasetError(
        f"row {number:,} has no text to count",
        evidence=(f"its columns: {', '.join(sorted(map(str, row)))}",),
        mend='name the column with --text-field, or give it "messages"; filter rows without any',
    )


def model_config(model: str) -> Any:
    """The configuration at `model`; None for a tokenizer alone."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)  # None would ask on the terminal
    except (OSError, ValueError):
        return None


def _documents(counts: list[int], findings: tuple[str, ...] = ()) -> Documents:
    lengths = [count for count in counts if count > 0]
    return Documents(lengths=lengths, empty=len(counts) - len(lengths), findings=findings)


def _load(dataset: str, split: str, config: str | None) -> Any:
    from hf_speedkit.trainer.dataset_source import load_rows

    try:
        return load_rows(dataset, config, split=split)
    except DatasetError as error:
        raise NotFoundError(str(error)) from error


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise NotFoundError(f"tokenizer {model!r} cannot be loaded: {error}", where="MODEL_OR_TOKENIZER") from error


def _findings(loaded: Any, tokenizer: Any, template_arguments: Mapping[str, Any]) -> tuple[str, ...]:
    from hf_speedkit.trainer.data.conversation_checks import conversations_of, refuse_reasoning_line
    from hf_speedkit.trainer.data.conversation_refusals import refuse_missing_template
    from hf_speedkit.trainer.data.conversation_roles import refuse_foreign_roles
    from hf_speedkit.trainer.data.template_faults import refuse_broken_template

    def render(messages: Any, **arguments: Any) -> str:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        return text

    sample = [(messages, {**template_arguments, **own}) for messages, own in conversations_of(loaded)]
    if not getattr(tokenizer, "chat_template", None):
        refuse_missing_template(tokenizer, sample)
        return ()
    refuse_broken_template(sample, render, tokenizer.chat_template)
    refuse_foreign_roles(sample, render, rows=[next(iter(loaded), {})])
    try:
        refuse_reasoning_line(sample, render)
    except SpeedkitError as error:
        return (f"{error.what}; --template-kwargs '{{\"enable_thinking\": false}}' leaves it out",)
    return ()


def _ended(text: str, tokenizer: Any) -> str:
    return text if not tokenizer.eos_token or text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token
