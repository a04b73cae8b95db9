"""Messages that say nothing: null or blank contents, with neither a call nor reasoning beside them.

transformers 5.23 takes a null out of a message before its template sees it (chat_template_utils.py): the template then
writes nothing, or fails in the middle of tokenizing. A blank answer teaches a model to end its turn at once. Neither
shows in a count of documents or targets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from hf_speedkit.core.errors import DatasetError
from hf_speedkit.packing.document_columns import blocks

_INSTEAD = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""What a message may hold in place of words."""
_USUAL = ("tool_calls", "reasoning_content")
_ANSWERING, _ASKING = ("assistant", "gpt"), ("user", "human")
_BLANK_JSON = r'"(content|value)"\s*:\s*(null|\[\s*\]|"(\\[nrtu0a]|\s)*")'
_SHOWN_ROWS = 5


@dataclass(frozen=True, slots=True)
class _Found:
    """Rows of one column, by their number, each list ascending.

    Args:
        column: looked at.
        mixed: its messages differ in their keys, so that those of one say nothing about another.
        example: the keys of blank messages.
        null: rows with a null for content.
        answers, questions: rows with a blank one.
        unanswered: of `answers` those without any other answer.
    """

    column: str
    mixed: bool
    example: dict[str, Any] = field(default_factory=dict)
    null: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    questions: list[int] = field(default_factory=list)
    unanswered: list[int] = field(default_factory=list)


def says_nothing(message: Any) -> bool:
    """Whether a message holds neither words nor what stands in for them."""
    message = message or {}
    content = message.get("content", message.get("value"))
    blank = not content.strip() if isinstance(content, str) else content is None or content == []
    return blank and not any(message.get(key) for key in _INSTEAD)


def has_null(messages: Any) -> bool:
    """Whether one of these messages has null for its content, and nothing in place of it."""
    return isinstance(messages, list) and any(says_nothing(message) and _is_null(message) for message in messages)


def refuse_null_contents(dataset: Any, name: str) -> None:
    """Refuse conversations with a message whose content is null, unless it makes calls or thinks instead.

    Args:
        dataset: of conversations, map-style; others pass.
        name: for the message.

    Raises:
        DatasetError: how many rows, the first of them, and the lines of code that leave them out or mend them.

    Cost: one pass of arrow over the messages; what is blank is decoded, nothing else.
    """
    for found in _conversations(dataset):
        if found.null:
            content = _key(found.example, "content", "value")
            raise DatasetError(
                f"{len(found.null):,} of {len(dataset):,} rows of the {name} dataset have a message whose {content} is "
                "null",
                evidence=(
                    f'first rows: {found.null[:_SHOWN_ROWS]}, in "{found.column}"',
                    "a template writes nothing for it, or fails on it while the data are tokenized",
                ),
                mend=_keeping(found, f'm["{content}"] is not None'),
                regardless='template_check="warn"',
            )


def blanks(dataset: Any, rows: Sequence[Mapping[str, Any]], name: str, text_field: str) -> list[str]:
    """What to say of blank contents: of a whole dataset, or of the first rows where it is a stream.

    Args:
        dataset: not tokenized.
        rows: its first.
        name, text_field: as for `blank_contents`.
    """
    return blank_contents(dataset, name, text_field) if isinstance(dataset, Dataset) else blank_answers(rows, name)


