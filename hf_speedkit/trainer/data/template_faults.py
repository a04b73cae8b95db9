"""Whose fault it is that a chat template fails: its own, with the line, or that of a conversation, with the row.

And conversations that write themselves what the template writes around their messages.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_speedkit.core.errors import ConfigurationError, DatasetError, SpeedkitError
from hf_speedkit.trainer.data.conversation_checks import (
    Messages,
    Render,
    conversations_of,
    rendered_or_none,
    unrenderable,
)
from hf_speedkit.trainer.data.conversation_refusals import said_in

_PLAINEST: Messages = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"})
_SHOWN_CHARACTERS = 100


def refuse_broken_template(
    conversations: Sequence[tuple[Messages, dict[str, Any]]], render: Render, template: Any = None
) -> None:
    """Refuse a template that is no Jinja, or that fails on all conversations and on the plainest there is.

    Args:
        conversations: see `conversations_of`.
        render: with that template.
        template: its text, to show the line that fails.

    Raises:
        ConfigurationError: the template's line, and what it says.
    """
    failure = None
    for messages, arguments in conversations:
        failure = _failure(render, messages, arguments)
        if failure is None:
            return
        if _is_syntax(failure):
            break
    if failure is None:
        return
    plain = failure if _is_syntax(failure) else _failure(render, _PLAINEST, conversations[0][1])
    if plain is None:
        return  # it can be used, and the conversations are at fault
    line = template_line(plain)
    where = "" if line is None else f" in line {line}"
    evidence = (
        () if _is_syntax(plain) else ("it writes neither any of the conversations, nor a plain question and answer",)
    )
    raise ConfigurationError(
        f"the chat template fails{where}: {type(plain).__name__}: {plain}",
        evidence=(*_shown(template, line), *evidence),
        mend="mend that line (chat_template.jinja beside the tokenizer, or chat_template_path=FILE.jinja); a name that "
        "it misses may also come from chat_template_kwargs",
    ) from plain


def template_line(error: BaseException) -> int | None:
    """The line of a template in which an error arose, from 1; None where it arose elsewhere."""
    if _is_syntax(error):
        return int(error.lineno)  # type: ignore[attr-defined]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return lines[-1] if lines else None


def named_failure(rows: Iterable[Mapping[str, Any]], render: Render) -> DatasetError | None:
    """The refusal of the first row that a template fails on, with its number; None where there is none.

    Args:
        rows: of a whole dataset: each is rendered, for something has failed already.
        render: as for training.
    """
    for number, row in enumerate(rows):
        for messages, arguments in conversations_of([row]):
            failure = _failure(render, messages, arguments)
            if failure is not None:
                return unrenderable(messages, failure, row=number)
    return None


def _failure(render: Render, messages: Messages, arguments: Mapping[str, Any]) -> Exception | None:
    try:
        render(messages, **arguments)
    except SpeedkitError:
        raise
    except Exception as error:  # noqa: BLE001 - a template is a program: it may raise anything
        return error
    return None


def _is_syntax(error: BaseException) -> bool:
    from jinja2 import TemplateSyntaxError

    return isinstance(error, TemplateSyntaxError)


def _shown(template: Any, line: int | None) -> tuple[str, ...]:
    lines = template.splitlines() if isinstance(template, str) else []
    if line is None or not 0 < line <= len(lines):
        return ()
    return (f"line {line}: {lines[line - 1].strip()[:_SHOWN_CHARACTERS]}",)


def marks_in_contents(
    conversations: Sequence[tuple[Messages, dict[str, Any]]], render: Render, tokenizer: Any
) -> str | None:
    """What to say where messages hold special tokens that begin and end turns: they become such tokens.

    Mostly a conversation was rendered before, by another template or the same, or an answer ends with an end token of
    its own; text about models holds them too (huggingface/transformers#29279).

    Args:
        conversations: see `conversations_of`.
        render: as for training.
        tokenizer: whose special tokens are looked for, those that the template writes by itself.
    """
    plain = rendered_or_none(render, _PLAINEST, {}) or ""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    marks = [token.content for token in added if token.special and token.content.strip() and token.content in plain]
    texts = [
        " ".join(text for message in messages for text in said_in(message.get("content")))
        for messages, _ in conversations
    ]
    found = [next((mark for mark in marks if mark in text), None) for text in texts]
    holding = [mark for mark in found if mark is not None]
    if not holding:
        return None
    return (
        f"{holding[0]!r} stands in what messages say, in {len(holding)} of {len(found)} conversations: the tokenizer "
        "makes of it what it makes of the template's own, so a turn begins or ends there. Take such marks out; text "
        'that was rendered before belongs in a column "text"'
    )
