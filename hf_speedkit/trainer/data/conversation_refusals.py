"""What conversations hold that nothing follows: roles no template knows, marks nobody reads, values Arrow filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_speedkit.core.errors import DatasetError
from hf_speedkit.trainer.data.conversation_checks import Messages, Render, rendered_or_none

ROLES = ("system", "developer", "user", "assistant", "tool")
"""What chat templates know between them; a template that knows another writes its messages out, and is left alone."""

_RENAME = (
    'roles = {"human": "user", "gpt": "assistant"}; dataset = dataset.map(lambda row: {"messages": [{"role": '
    'roles.get(m["from"], m["from"]), "content": m["value"]} for m in row["conversations"]]}, '
    'remove_columns="conversations")'
)
_FOREIGN_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
# By which OpenAI's format, axolotl and ms-swift keep single messages out of the loss.
_MESSAGE_WEIGHTS = ("weight", "train", "training", "loss")


def refuse_missing_template(tokenizer: Any, conversations: Sequence[tuple[Messages, dict[str, Any]]]) -> None:
    """Refuse conversations where the tokenizer, mostly a base model's, has no chat template to write them with.

    Raises:
        DatasetError: what to do.
    """
    if conversations and not getattr(tokenizer, "chat_template", None):
        raise DatasetError(
            "the data are conversations, and the tokenizer has no chat template",
            mend="the tokenizer of the instruct model, or chat_template_path=FOLDER_OR_FILE.jinja",
        )


def refuse_foreign_roles(conversations: Sequence[tuple[Messages, dict[str, Any]]], render: Render) -> None:
    """Refuse roles that the template leaves out without a word, such as ShareGPT's "human" and "gpt".

    Args:
        conversations: see `conversations_of`.
        render: as for training.

    Raises:
        DatasetError: the roles, and the line of code that renames them.
    """
    for messages, arguments in conversations:
        foreign = [message for message in messages if message["role"] not in ROLES]
        text = rendered_or_none(render, messages, arguments) if foreign else None
        if text is None and {message["role"] for message in messages} & set(_FOREIGN_ROLES):
            raise DatasetError(
                f"the chat template refuses conversations with the roles {', '.join(_roles(messages))}",
                evidence=(f"roles that templates know: {', '.join(ROLES)}",),
                mend=_RENAME,
            )
        if text is None:
            continue
        texts = [(str(m["role"]), m["content"].strip()) for m in foreign if isinstance(m.get("content"), str)]
        lost = [role for role, content in texts if content not in text]
        if lost:
            raise DatasetError(
                f"the chat template leaves out every message of {', '.join(map(repr, dict.fromkeys(lost)))}",
                evidence=(f"roles that templates know: {', '.join(ROLES)}",),
                mend=_RENAME,
            )


def _roles(messages: Messages) -> dict[str, None]:
    return dict.fromkeys(repr(message["role"]) for message in messages)


def written_roles(conversations: Sequence[tuple[Messages, dict[str, Any]]], render: Render) -> str | None:
    """What to say where a template writes ShareGPT's roles out, which at inference are user and assistant.

    Args:
        conversations: see `conversations_of`.
        render: as for training.
    """
    for messages, arguments in conversations:
        known = [{**m, "role": _FOREIGN_ROLES.get(str(m["role"]), m["role"])} for m in messages]
        if known == list(messages):
            continue
        texts = [rendered_or_none(render, one, arguments) for one in (messages, known)]
        if None not in texts and texts[0] != texts[1]:
            strangers = dict.fromkeys(str(m["role"]) for m in messages if m["role"] in _FOREIGN_ROLES)
            return (
                f"the chat template writes the roles {', '.join(map(repr, strangers))} out; at inference they are "
                f"user and assistant. Rename them: {_RENAME}"
            )
    return None


def refuse_weighed_messages(conversations: Sequence[tuple[Messages, dict[str, Any]]]) -> None:
    """Refuse messages that are marked as not to train on, which nothing here follows.

    Args:
        conversations: see `conversations_of`.

    Raises:
        DatasetError: names the mark.
    """
    messages = [message for conversation, _ in conversations for message in conversation]
    for key in _MESSAGE_WEIGHTS:
        masked = sum(message.get(key) is not None and not message[key] for message in messages)
        if masked:
            raise DatasetError(
                f'{masked} of {len(messages)} messages have "{key}": 0 or False, which nothing reads',
                evidence=("they would be trained on like the others",),
                mend="pass tokens and labels of your own, -100 where a token is no target; or leave such conversations "
                "out",
                regardless='template_check="warn"',
            )


def refuse_filled_arguments(conversations: Sequence[tuple[Messages, dict[str, Any]]]) -> None:
    """Refuse tool calls, and template arguments of single rows, that a data set has filled up with None.

    Arrow gives all rows of a column the same fields, so a call of one function gets the parameters of every other, and
    templates write them out: the model learns to call functions with parameters that are null.

    Raises:
        DatasetError: a call has an argument without a value, or a row an argument for the template.
    """
    calls = [call for messages, _ in conversations for message in messages for call in message.get("tool_calls") or ()]
    arguments = [(call.get("function") or call).get("arguments") for call in calls]
    kwargs = [name for _, given in conversations for name, value in given.items() if value is None and name != "tools"]
    if kwargs:
        raise DatasetError(
            f'"chat_template_kwargs" of {len(kwargs)} rows have no value for {kwargs[0]!r}',
            evidence=("Arrow gives each row the names of all others, and to a template None is not the same as none",),
            mend="give every row the same names, or set them for all rows in the config: chat_template_kwargs={...}",
            regardless='template_check="warn"',
        )
    filled = [given for given in arguments if isinstance(given, Mapping) and None in given.values()]
    if filled:
        empty = [name for name, value in filled[0].items() if value is None]
        raise DatasetError(
            f"{len(filled)} of {len(calls)} tool calls have arguments without a value",
            evidence=(
                f"the first: {', '.join(map(repr, empty[:5]))}",
                "Arrow fills a call with the parameters of all other functions, and templates write them out as null",
            ),
            mend='Dataset.from_list(rows, on_mixed_types="use_json") keeps each call as it is',
            regardless='template_check="warn"',
        )
