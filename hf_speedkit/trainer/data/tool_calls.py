"""Calls of tools as data sets keep them: fields that Arrow filled in, arguments that a template quotes once more."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from datasets import IterableDataset

from hf_speedkit.core.errors import DatasetError
from hf_speedkit.trainer.data.conversation_checks import (
    Messages,
    Render,
    arguments_of,
    calls_of,
    rendered_or_none,
)

# Of JSON schemas, whose null is a value. Arrow fills these as well, beside others that show it.
_MAY_BE_NULL = ("default", "const", "enum", "examples")
_CHATS = {"messages", "conversations", "prompt", "completion"}
_AS_IT_IS = 'Dataset.from_list(rows, on_mixed_types="use_json")'


def unfilled_columns(dataset: Any, rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Columns that Arrow fills nothing into: texts, JSON's among them, and what datasets keeps as JSON.

    Args:
        dataset: not tokenized.
        rows: some of its rows.
    """
    kept = {name for name, feature in (dataset.features or {}).items() if "Json(" in repr(feature)}
    return kept | {name for row in rows for name, value in row.items() if isinstance(value, str)}


def refuse_odd_calls(
    conversations: Sequence[tuple[Messages, dict[str, Any]]], render: Render, *, unfilled: Collection[str] = ()
) -> None:
    """Refuse calls, tools and template arguments that a template would write in another form than was meant.

    Args:
        conversations: see `conversations_of`.
        render: as for training.
        unfilled: columns whose nulls were meant; `unfilled_columns`.

    Raises:
        DatasetError: a call has an argument without a value, a tool a field, or a row an argument for the template;
            arguments are JSON text that the template quotes.
    """
    _refuse_filled(conversations, unfilled)
    _refuse_quoted(conversations, render)


def without_blank_tools(dataset: Any) -> Any:
    """The dataset with `[]` for tools that are a blank text, as ShareGPT's rows without tools have it; TRL reads JSON.

    Args:
        dataset: not tokenized; without a column of texts called tools it comes back as it is.
    """
    if isinstance(dataset, IterableDataset):
        there = "tools" in (dataset.column_names or ["tools"])
        return dataset.map(_no_tools, features=dataset.features) if there else dataset
    if "tools" not in dataset.column_names or getattr(dataset.features["tools"], "dtype", "") != "string":
        return dataset
    return dataset.map(_no_tools) if _has_blank(dataset, "tools") else dataset


def _has_blank(dataset: Any, column: str) -> bool:
    """Whether a column of texts has a blank one, in rows that were not selected too.

    By Arrow: 200,000 texts of 500 characters take 0.03 s, where Python takes 2.3 s.
    """
    import pyarrow.compute as pc

    return bool(pc.any(pc.match_substring_regex(dataset.data.column(column), r"^\s*$")).as_py())


def _no_tools(row: Mapping[str, Any]) -> dict[str, Any]:
    tools = row.get("tools")
    return {"tools": "[]"} if isinstance(tools, str) and not tools.strip() else {}


def _refuse_filled(conversations: Sequence[tuple[Messages, dict[str, Any]]], unfilled: Collection[str]) -> None:
    """Arrow gives all rows of a column the same fields: a call of one function gets the parameters of every other, and
    so does its definition (modelscope/ms-swift#6467). Templates write them out as null. A field without a value
    anywhere was null before, and so was one that others have not got."""
    kwargs = [name for _, given in conversations for name, value in given.items() if value is None and name != "tools"]
    if kwargs and "chat_template_kwargs" not in unfilled:
        raise DatasetError(
            f'"chat_template_kwargs" of {len(kwargs)} rows have no value for {kwargs[0]!r}',
            evidence=("Arrow gives each row the names of all others, and to a template None is not the same as none",),
            mend="give every row the same names, or set them for all rows in the config: chat_template_kwargs={...}",
            regardless='template_check="warn"',
        )
    calls = [arguments_of(call) for messages, _ in conversations for call in calls_of(messages)]
    tools = [tool for _, given in conversations for tool in given.get("tools") or ()]
    calls, tools = ([] if _CHATS & set(unfilled) else calls), ([] if "tools" in unfilled else tools)
    for what, kind, all_of in (("tool calls have arguments", "call", calls), ("tools have fields", "tool", tools)):
        filled = _filled_fields(all_of)
        if filled:
            raise DatasetError(
                f"{len(filled)} of {len(all_of)} {what} without a value",
                evidence=(
                    f"the first: {', '.join(map(repr, filled[0][:5]))}",
                    f"Arrow fills a {kind} with the parameters of all other functions, and templates write them out as "
                    "null",
                ),
                mend=f"{_AS_IT_IS} keeps each {kind} as it is"
                + ("; so does a column of JSON text" if kind == "tool" else ""),
                regardless='template_check="warn"',
            )


def _refuse_quoted(conversations: Sequence[tuple[Messages, dict[str, Any]]], render: Render) -> None:
    """OpenAI's format has JSON text for arguments, and most templates put a `tojson` behind them, which quotes it
    (huggingface/transformers#45419). Servers read the text before they render, so inference never shows it."""
    found = 0
    for messages, arguments in conversations:
        texts = [given for given in map(arguments_of, calls_of(messages)) if _is_object(given)]
        text = rendered_or_none(render, messages, arguments) if texts else None
        forms = [json.dumps(given, ensure_ascii=escaped) for given in texts for escaped in (False, True)]
        found += text is not None and any(form in text for form in forms)
    if found:
        raise DatasetError(
            f"arguments of calls are JSON text, which the chat template quotes once more, in {found} of "
            f"{len(conversations)} conversations",
            evidence=("the model would learn to write a quoted text where an object is meant",),
            mend=f'call["function"]["arguments"] = json.loads(...) for each call, then {_AS_IT_IS}',
            regardless='template_check="warn"',
        )


def _filled_fields(values: Sequence[Any]) -> list[list[str]]:
    """The fields that each value was filled with, without those that were not: in all others there is a field too, and
    in some a value."""
    shapes = defaultdict(set)
    for path, fields in (found for value in values for found in _mappings(value)):
        shapes[path].add(frozenset(fields))
    given = {path for value in values for path, field in _fields(value) if field is not None}
    found = (
        [path[-1] for path, field in _fields(value) if field is None and path in given and len(shapes[path[:-1]]) == 1]
        for value in values
    )
    return [names for names in found if names]


def _fields(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Fields at any depth, by their names from the top; those of a list's members are alike."""
    for path, fields in _mappings(value):
        yield from (((*path, key), field) for key, field in fields.items() if key not in _MAY_BE_NULL)


def _mappings(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    if isinstance(value, list):
        for one in value:
            yield from _mappings(one, path)
    elif isinstance(value, Mapping):
        yield path, value
        for key, one in value.items():
            if key not in _MAY_BE_NULL:
                yield from _mappings(one, (*path, key))


def _is_object(arguments: Any) -> bool:
    try:
        return isinstance(arguments, str) and isinstance(json.loads(arguments), dict)
    except ValueError:
        return False
