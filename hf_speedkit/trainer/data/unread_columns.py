"""Columns beside a conversation that belong into its prompt, which no format reads: TRL drops them without a word.

ShareGPT's format, as LLaMA-Factory has it, keeps the system prompt beside the turns; other collections call their tools
`functions` or `tool_defs`. A model that is trained without them answers to prompts that it will never be given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hf_speedkit.trainer.data.conversation_refusals import function_name, one_line, said_in, written

_SYSTEM = ("system", "system_prompt", "system_message")
_TOOLS = ("functions", "tool_defs", "tool_definitions", "tool_schemas", "available_tools")
_CHATS = ("messages", "conversations")


def unread_prompts(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """What to say where a column holds a system prompt or tools that the conversation beside it does not.

    Args:
        rows: as they will be tokenized.
    """
    for columns, beside in ((_SYSTEM, _system_beside), (_TOOLS, _tools_beside)):
        for column in columns:
            lost = [row for row in rows if row.get(column) and beside(row[column], row)]
            if lost:
                what, mend = ("system prompts", _as_turn(lost[0], column)) if columns is _SYSTEM else (
                    "tools", f'dataset = dataset.rename_column("{column}", "tools")'
                )  # fmt: skip
                return (
                    f"the column {column!r} is read by nothing: {what} of {len(lost)} of {len(rows)} rows are left "
                    f"out of what is trained on. Put them in: {mend}"
                )
    return None


def _system_beside(value: Any, row: Mapping[str, Any]) -> bool:
    texts = _prompt_texts(row)
    seen = one_line(" ".join(texts))
    # One word is a name, of the system that wrote the row for example.
    return isinstance(value, str) and len(value.split()) > 1 and bool(texts) and not written(value, seen)


def _tools_beside(value: Any, row: Mapping[str, Any]) -> bool:
    """Whether these are tools, by their names, and neither `tools` nor a prompt of the row has them."""
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return False
    names = [name for name in map(function_name, given if isinstance(given, list) else [given]) if name]
    seen = " ".join(_prompt_texts(row))
    conversation = any(isinstance(row.get(column), list) for column in (*_CHATS, "prompt"))
    return conversation and bool(names) and not row.get("tools") and not any(str(name) in seen for name in names)


def _prompt_texts(row: Mapping[str, Any]) -> list[str]:
    """All that a row says, but for its calls; none where it is one text, which may say anything."""
    if isinstance(row.get("prompt"), str):
        return [row["prompt"]]
    turns: Any = next((row[column] for column in (*_CHATS, "prompt") if isinstance(row.get(column), list)), [])
    contents = [turn.get("content", turn.get("value")) for turn in turns if isinstance(turn, Mapping)]
    return [text for content in contents for text in said_in(content)]


def _as_turn(row: Mapping[str, Any], column: str) -> str:
    turns = next((name for name in (*_CHATS, "prompt") if isinstance(row.get(name), list)), None)
    if turns is None:
        return "at the beginning of each prompt"
    role, content = ("from", "value") if row[turns] and "from" in row[turns][0] else ("role", "content")
    return (
        f'dataset = dataset.map(lambda row: {{"{turns}": [{{"{role}": "system", "{content}": row["{column}"]}}, '
        f'*row["{turns}"]]}})'
    )
