"""Rows before tokenization: which of their columns TRL reads, and rows it would fail on hours later or train wrong.

TRL 1.16 asks a row's columns several times over and answers differently each time: with `text` beside `prompt` and
`completion` the end token goes onto the text and the completion never ends; with `messages` beside `completion` the
order of a Python set decides which one it looks at. So only the columns that are trained on are left for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset, Value

from hf_speedkit.core.errors import DatasetError
from hf_speedkit.trainer.data.empty_contents import has_null
from hf_speedkit.trainer.data.token_masks import check_masks, mask_fault
from hf_speedkit.trainer.data.tool_calls import without_blank_tools

logger = logging.getLogger(__name__)

_PAIR = ("prompt", "completion")
_TOLERATED_SHARE = 0.01
_OF_OTHER_TRAINERS = ("chosen", "rejected")
_MESSAGES = 'each row is a list of {"role": ..., "content": ...}'
_WEIGHTS = ("weight", "weights", "sample_weight", "sample_weights", "loss_weight", "loss_weights")


def columns_of(dataset: Any) -> list[str]:
    """A dataset's columns; of a stream that does not know them those of its first row."""
    if dataset.column_names is not None:
        return list(dataset.column_names)
    return list(next(iter(dataset), {}))


def is_pair(columns: Any) -> bool:
    """Whether rows are prompts and completions."""
    return set(_PAIR) <= set(columns)


def as_rows(dataset: Any) -> Any:
    """The dataset in a format whose rows are dictionaries: TRL's maps lose the columns of tables (pandas, arrow)."""
    if isinstance(dataset, IterableDataset):
        return dataset.with_format(None)
    return dataset.with_format(None) if dataset.format["type"] in ("pandas", "arrow", "polars") else dataset


def one_format(dataset: Any, text_field: str) -> Any:
    """The dataset with the columns of one format: prompt and completion, else messages, else text.

    `conversations` of roles and contents become `messages`, and `messages` of from and value `conversations`: TRL knows
    each only under the other name. Columns that no format names stay.

    Args:
        dataset: not tokenized; one that is comes back as it is.
        text_field: column of plain text.
    """
    columns = columns_of(dataset)
    if "input_ids" in columns:
        return dataset
    formats: tuple[tuple[str, ...], ...] = (_PAIR, ("messages",), ("conversations",), (text_field,))
    chosen = next((names for names in formats if set(names) <= set(columns)), None)
    if chosen is None:
        return dataset
    known = {*_PAIR, *_OF_OTHER_TRAINERS, "messages", "conversations", text_field}
    others = [name for name in columns if name in known and name not in chosen]
    if others:
        logger.info("the dataset is read as %s; left out: %s", " and ".join(chosen), ", ".join(others))
        dataset = dataset.remove_columns(others)
    if "labels" in columns:  # TRL takes any column of that name for the labels of the tokens it is about to make
        logger.warning("the column 'labels' is left out: the rows hold no tokens yet, so it is of something else")
        dataset = dataset.remove_columns("labels")
    weights = [name for name in columns if name in _WEIGHTS]
    if weights:
        logger.warning("the column %r weighs nothing: every target token counts the same", weights[0])
    dataset = without_blank_tools(dataset)
    if chosen in (("messages",), ("conversations",)):
        row: Mapping[str, Any] = next(iter(dataset), {})
        first = row.get(chosen[0]) or [{}]
        wanted = "conversations" if isinstance(first[0], Mapping) and "from" in first[0] else "messages"
        if wanted != chosen[0]:
            dataset = dataset.rename_column(chosen[0], wanted)
    return dataset


def formatted(dataset: Any, formatting_func: Callable[[Any], Any], text_field: str) -> Any:
    """The dataset as plain text. TRL keeps the other columns, and where there are `messages` trains on those instead.

    Raises:
        DatasetError: the function fails, or returns something else than a text; for a stream while it is read.
    """
    arguments = {"formatting_func": formatting_func, "text_field": text_field}
    return dataset.map(_format, fn_kwargs=arguments, remove_columns=columns_of(dataset))


def _format(row: Mapping[str, Any], formatting_func: Callable[[Any], Any], text_field: str) -> dict[str, str]:
    try:
        text = formatting_func(row)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise DatasetError(
            f"formatting_func fails on a row: {type(error).__name__}: {error}",
            evidence=(f"columns: {', '.join(row)}",),
            mend="it is given one row, a dict, and returns one string",
        ) from error
    if not isinstance(text, str):
        raise DatasetError(
            f"formatting_func returned a {type(text).__name__}, not a text",
            mend="return one string for the one row that it is given",
        )
    return {text_field: text}