def blank_answers(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """What to say of blank answers among the first rows of a stream.

    Args:
        rows: not tokenized.
        name: of the stream.
    """
    found = []
    for number, row in enumerate(rows):
        messages = row.get("completion", row.get("messages", row.get("conversations")))
        if isinstance(messages, list) and any(_role(m) in _ANSWERING and says_nothing(m) for m in messages):
            found.append(number)
    if not found:
        return []
    return [
        f"{len(found):,} of the first {len(rows):,} rows of the {name} stream (rows {found[:_SHOWN_ROWS]}) hold an "
        "answer without a word, which teaches to end a turn at once. Unless that is meant: stream = stream.filter(...)"
    ]


def blank_contents(dataset: Any, name: str, text_field: str) -> list[str]:
    """What to say of answers, questions and texts that are blank: a sentence each, with row numbers and a way out.

    Args:
        dataset: not tokenized, map-style; others have none.
        name: for the sentence.
        text_field: column of plain text.
    """
    of = f"rows of the {name} dataset"
    said = []
    for found in _conversations(dataset):
        content, role = _key(found.example, "content", "value"), _key(found.example, "role", "from")
        for rows, who, roles in ((found.answers, "an answer", _ANSWERING), (found.questions, "a question", _ASKING)):
            if not rows or (roles is _ANSWERING and found.column == "prompt"):  # of a prompt nothing is trained on
                continue
            learned = ""
            if roles is _ANSWERING:
                learned = ", which teaches to end a turn at once"
                if found.unanswered:
                    learned += f"; {len(found.unanswered):,} of them hold no other answer"
            mend = _keeping(found, f'm["{role}"] not in {roles} or str(m["{content}"] or "").strip()')
            said.append(f"{_share(rows, dataset, of)} hold {who} without a word{learned}. To leave them out: {mend}")
    for column in _texts(dataset, text_field):
        rows = _blank_texts(dataset, column)
        if rows:
            said.append(
                f'{_share(rows, dataset, of)} have a blank "{column}", which holds nothing to learn but its end. '
                f'To leave them out: dataset = dataset.filter(lambda row: row["{column}"].strip())'
            )
    return said


def _share(rows: Sequence[int], dataset: Dataset, of: str) -> str:
    return f"{len(rows):,} of {len(dataset):,} {of} (first rows: {list(rows[:_SHOWN_ROWS])})"


def _keeping(found: _Found, condition: str) -> str:
    """The line of code that keeps rows of which all messages meet a condition, or hold something in place of words."""
    keys = [key for key in _INSTEAD if key in found.example or (found.mixed and key in _USUAL)]
    instead = "".join(f' or m.get("{key}")' for key in keys)
    column = found.column
    return f'dataset = dataset.filter(lambda row: all({condition}{instead} for m in row["{column}"]))'


def _key(message: Mapping[str, Any], name: str, other: str) -> str:
    return other if other in message and name not in message else name


def _is_null(message: Any) -> bool:
    return message is None or message.get("content", message.get("value")) is None


def _role(message: Any) -> Any:
    return (message or {}).get("role", (message or {}).get("from"))


def _readable(dataset: Any) -> bool:
    """Whether rows are words in columns that arrow can look into: map-style, no transform of one's own, no tokens."""
    return (
        isinstance(dataset, Dataset) and dataset.format["type"] != "custom" and "input_ids" not in dataset.column_names
    )


def _conversations(dataset: Any) -> Iterator[_Found]:
    if not _readable(dataset):
        return
    pair = {"prompt", "completion"} <= set(dataset.column_names)
    for column in ("prompt", "completion") if pair else ("messages", "conversations"):
        if column in dataset.column_names and getattr(dataset.features[column], "feature", None) is not None:
            yield _scan(dataset, column)


def _scan(dataset: Dataset, column: str) -> _Found:
    found = _Found(column, mixed=not isinstance(getattr(dataset.features[column], "feature", None), dict))
    first = 0
    for block in blocks(dataset.select_columns([column]).with_format("arrow")):
        lists = pa.concat_arrays(block[column].chunks)
        messages, decode = _plain(lists.flatten())
        suspects = _may_be_blank(messages)
        if suspects is not None and pc.any(suspects).as_py():
            rows = pc.list_parent_indices(lists).filter(suspects).to_pylist()
            for row, text in zip(rows, messages.filter(suspects).to_pylist(), strict=True):
                message = decode(text)
                if says_nothing(message):
                    _note(found, first + row, message, partial(_decoded, lists[row].values))
        first += len(lists)
    return found


def _note(found: _Found, row: int, message: Any, conversation: Callable[[], Any]) -> None:
    found.example.update(message or {})
    if _is_null(message):
        _add(found.null, row)
    if _role(message) in _ASKING:
        _add(found.questions, row)
    if _role(message) in _ANSWERING:
        if row not in found.answers[-1:] and all(
            says_nothing(other) for other in conversation() if _role(other) in _ANSWERING
        ):
            found.unanswered.append(row)
        _add(found.answers, row)


def _add(rows: list[int], row: int) -> None:
    if row not in rows[-1:]:
        rows.append(row)


def _decoded(messages: Any) -> list[Any]:
    plain, decode = _plain(messages)
    return [decode(message) for message in plain.to_pylist()]


def _plain(messages: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Messages that arrow can look into, and what makes a dictionary of one; `datasets` keeps mixed ones as JSON."""
    if isinstance(messages, pa.ExtensionArray):
        return messages.storage, lambda text: json.loads(text) if isinstance(text, str) else text
    return messages, lambda message: message


def _may_be_blank(messages: Any) -> Any:
    """Which messages may have no content, as a boolean array; None where they are no messages."""
    if pa.types.is_null(messages.type):
        return pc.is_null(messages)
    if pa.types.is_struct(messages.type):
        names = [messages.type.field(at).name for at in range(messages.type.num_fields)]
        name = next((name for name in ("content", "value") if name in names), None)
        if name is None:
            return None
        return _without_words(pc.struct_field(messages, name))
    if pa.types.is_string(messages.type) or pa.types.is_large_string(messages.type):
        blank = pc.fill_null(pc.match_substring_regex(messages, _BLANK_JSON), True)
        return pc.or_(blank, pc.invert(pc.fill_null(pc.match_substring_regex(messages, '"(content|value)"'), True)))
    return None


def _without_words(contents: Any) -> Any:
    if pa.types.is_null(contents.type):
        return pc.is_null(contents)
    if pa.types.is_list(contents.type) or pa.types.is_large_list(contents.type):
        return pc.equal(pc.fill_null(pc.list_value_length(contents), 0), 0)
    if pa.types.is_string_view(contents.type):
        contents = contents.cast(pa.large_string())
    if pa.types.is_string(contents.type) or pa.types.is_large_string(contents.type):
        return pc.fill_null(pc.or_(pc.equal(contents, ""), pc.utf8_is_space(contents)), True)
    return pc.is_null(contents)


def _texts(dataset: Any, text_field: str) -> list[str]:
    if not _readable(dataset):
        return []
    columns = set(dataset.column_names)
    names = ["completion"] if {"prompt", "completion"} <= columns else [text_field]
    if {"messages", "conversations"} & columns and names == [text_field]:
        return []
    kinds = [str(getattr(dataset.features.get(name), "dtype", "")) for name in names]
    return [name for name, kind in zip(names, kinds, strict=True) if kind in ("string", "large_string")]


def _blank_texts(dataset: Dataset, column: str) -> list[int]:
    rows: list[int] = []
    first = 0
    for block in blocks(dataset.select_columns([column]).with_format("arrow")):
        rows += [first + int(row) for row in pc.indices_nonzero(_without_words(block[column])).to_pylist()]
        first += len(block)
    return rows
