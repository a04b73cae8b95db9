"""Data in the formats of others, and what to type to have them read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from datasets import DatasetDict

# What others call a prompt and its completion.
_PAIRS = (("prompt", "response"), ("prompt", "output"), ("prompt", "answer"), ("instruction", "output"),
          ("instruction", "response"), ("question", "answer"), ("input", "output"))  # fmt: skip
_ALPACA = (
    'dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": '
    'f\'{row["instruction"]}\\n{row["input"] or ""}\'.strip()}], "completion": [{"role": "assistant", '
    '"content": row["output"]}]}, remove_columns=dataset.column_names)'
)


def mend_of_columns(row: Mapping[str, Any]) -> str | None:
    """What makes a row of other columns one that is read: a line of code, or a setting. None where nothing is known."""
    return _renaming(row) or _only_text(row)


def as_dataset(given: object) -> str:
    """What makes a `Dataset` of something that is none."""
    if isinstance(given, DatasetDict) and given:
        return f'pass one of its splits: dataset["{next(iter(given))}"]'
    if isinstance(given, list):
        return "pass datasets.Dataset.from_list(rows)"
    file = json.dumps(given) if isinstance(given, str) else "..."
    return f'pass a datasets.Dataset, for example datasets.load_dataset("json", data_files={file}, split="train")'


def _renaming(row: Mapping[str, Any]) -> str | None:
    """The line of code that gives columns of other names the ones that are read; None where that is not enough."""
    if "chosen" in row:  # of preferences, where the prompt is a list of messages too
        return f'dataset = dataset.rename_column("chosen", "{"completion" if "prompt" in row else "messages"}")'
    for column, value in row.items():
        turns = value if isinstance(value, list) else ()
        if turns and all(isinstance(turn, Mapping) and {"role", "from"} & set(turn) for turn in turns):
            return f'dataset = dataset.rename_column("{column}", "messages")'
    if {"instruction", "input"} <= set(row):  # Alpaca's: both belong to the prompt, and renaming would lose one
        return _ALPACA if "output" in row else None
    for prompt, completion in _PAIRS:
        if {prompt, completion} <= set(row):
            names = {name: new for name, new in ((prompt, "prompt"), (completion, "completion")) if name != new}
            return f"dataset = dataset.rename_columns({json.dumps(names)})"
    return None


def _only_text(row: Mapping[str, Any]) -> str | None:
    """The setting that names the one column there is; half of a pair is no text."""
    (name, value), *others = row.items() or [("", None)]
    if others or not isinstance(value, str) or name in ("prompt", "completion"):
        return None
    return f'dataset_text_field="{name}" (in YAML: dataset_text_field: {name}; of a plan --text-field {name})'