def check_raw_rows(dataset: Dataset, text_field: str, name: str) -> None:
    """Refuse rows without a value, and columns that are not of a format's types.

    Args:
        dataset: as `one_format` reads it: tokenized, prompt and completion, or text; conversations are looked at apart.
        text_field: column of plain text.
        name: "train" or the name of an evaluation set, for messages.

    Raises:
        DatasetError: names the column and the rows.

    Cost: null counts and offsets of arrow, milliseconds.
    """
    columns = dataset.column_names
    if "input_ids" in columns:
        _refuse_nulls(dataset, "input_ids", name)
        check_masks(dataset, name)
        return
    if "chat_template_kwargs" in columns:
        _refuse_nulls(dataset, "chat_template_kwargs", name)
    if is_pair(columns):
        texts = [isinstance(dataset.features[column], Value) for column in _PAIR]
        if texts[0] != texts[1]:
            raise DatasetError(
                f"of the {name} dataset one of prompt and completion is text and the other a conversation",
                mend="give both as text, or both as lists of messages",
            )
        for column in _PAIR:
            _refuse_other_types(dataset, column, name, lists=not texts[0])
            _refuse_nulls(dataset, column, name)
    elif not {"messages", "conversations"} & set(columns) and text_field in columns:
        _refuse_other_types(dataset, text_field, name, lists=False)
        _refuse_nulls(dataset, text_field, name)


def refuse_other_than_messages(dataset: Dataset, column: str, name: str) -> None:
    """Refuse a column of conversations whose rows are no lists of messages with a role and a content.

    Raises:
        DatasetError: what they are, and the line of code that makes them lists of messages where there is one.
    """
    feature: Any = dataset.features[column]
    if "null" in (getattr(feature, "dtype", None), getattr(getattr(feature, "feature", None), "dtype", None)):
        return  # no row has a message, which is told with the rows
    turn = feature if isinstance(feature, dict) else getattr(feature, "feature", None)
    mend: str | None
    if isinstance(feature, dict):
        held, mend = "one message", f'dataset.map(lambda row: {{"{column}": [row["{column}"]]}})'
    elif isinstance(feature, Value):
        first = str(next((value for value in dataset[:1][column] if value), ""))
        written = f'dataset.map(lambda row: {{"{column}": json.loads(row["{column}"])}})' if first[:1] in "[{" else None
        held, mend = feature.dtype, (written if first else None)
    elif isinstance(turn, Value) or getattr(turn, "feature", None) is not None:
        held, mend = f"a list of {getattr(turn, 'dtype', 'lists')}", None
    else:
        _refuse_keys(turn, column, name)
        return
    raise DatasetError(
        f'the {name} dataset\'s "{column}" column holds {held}, not conversations',
        mend=(f"{mend}: " if mend else "") + _MESSAGES,
    )


def _refuse_keys(turn: Any, column: str, name: str) -> None:
    keys = set(turn) if isinstance(turn, dict) else set()
    if not keys or {"role", "content"} <= keys or {"from", "value"} <= keys or {"role", "tool_calls"} <= keys:
        return
    raise DatasetError(
        f'the messages of the {name} dataset\'s "{column}" have no {"content" if "role" in keys else "role"}',
        evidence=(f"they have: {', '.join(sorted(keys))}",),
        mend=_MESSAGES,
    )


def _refuse_other_types(dataset: Dataset, column: str, name: str, *, lists: bool) -> None:
    kind = dataset.features[column]
    if lists:
        refuse_other_than_messages(dataset, column, name)
        return
    if str(getattr(kind, "dtype", "")) in ("string", "large_string", "string_view", "null"):
        return
    raise DatasetError(
        f'the {name} dataset\'s "{column}" column is {kind}, not text',
        mend=f'dataset.cast_column("{column}", Value("string")) where it is text of another type; a list of texts is '
        "one document a text, a list of messages belongs into a column of that name",
    )


def _refuse_nulls(dataset: Dataset, column: str, name: str) -> None:
    import pyarrow.compute as pc

    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return
    missing = pc.is_null(dataset.select_columns([column]).with_format("arrow")[:][column])
    rows = [int(i) for i in pc.indices_nonzero(missing).to_pylist()]
    if rows:
        raise DatasetError(
            f'{len(rows):,} of {len(dataset):,} rows of the {name} dataset have no "{column}"',
            evidence=(f"first rows: {rows[:5]}",),
            mend=f'dataset = dataset.filter(lambda row: row["{column}"] is not None)',
        )


def checked_stream(stream: IterableDataset, text_field: str, *, nulls: bool = False) -> IterableDataset:
    """The stream, each row looked at as it passes: one that cannot be read is named, where TRL would stumble over it.

    Args:
        stream: as `one_format` or `formatted` has made it.
        text_field: column of plain text.
        nulls: messages whose content is null pass.
    """
    given = {"text_field": text_field, "nulls": nulls}
    return stream.map(_refuse_row, with_indices=True, fn_kwargs=given, features=stream.features)


def _refuse_row(row: Mapping[str, Any], index: int, text_field: str, nulls: bool) -> dict[str, Any]:
    wrong = _what_is_wrong(row, text_field)
    if wrong is None and not nulls and any(has_null(row.get(name)) for name in (*_PAIR, "messages", "conversations")):
        wrong = "has a message whose content is null"
    if wrong is not None:
        raise DatasetError(
            f"row {index:,} of the stream {wrong}",
            evidence=(f"its columns: {', '.join(sorted(map(str, row)))}",),
            mend="filter such rows out before training: stream = stream.filter(...)",
        )
    return {}


def _what_is_wrong(row: Mapping[str, Any], text_field: str) -> str | None:
    if "input_ids" in row:
        return "has no input_ids" if row["input_ids"] is None else mask_fault(row)
    if row.get("chat_template_kwargs", {}) is None:
        return "has no chat_template_kwargs"
    if is_pair(row):
        kinds = [str if isinstance(row[name], str) else list if isinstance(row[name], list) else None for name in _PAIR]
        if None in kinds:
            return f'has no "{_PAIR[kinds.index(None)]}"'
        return "has a text and a conversation for prompt and completion" if kinds[0] is not kinds[1] else None
    for name in ("messages", "conversations"):
        if name in row:
            return None if row[name] else f'has an empty "{name}"'
    if text_field in row:
        return (
            None if isinstance(row[text_field], str) else f'has a {type(row[text_field]).__name__} for "{text_field}"'
        )
    return f'has none of "messages", "prompt" and "completion", "{text_field}" and input_ids'


def refuse_merged_prompts(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> None:
    """Refuse prompts of text whose last token becomes another one once the completion follows.

    A prompt that ends with a space is the usual case: the space belongs to the token of the next word. TRL 1.16 leaves
    the prompt's last token out then (and warns once), so a model trains on prompts that it will never be given.

    Args:
        rows: prompts and completions; others are left out.
        tokenizer: as for training.

    Raises:
        DatasetError: more than 1 % of prompts.
    """
    pairs = [row for row in rows if all(isinstance(row.get(name), str) for name in _PAIR)]
    specials = set(tokenizer.all_special_ids)
    merged = []
    for row in pairs:
        alone = tokenizer(text=row["prompt"])["input_ids"]
        while alone and alone[-1] in specials:  # of a tokenizer that ends each text
            alone.pop()
        if tokenizer(text=row["prompt"] + row["completion"])["input_ids"][: len(alone)] != alone:
            merged.append(row)
    if len(merged) > _TOLERATED_SHARE * len(pairs):
        raise DatasetError(
            f"the last token of {len(merged)} of {len(pairs)} prompts merges with the completion's first",
            evidence=(f"a prompt ends with {merged[0]['prompt'][-20:]!r}, its completion begins with "
                      f"{merged[0]['completion'][:20]!r}",),
            mend='dataset.map(lambda row: {"prompt": row["prompt"].rstrip(), "completion": '
            'row["prompt"][len(row["prompt"].rstrip()):] + row["completion"]})',
            regardless='template_check="warn"',
        )  # fmt: skip


def trained_questions(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """What to say where completions hold turns that are not the assistant's: they are trained on as answers are."""
    completions = [row["completion"] for row in rows if isinstance(row.get("completion"), list)]
    others = [{str(turn.get("role")) for turn in turns} - {"assistant"} for turns in completions]
    if not any(others):
        return None
    roles = ", ".join(sorted(set().union(*others)))
    return (
        f"{sum(map(bool, others))} of {len(completions)} completions hold turns of {roles}, which are trained on as "
        "answers are. assistant_only_loss=True leaves them out (with a template that marks answers), or put all but "
        "the last answer into the prompt"
    )
